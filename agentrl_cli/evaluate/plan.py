"""The models and tasks of an evaluation, found before the first attempt is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, UsageError
from agentrl_cli.evaluate.run import HELDOUT, Settings, has_split, pick_tasks
from agentrl_cli.models.load import model_folder
from agentrl_cli.store import Store
from agentrl_cli.store.checkpoint_names import explain_best, full_name, trained_by
from agentrl_cli.tasks import load_packs
from agentrl_cli.tasks.texts import apply_texts
from agentrl_cli.types import Task

BENCHES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "math": {"math-task": ("test", "heldout", "test-4shot", "test-calculator", "test-python")},
    "math-hub": {
        "math-task": ("gsm8k", "gsm8k-8shot", "gsm8k-calculator", "math500", "math500-python")
    },
    "tools": {
        name: ("test", "heldout")
        for name in ("calc-task", "code-task", "file-task", "parallel-task", "sql-task")
    },
}
"""Sets of packs, with the splits of each."""


@dataclass(frozen=True, slots=True)
class Request:
    """The models that a user names. Raises UsageError for names that exclude each other."""

    checkpoint: str | None = None
    compare_to: str | None = None
    run: str | None = None
    several: tuple[str | None, ...] = ()
    """Models and endpoints side by side, in place of the others."""

    def __post_init__(self) -> None:
        for what, value, hint in (
            ("A checkpoint", self.checkpoint, "Write --model RUN@STEP."),
            ("--run", self.run, "Write --model RUN@best."),
            ("--compare-to", self.compare_to, "Name it with --model: every pair is compared."),
        ):
            if self.several and value is not None:
                raise UsageError(
                    f"{what} and models of --model or --endpoint exclude each other.", hint=hint
                )


@dataclass(frozen=True, slots=True)
class Plan:
    """The models to evaluate, and on which tasks. Names are those of `load_policy`; None is the configured model."""

    candidates: tuple[str | None, ...]
    """The base first if there are two."""
    tasks: tuple[Task, ...]
    settings: Settings
    resume: bool
    several: bool = False
    """The candidates are models side by side, none of them the base of another."""


def make_plan(
    config: Config,
    base: Path,
    db: Path,
    request: Request,
    splits: Sequence[str] = (),
    *,
    with_tools: bool = True,
    resume: bool = False,
    whole_split: bool = False,
    narrate: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan an evaluation of `splits`, by default `eval.split` and the held-out families.

    `whole_split`: only `eval.limit` bounds the tasks; otherwise the smaller of it and `task.limit` does.
    Raises ConfigError without tasks, UsageError, NotFound.
    """
    loaded = load_packs(config.task.packs, base=base, agent=config.task.agent)
    packs = apply_texts(loaded.values(), config.task.prompts, base)
    held_out = any(has_split(pack, HELDOUT) for pack in packs.values())
    names = list(splits) or [config.eval.split, *([HELDOUT] if held_out else [])]
    limits = [config.eval.limit, None if whole_split else config.task.limit]
    limit = min((number for number in limits if number is not None), default=None)
    tasks = pick_tasks(
        packs, list(dict.fromkeys(names)), families=config.task.families, limit=limit
    )
    if not tasks:
        raise ConfigError(f"No tasks to evaluate in {', '.join(names)}.")
    db.parent.mkdir(parents=True, exist_ok=True)
    with Store.open(db) as store:
        candidates = request.several or _base_and_checkpoint(
            config.model.name, store, request, narrate
        )
        for candidate in candidates:
            _require_model(config, base, store, candidate)
    settings = Settings.of(config, with_tools=with_tools)
    return Plan(candidates, tuple(tasks), settings, resume, bool(request.several))


def _base_and_checkpoint(
    model: str, store: Store, request: Request, narrate: Callable[[str], None]
) -> tuple[str | None, ...]:
    """Return the base and a checkpoint, or one of them alone."""
    checkpoint = full_name(store, request.checkpoint, request.run)
    origin = trained_by(store, checkpoint)
    within = request.run or (origin[0].name if origin else None)
    if doubt := explain_best(store, checkpoint):
        narrate(doubt)
    if checkpoint is None and request.checkpoint is None:
        narrate("Nothing was trained here yet: evaluating the base alone. `agentrl train` trains.")
    compare_to = request.compare_to or "base"
    if compare_to == "none" or (checkpoint is None and compare_to == "base"):
        return (checkpoint,)
    # By default, a run's checkpoint is compared with the model that the run started from.
    other = full_name(store, compare_to, within) if within or compare_to != "base" else None
    same = other == checkpoint or (other is None and checkpoint == model)
    return (checkpoint,) if same else (other, checkpoint)


def _require_model(config: Config, base: Path, store: Store, candidate: str | None) -> None:
    """Raise for a missing model before another one is evaluated."""
    spec, served = endpoint_config(config, candidate)
    if served is not config:
        if not served.remote.model:
            raise UsageError(
                f"--endpoint {candidate} names no model.", hint="Write --endpoint NAME@URL."
            )
        return
    name = spec or config.model.name
    if name != "scripted":
        model_folder(name, config.model, base=base, store=store)


def endpoint_config(config: Config, candidate: str | None) -> tuple[str | None, Config]:
    """Return a candidate's name for `load_policy` and its configuration; that of NAME@URL samples there."""
    name, at, url = (candidate or "").partition("@")
    if not at or not url.startswith(("http://", "https://")):
        return candidate, config
    there = {"backend": {"name": "openai", "mode": "chat"}, "url": url, "model": name}
    if config.model.name == "scripted":  # it has no tokenizer to count the server's tokens with
        config = config.replace(model={"name": "tiny"})
    return None, config.replace(remote=there)
