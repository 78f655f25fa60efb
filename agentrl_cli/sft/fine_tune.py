"""Fine-tuning of a configured model, on the data that a user names, into a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError
from agentrl_cli.models.checkpoint import written_whole
from agentrl_cli.models.save import save_model
from agentrl_cli.policies.load import load_policy
from agentrl_cli.sft import from_file
from agentrl_cli.sft.demonstrations import Recipe
from agentrl_cli.sft.from_store import batches, choose
from agentrl_cli.sft.train import train, with_demonstrations
from agentrl_cli.store import Store
from agentrl_cli.tasks import Pack, load_packs
from agentrl_cli.types import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data to train on: the packs' demonstrations, unless a file or episodes of the store are named."""

    file: Path | None = None
    """Conversations, in JSONL."""
    filter: str | None = None
    """Episodes of the store, in the language of `ls --filter`."""
    best_of: int | None = None
    epochs: int = 2
    """Passes over the file or the episodes, if the steps are not given."""
    demonstrations: float = 0.0
    """Share of demonstrations in each step, beside the store's episodes."""


def fine_tune(
    config: Config,
    base: Path,
    db: Path,
    out: Path,
    data: Data,
    given: Mapping[str, Any],
    *,
    start: Callable[[int], Callable[[int, float, float], None]],
    narrate: Callable[[str], None],
) -> None:
    """Train the configured model and write it into `out`.

    `given`: settings of `Recipe`. `start` gets the number of steps and returns a function to call after each.
    Raises ConfigError, NotFound, UsageError, ModelError.
    """
    stored = data.filter is not None
    alone = data.file is not None or (stored and not data.demonstrations)
    packs = {} if alone else load_packs(config.task.packs, base=base)
    _require_demonstrations(packs)
    rows = from_file.read(data.file) if data.file is not None else []
    seed = int(given.get("seed", config.seed))
    with Store.open(db) if stored else contextlib.nullcontext() as store:
        loaded = load_policy(None, config, base=base, store=store, trainable=True)
        vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])
        episodes = (
            []
            if store is None
            else _take_episodes(store, data, loaded.hash, vocabulary, out.name, narrate)
        )
    share = data.demonstrations
    shown = min(Recipe.rows - 1, max(1, round(share * Recipe.rows))) if share else 0
    count, each = (len(episodes), Recipe.rows - shown) if stored else (len(rows), Recipe.rows)
    steps = {} if not count else {"steps": max(1, -(-data.epochs * count // each))}
    recipe = Recipe(packs=dict.fromkeys(packs, 1.0), **{**steps, **given, "seed": seed})
    stream = None
    if data.file is not None:
        stream = from_file.batches(loaded.chat, rows, min(each, count), seed)
    elif stored:
        stream = batches(episodes, min(each, count), seed)
        if shown:
            stream = with_demonstrations(stream, loaded.chat, packs, recipe, shown)
    report = start(recipe.steps)
    budget = config.train.token_budget
    train(loaded.model, loaded.chat, packs, recipe, report, batches=stream, budget=budget)
    assert loaded.folder is not None
    with written_whole(out, keep=True) as folder:
        save_model(loaded.model, loaded.folder, folder)


def _require_demonstrations(packs: Mapping[str, Pack]) -> None:
    for pack in packs.values():
        if not hasattr(pack.module, "demonstrate") and not pack.solver:
            raise ConfigError(
                f"The pack {pack.name} has no demonstrations.",
                hint="Its task.py needs `solve(row)` or `demonstrate(row, rng, tool_rate)`; or use --from-store, or"
                " --teacher.",
            )


def _take_episodes(
    store: Store,
    data: Data,
    tokenizer: str,
    vocabulary: int,
    name: str,
    narrate: Callable[[str], None],
) -> list[Episode]:
    """Return the episodes to train on, tagged with their use, so that `ls -f tag:sft-NAME` lists them."""
    found = choose(
        store,
        data.filter or "",
        tokenizer,
        best_of=data.best_of,
        vocabulary=vocabulary,
        narrate=narrate,
    )
    tasks = len({(episode.pack, episode.task_id) for episode in found})
    rewards = [episode.graded_reward for episode in found if episode.graded]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "not graded"
    narrate(f"{len(found)} episodes of {tasks} tasks, {mean}; tagged sft-{name}")
    with store.transaction():
        for episode in found:
            store.marks.tag(episode.id, f"sft-{name}")
    return found
