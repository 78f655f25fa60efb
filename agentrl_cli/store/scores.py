"""Score sets: rewards and advantages that episodes would have had, beside those of their training."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.store.codec import dumps, loads
from agentrl_cli.store.file import Part
from agentrl_cli.store.rows import build

_PUT = "INSERT INTO scores (set_id, episode_id, reward, delta, advantage, fact, parts, turns) VALUES (?,?,?,?,?,?,?,?)"
_GET = (
    "SELECT t.name, s.episode_id, s.reward, s.delta, s.advantage, s.fact, s.parts, s.turns"
    " FROM scores s JOIN score_sets t ON t.id=s.set_id"
)


@dataclass(frozen=True, slots=True)
class Score:
    """One episode in one score set."""

    name: str
    """Name of the set."""
    episode_id: str
    reward: float
    delta: float
    """`reward` − the stored reward."""
    advantage: float | None
    fact: str
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """name → (value, weight)"""
    turns: Sequence[float] = ()
    """Mean advantage of each assistant turn."""


class Scores(Part):
    """Writing and reading score sets."""

    def add(
        self, run_id: str | None, name: str, rows: Sequence[Score], spec: Mapping[str, Any]
    ) -> str:
        """Store a set in one transaction; a name that the run has gets a number. Returns the name.

        `spec`: the changed weights, functions and estimator.
        """
        with self.file.transaction() as conn:
            taken = {
                row[0]
                for row in conn.execute("SELECT name FROM score_sets WHERE run_id IS ?", (run_id,))
            }
            free = next(
                n
                for n in (name, *(f"{name}-{k}" for k in range(2, len(taken) + 3)))
                if n not in taken
            )
            cursor = conn.execute(
                "INSERT INTO score_sets (run_id, name, at, spec) VALUES (?,?,?,?)",
                (run_id, free, time.time(), dumps(dict(spec))),
            )
            conn.executemany(
                _PUT,
                [
                    (cursor.lastrowid, s.episode_id, s.reward, s.delta, s.advantage, s.fact, dumps(dict(s.parts)),
                     dumps(list(s.turns)))
                    for s in rows
                ],
            )  # fmt: skip
        return free

    def sets(self, run_id: str | None) -> list[tuple[str, float, dict[str, Any], int]]:
        """Return (name, time, `spec`, number of episodes) of a run's score sets, oldest first."""
        sql = (
            "SELECT t.name, t.at, t.spec, count(s.episode_id) FROM score_sets t LEFT JOIN scores s ON s.set_id=t.id"
            " WHERE t.run_id IS ? GROUP BY t.id ORDER BY t.id"
        )
        return [
            (name, at, loads(spec), count)
            for name, at, spec, count in self.file.select(sql, (run_id,))
        ]

    def get(self, episode_id: str) -> list[Score]:
        """Return the scores of an episode, oldest set first."""
        rows = self.file.select(f"{_GET} WHERE s.episode_id=? ORDER BY t.id", (episode_id,))
        return [build(Score, row, parts=loads(row[6]), turns=tuple(loads(row[7]))) for row in rows]

    def remove(self, run_id: str | None, name: str) -> int:
        """Delete a score set. Returns how many there were (0 or 1)."""
        with self.file.transaction() as conn:
            return conn.execute(
                "DELETE FROM score_sets WHERE run_id IS ? AND name=?", (run_id, name)
            ).rowcount
