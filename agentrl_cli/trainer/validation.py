"""The tasks that a training evaluates on: not trained on, and if possible not those that `agentrl eval` reports.

The best checkpoint is chosen by them, so its evaluation on the same tasks would be too good.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl_cli.config.records import TrainerSettings
from agentrl_cli.evaluate import pick_tasks, spread
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tasks import SPLITS, Pack
from agentrl_cli.types import Task

HELD_OUT = "held_out"
"""The event with the tasks that a run holds out: a resume holds out the same ones, whatever its settings are."""
MEASURE = "measure"
"""The event with what a run's evaluations measure: the ids of their tasks, and settings."""
LIMITS = {
    *("max_turns", "max_new_tokens", "max_tokens", "max_parallel_calls", "max_user_turns"),
    *("response_tokens", "observation", "truncation", "stop"),
}
"""Settings under `rollout` that an evaluation's numbers depend on."""
OTHER_MEASURE = (
    "From step {step} on evaluations have other tasks or settings than before: the best checkpoint is chosen by"
    " these alone."
)
SHARE = 10
"""One in this many training tasks is held out."""


def validation(
    config: TrainerSettings,
    packs: Mapping[str, Pack],
    train: Sequence[Task],
    store: Store,
    run: RunRow,
    narrate: Callable[[str], None],
) -> tuple[list[Task], list[Task]]:
    """Return the training tasks that remain, and those of an evaluation during training; empty until one is due.

    Those are the split `train.eval.split`; of a pack without it, a seeded tenth of its training tasks, held out.
    """
    kept: list[str] = (store.journal.newest_event(run.id, HELD_OUT) or {}).get("tasks", [])
    if not kept and run.step == 0 and config.train.eval.every:
        kept = _draw(config, packs, train)
        if kept:
            store.journal.add_event(run.id, HELD_OUT, {"tasks": kept})
            narrate(
                f"{len(kept)} of {len(train)} training tasks are held out to choose the best checkpoint:"
                f" no split {config.train.eval.split!r} (train.eval.split)"
            )
    held, split, families = set(kept), config.train.eval.split, config.task.families
    own = [
        task
        for pack in packs.values()
        if split in (*pack.splits(), *pack.variants)
        for task in pack.tasks(split)
    ]
    tasks = [task for task in own if families is None or task.family in families]
    tasks += [task for task in train if task.id in held]
    if not tasks and config.train.eval.every:
        tasks = fallback(config, packs, narrate)
    left = [task for task in train if task.id not in held]
    return left, spread(tasks, config.train.eval.tasks)


def fallback(
    config: TrainerSettings, packs: Mapping[str, Pack], narrate: Callable[[str], None]
) -> list[Task]:
    """Tasks of `eval.split` if nothing else is left, else of training. Raises NotFound for a split of another name."""
    split, why = config.eval.split, "which `agentrl eval` reports too"
    if split in SPLITS and not any(split in pack.splits() for pack in packs.values()):
        split, why = "train", "which it is trained on"
    narrate(
        f"the best checkpoint is chosen on the split {split!r}, {why}: there is no split {config.train.eval.split!r}"
        " (train.eval.split), and no training task was held out"
    )
    return spread(
        pick_tasks(packs, [split], families=config.task.families), config.train.eval.tasks
    )


def restart_curve(
    config: TrainerSettings, tasks: Sequence[Task], store: Store, run: RunRow, step: int
) -> bool:
    """Whether evaluations measure otherwise than they did before: those from `step` on are forgotten then."""
    now = {
        "tasks": sorted(task.id for task in tasks),
        "samples": config.train.eval.samples,
        "temperature": config.eval.temperature,
        "rollout": config.rollout.model_dump(mode="json", include=LIMITS),
    }
    before = store.journal.newest_event(run.id, MEASURE)
    if before == now:
        return False
    with store.transaction():
        store.journal.add_event(run.id, MEASURE, now)
        if before is not None:
            store.marks.retire_evals(run.id, step)
    return before is not None


def sampling_of(config: TrainerSettings) -> dict[str, Any]:
    """Return the settings by which episodes of a training are sampled and scored."""
    return {
        "rollout": config.rollout.model_dump(mode="json", include={*LIMITS, "temperature"}),
        "rewards": dict(config.rewards),
    }


def _draw(config: TrainerSettings, packs: Mapping[str, Pack], train: Sequence[Task]) -> list[str]:
    """Ids of the tasks to hold out: a tenth of every pack without the split, at most an evaluation's tasks."""
    held: list[str] = []
    for name, pack in packs.items():
        own = [task.id for task in train if task.pack == name]
        if config.train.eval.split not in (*pack.splits(), *pack.variants):
            count = min(len(own) // SHARE, config.train.eval.tasks)
            held += random.Random(f"{name} held out {config.seed}").sample(own, count)
    return held
