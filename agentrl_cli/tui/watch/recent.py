"""The newest episodes of a run by group, and its tools, for the pages of groups, tokens and tools. No textual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl_cli.reports.run_data import GroupRow, count_kinds, group_rows

if TYPE_CHECKING:
    from agentrl_cli.store import Store

NEWEST = 640
"""Episodes of a run, from the newest, that are looked at."""


@dataclass(frozen=True, slots=True)
class Fold:
    """The groups of a step without spread, in one line."""

    step: int
    groups: tuple[GroupRow, ...]
    open: bool
    """Whether they follow it."""

    def text(self) -> str:
        """Return `v  120 5 groups without signal: 3 all solved, 2 all failed`."""
        mark, plural = "v" if self.open else ">", "s" * (len(self.groups) > 1)
        count = f"{len(self.groups)} group{plural} without signal: {count_kinds(self.groups)}"
        return f"{mark} {self.step:>5} {count}"


def fold_groups(groups: Sequence[GroupRow], open_steps: Collection[int]) -> list[GroupRow | Fold]:
    """Return the rows of the page of groups: by step those with spread, then a line for the others."""
    out: list[GroupRow | Fold] = []
    for step in dict.fromkeys(group.step for group in groups):
        flat = tuple(group for group in groups if group.step == step and group.kind)
        out += [group for group in groups if group.step == step and not group.kind]
        if flat:
            shown = step in open_steps
            out += [Fold(step, flat, shown), *(flat if shown else ())]
    return out


@dataclass(frozen=True, slots=True)
class Recent:
    """The data of those pages beyond `RunData`."""

    groups: tuple[GroupRow, ...] = ()
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
    finished = store.runs.get(run_id).step
    last = [row for row in rows if row.step == finished and row.outcome is not None]
    since = max(finished - 19, 0)
    return Recent(
        group_rows(rows),
        tuple(row.n_model_tokens for row in last),
        tuple(Counter(row.fact or "not yet decided" for row in last).most_common()),
        tuple(store.stats.tools(run_id, since)),
        since,
    )
