"""Healing (`train.heal`): after steps that were too large, back to the best checkpoint, and then smaller ones.

Everything is decided from the store's records of the run, so that a resume decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl_cli.config import TrainConfig
from agentrl_cli.reports.course import WINDOW
from agentrl_cli.reports.diagnosis import RULES, diagnose
from agentrl_cli.reports.evidence import LEAST, Evidence, describe_change
from agentrl_cli.store import CheckpointRow, RunRow, Store
from agentrl_cli.store.journal import HEALED
from agentrl_cli.trainer.checkpoints import Checkpoints

MOST = 3
"""Changes of a run."""
SURE, DRIFTS = ("nan", "collapse"), ("entropy_collapse", "kl_drift", "clip_drift")
"""Rules that are certain by themselves, and those that are if the share solved has fallen too."""
RISEN, NEVER = 3.0, 5.0
"""Divisors of the learning rate: of a run that had risen before it fell, and of one that never had."""
AFTER, CLEARLY = 3, 0.05
"""Steps after a checkpoint that show its worth; how much more than the best by evaluation another must solve."""


def certain(evidence: Evidence) -> str:
    """Return the rule by which the newest steps were surely too large, "" if none."""
    wide = replace(evidence, width=WINDOW)
    found = {one.name for one in diagnose(wide, [r for r in RULES if r.name in SURE + DRIFTS])}
    names = SURE if not has_fallen(evidence) else SURE + DRIFTS
    return next((name for name in names if name in found), "")


def has_fallen(evidence: Evidence) -> bool:
    """Whether fewer tasks were solved in the last steps than in the best ones, by more than steps differ."""
    solved = evidence.series("solved")
    means = [fmean(solved[end - WINDOW : end]) for end in range(WINDOW, len(solved) + 1)]
    return len(means) > WINDOW and max(means) - means[-1] > 2 * CLEARLY


def choose(
    found: Sequence[CheckpointRow], steps: Sequence[Mapping[str, Any]], changes: Sequence[int]
) -> CheckpointRow:
    """Return the checkpoint from which most was solved in its next steps; the best by evaluation unless one is clearly
    better.

    `changes`: steps after which a run went back: later ones do not show the worth of an earlier checkpoint.
    """
    solved = {int(row["step"]): float(row["solved"]) for row in steps if "solved" in row}

    def worth(one: CheckpointRow) -> tuple[float, int]:
        end = min([one.step + AFTER, *(step for step in changes if step > one.step)])
        after = [solved[n] for n in range(one.step + 1, end + 1) if n in solved]
        return (fmean(after) + CLEARLY * (one.kind == "best") if after else -1.0), one.step

    return max((one for one in found if one.kind != "last"), key=worth)


def lower(lr: float, steps: Sequence[Mapping[str, Any]], back: int) -> float:
    """Return the learning rate to continue with from the checkpoint of step `back`, from the steps that were made.

    Warm-up counts: a run that fell while its rate still rose goes on below the rate of the steps that were sound.
    """
    rows = [row for row in steps if 0 < row["step"] <= back and "learning_rate" in row]
    solved = [float(row["solved"]) for row in rows if "solved" in row]
    risen = len(solved) > 1 and fmean(solved[-AFTER:]) - fmean(solved[:AFTER]) > LEAST
    sound = min([lr, *(float(row["learning_rate"]) for row in rows[-1:])])
    return float(f"{sound / (RISEN if risen else NEVER):.3g}")


@dataclass
class Healer:
    """Makes the changes of one run."""

    train: TrainConfig
    run: RunRow
    store: Store
    checkpoints: Checkpoints
    keep: Callable[[], None]
    """Stores the settings of the run."""

    def anchor(self, step: int) -> str:
        """Return the folder of the checkpoint that a healing now would load; "" if the run does not heal."""
        return self._find(step)[0].path if self.train.heal else ""

    def _find(self, step: int) -> tuple[CheckpointRow, list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the best checkpoint, the steps until this one (a killed run has later ones too) and the changes."""
        made = self.store.journal.healed(self.run.id)
        rows = [row for row in self.store.runs.steps(self.run.id) if row["step"] <= step]
        found = self.store.runs.checkpoints(self.run.id)
        return choose(found, rows, [change["step"] for change in made]), rows, made

    def heal(self, step: int, rule: str, best: float | None) -> tuple[str, str]:
        """Load the best checkpoint and lower `train.lr`; after MOST times only load it.

        Returns a sentence, and why the run ends, "" if it goes on.
        """
        back, rows, made = self._find(step)
        self.checkpoints.load(Path(back.path))
        if len(made) == MOST:
            tried = " → ".join(f"{lr:g}" for lr in (made[0]["from"], *(c["to"] for c in made)))
            text = f"{rule} again after {MOST} changes of train.lr ({tried})"
            return f"{text}; the last weights are those of step {back.step}", text
        lr = lower(self.train.lr, rows, back.step)
        change = {"step": step, "rule": rule, "key": "train.lr", "from": self.train.lr, "to": lr}
        change["back"] = back.step

        def record() -> None:
            for group, *_ in self.store.stats.groups(self.run.id, step):
                self.store.marks.retire(self.run.id, group)  # sampled ahead, by what is left
            self.store.journal.add_event(self.run.id, HEALED, change)
            self.keep()

        self.train.lr = lr
        self.checkpoints.save("step", step, best, record)
        return describe_change(change), ""
