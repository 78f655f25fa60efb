"""Numbers over many episodes, each from one query."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from agentrl_cli.store.codec import marks
from agentrl_cli.store.file import Part
from agentrl_cli.types import Fact, Outcome


class Stats(Part):
    """Counts and means of episodes by group, task, tag and tool."""

    def group(self, group_id: str, run_id: str | None) -> tuple[int, float, float]:
        """Return the number of a group's graded episodes, mean and deviation of their rewards (NaN without any)."""
        rows = self.file.select(
            "SELECT reward FROM episodes WHERE group_id=? AND run_id IS ? AND reward IS NOT NULL",
            (group_id, run_id),
        )
        if not rows:
            return 0, math.nan, math.nan
        rewards = np.array([row[0] for row in rows])
        return len(rows), float(rewards.mean()), float(rewards.std())

    def groups(
        self, run_id: str, step: int, kind: str = "train"
    ) -> list[tuple[str, str, str, int]]:
        """Return (group, pack, task, episodes that ended by themselves) of a run's groups after a step, by name."""
        sql = (
            "SELECT group_id, pack, task_id, count(*) FROM episodes WHERE run_id=? AND step>? AND kind=?"
            " AND outcome<>? AND fact<>? AND group_id IS NOT NULL GROUP BY group_id ORDER BY group_id"
        )
        return self.file.select(sql, (run_id, step, kind, Outcome.CANCELLED, Fact.SKIPPED_CHANGED))

    def task_results(self, run_id: str, until: int) -> list[tuple[str, str, int, int, int]]:
        """Return (pack, task, step, solved, graded) of a training's steps up to `until`; errors are left out."""
        errors = [outcome.value for outcome in Outcome if outcome.is_error]
        return self.file.select(
            "SELECT pack, task_id, step, sum(outcome='solved'), count(*) FROM episodes WHERE run_id=? AND kind='train'"
            f" AND step<=? AND fact<>? AND outcome NOT IN ({marks(len(errors))})"
            " GROUP BY step, pack, task_id ORDER BY step",
            (run_id, until, Fact.SKIPPED_CHANGED, *errors),
        )

    def tasks(self, run: str | None = None) -> list[list[Any]]:
        """Return [task, pack, family, split, episodes, mean reward, share solved] of every task that has episodes.

        The last two are over graded episodes, None without any.
        """
        rows = self.file.select(
            "SELECT task_id, pack, max(family), max(split), count(*), avg(reward),"
            " avg(CASE WHEN reward IS NOT NULL THEN outcome='solved' END) FROM episodes"
            " WHERE ?1 IS NULL OR run_id=?1 GROUP BY pack, task_id ORDER BY pack, task_id",
            (run,),
        )
        return [list(row) for row in rows]

    def episodes(self, run: str | None = None) -> dict[str, int]:
        """Return run id → number of episodes, from an index alone; only of `run` if given."""
        where = "run_id IS NOT NULL" if run is None else "run_id=?"
        sql = f"SELECT run_id, count(*) FROM episodes WHERE {where} GROUP BY run_id"
        return dict(self.file.select(sql, () if run is None else (run,)))

    def tags(self, run: str | None = None) -> dict[str, int]:
        """Return tag → number of episodes with it."""
        sql = (
            "SELECT tag, count(*) FROM tags t JOIN episodes e ON e.id=t.episode_id"
            " WHERE ?1 IS NULL OR e.run_id=?1 GROUP BY tag ORDER BY tag"
        )
        return dict(self.file.select(sql, (run,)))

    def tools(self, run: str | None = None, since: int = 0) -> list[list[Any]]:
        """Return [tool, calls, malformed, failed, mean seconds, slowest, kinds of error] from step `since`.

        The busiest come first. A malformed call never ran; a failed one did, or was refused. One without a readable
        name is `(unreadable)`.
        """
        rows = self.file.select(
            "SELECT CASE WHEN c.name='' THEN '(unreadable)' ELSE c.name END, count(*), sum(c.call_error IS NOT NULL),"
            " sum(c.call_error IS NULL AND c.result_error IS NOT NULL), avg(c.seconds), max(c.seconds),"
            " group_concat(DISTINCT c.result_error)"
            " FROM tool_calls c JOIN episodes e ON e.id=c.episode_id"
            " WHERE (?1 IS NULL OR e.run_id=?1) AND ifnull(e.step, 0)>=?2 GROUP BY 1 ORDER BY 2 DESC",
            (run, since),
        )
        return [list(row) for row in rows]
