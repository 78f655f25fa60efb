"""The newest episodes of a run by group, and its tools: what the pages of groups, tokens and tools show. No textual."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_cli.store import EpisodeRow, Store

NEWEST = 640
"""Episodes of a run, from the newest, that are looked at."""


@dataclass(frozen=True, slots=True)
class GroupLine:
    """The attempts at one task in one step."""

    step: int
    task_id: str
    rewards: tuple[float, ...]
    solved: int
    dispositions: tuple[str, ...]
    flags: tuple[str, ...]
    best: str
    """The id of the episode to open."""

    @property
    def spread(self) -> float:
        """Standard deviation of the rewards: a group without spread teaches nothing."""
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else 0.0
        return (
            math.sqrt(sum((r - mean) ** 2 for r in self.rewards) / len(self.rewards))
            if self.rewards
            else 0.0
        )

    @property
    def flat(self) -> bool:
        """Whether it is graded and its rewards are all equal."""
        return bool(self.rewards) and self.spread < 1e-8


@dataclass(frozen=True, slots=True)
class Fold:
    """The groups of a step without spread, in one line."""

    step: int
    groups: tuple[GroupLine, ...]
    open: bool
    """Whether they follow it."""

    def text(self) -> str:
        """`v  120 5 groups without signal: 3 all solved, 2 all failed`."""
        solved = sum(group.solved == len(group.rewards) for group in self.groups)
        failed = sum(not group.solved for group in self.groups)
        rest = len(self.groups) - solved - failed
        counts = ((solved, "all solved"), (failed, "all failed"), (rest, "equal rewards"))
        kinds = ", ".join(f"{count} {name}" for count, name in counts if count)
        mark, plural = "v" if self.open else ">", "s" * (len(self.groups) > 1)
        return f"{mark} {self.step:>5} {len(self.groups)} group{plural} without signal: {kinds}"


def folded(groups: Sequence[GroupLine], open_steps: Collection[int]) -> list[GroupLine | Fold]:
    """Return the rows of the page of groups: by step those with spread, then a line for the others."""
    out: list[GroupLine | Fold] = []
    for step in dict.fromkeys(group.step for group in groups):
        own = [group for group in groups if group.step == step]
        flat = tuple(group for group in own if group.flat)
        out += [group for group in own if not group.flat]
        if flat:
            shown = step in open_steps
            out += [Fold(step, flat, shown), *(flat if shown else ())]
    return out


@dataclass(frozen=True, slots=True)
class Recent:
    """What those pages need beyond `WatchData`."""

    groups: tuple[GroupLine, ...] = ()
    lengths: tuple[int, ...] = ()
    """Sampled tokens of the episodes of the run's last finished step."""
    dispositions: tuple[tuple[str, int], ...] = ()
    """(disposition, count) of those episodes: trained, or skipped and why."""
    tools: tuple[Sequence[Any], ...] = ()
    since: int = 0
    """The first step that `tools` counts."""


def load_recent(store: Store, run_id: str) -> Recent:
    """Return the newest episodes of a run by group, and its tools (in the reader's thread)."""
    rows = store.episodes.rows(store.episodes.ids("kind:train", "-step", run_id, limit=NEWEST))
    groups: dict[tuple[int, str], list[EpisodeRow]] = {}
    for row in rows:
        groups.setdefault((row.step or 0, row.group_id or row.task_id), []).append(row)
    finished = store.runs.get(run_id).step
    last = [row for row in rows if row.step == finished and row.outcome is not None]
    since = max(finished - 19, 0)
    return Recent(
        tuple(_group(step, members) for (step, _), members in groups.items()),
        tuple(row.n_model_tokens for row in last),
        tuple(Counter(row.fact or "not yet decided" for row in last).most_common()),
        tuple(store.stats.tools(run_id, since)),
        since,
    )


def _group(step: int, rows: Sequence[EpisodeRow]) -> GroupLine:
    graded = [
        row for row in rows if row.reward is not None and not (row.outcome and row.outcome.is_error)
    ]
    best = max(graded, key=lambda row: row.reward or 0.0) if graded else rows[0]
    return GroupLine(
        step,
        rows[0].task_id,
        tuple(
            row.reward
            for row in sorted(graded, key=lambda row: row.sample)
            if row.reward is not None
        ),
        sum(str(row.outcome) == "solved" for row in rows),
        tuple(name for name, _ in Counter(row.fact for row in rows if row.fact).most_common()),
        tuple(
            name for name, _ in Counter(flag for row in rows for flag in row.flags).most_common(3)
        ),
        best.id,
    )
