"""Fine-tuning of a configured model, on the data that a user names, into a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, pluralise
from agentrl_cli.models.checkpoint import written_whole
from agentrl_cli.models.save import save_model
from agentrl_cli.policies.load import load_policy
from agentrl_cli.sft import from_file
from agentrl_cli.sft.demonstrations import Recipe
from agentrl_cli.sft.from_store import batches, choose
from agentrl_cli.sft.train import train, with_demonstrations
from agentrl_cli.store import Store
from agentrl_cli.tasks import Pack, load_packs
from agentrl_cli.tasks.texts import apply_texts
from agentrl_cli.types import Episode


def fine_tune(
    config: Config,
    base: Path,
    db: Path,
    out: Path,
    given: Mapping[str, Any],
    *,
    file: Path | None = None,
    filter: str | None = None,
    best_of: int | None = None,
    epochs: int = 2,
    share: float = 0.0,
    start: Callable[[int], Callable[[int, float, float], None]],
    narrate: Callable[[str], None],
) -> None:
    """Train the configured model on the packs' demonstrations and write it into `out`. `given`: settings of `Recipe`.

    `file` has conversations in JSONL to train on instead; `filter` chooses episodes of the store, at most `best_of` of
    each task, with a `share` of demonstrations in each step. `epochs`: passes over these, if no steps are given.
    `start` gets the number of steps and returns a function to call after each. Raises UsageError.
    """
    stored = filter is not None
    packs = _load_packs(config, base) if file is None and (share or not stored) else {}
    rows = from_file.read(file) if file is not None else []
    seed = int(given.get("seed", config.seed))
    # Without a store `RUN@best` would name no checkpoint.
    with Store.open(db) if stored or db.is_file() else contextlib.nullcontext() as store:
        loaded = load_policy(None, config, base=base, store=store, trainable=True)
        episodes: list[Episode] = []
        if stored and store is not None:
            vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])
            episodes = choose(store, filter or "", loaded.hash, best_of, vocabulary, narrate)
            _tag(store, episodes, f"sft-{out.name}", narrate)
    shown = min(Recipe.rows - 1, max(1, round(share * Recipe.rows))) if share else 0
    count = len(episodes) or len(rows)
    size = min(count, Recipe.rows - shown)
    steps = {"steps": -(-epochs * count // size)} if count else {}
    recipe = Recipe(packs=dict.fromkeys(packs, 1.0), **{**steps, **given, "seed": seed})
    stream = None
    if file is not None:
        stream = from_file.batches(loaded.chat, rows, size, seed)
    elif stored:
        stream = batches(episodes, size, seed)
        if shown:
            stream = with_demonstrations(stream, loaded.chat, packs, recipe, shown)
    parts = (loaded.model, loaded.chat, packs, recipe, start(recipe.steps))
    train(*parts, batches=stream, budget=config.train.token_budget)
    assert loaded.folder is not None
    with written_whole(out, keep=True) as folder:
        save_model(loaded.model, loaded.folder, folder)


def _load_packs(config: Config, base: Path) -> dict[str, Pack]:
    """Return the packs with the configured texts. Raises ConfigError for one without demonstrations."""
    loaded = load_packs(config.task.packs, base=base)
    for pack in loaded.values():
        if not hasattr(pack.module, "demonstrate") and not pack.solver:
            raise ConfigError(
                f"The pack {pack.name} has no demonstrations.",
                hint="Its task.py needs `solve(row)` or `demonstrate(row, rng, tool_rate)`; or use --from-store, or"
                " --teacher.",
            )
    return apply_texts(loaded.values(), config.task.prompts, base)


def _tag(store: Store, found: list[Episode], tag: str, narrate: Callable[[str], None]) -> None:
    """Tag the episodes to train on, so that `ls -f tag:sft-NAME` lists them."""
    tasks = len({(episode.pack, episode.task_id) for episode in found})
    rewards = [episode.graded_reward for episode in found if episode.graded]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "not graded"
    narrate(
        f"{pluralise(len(found), 'episode')} of {pluralise(tasks, 'task')}, {mean}; tagged {tag}"
    )
    with store.transaction():
        for episode in found:
            store.marks.tag(episode.id, tag)
