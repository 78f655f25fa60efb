"""Additions to episodes after they are written: training signals, dispositions, drift, tags, notes and scores.

A score set holds rewards and advantages that episodes would have had, beside those of their training.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl_cli.errors import NotFound
from agentrl_cli.store.codec import (
    I1,
    SIGNALS,
    clean,
    decoding,
    dumps,
    loads,
    no_number,
    pack,
    read_array,
)
from agentrl_cli.store.episode_sql import PUT_DRIFT
from agentrl_cli.store.file import Part
from agentrl_cli.store.rows import build
from agentrl_cli.types import Drift, Fact, Float32, Outcome, TrainSignals, read_fact

_SET_SIGNALS = (
    f"UPDATE turn_tokens SET {', '.join(f'{name}=?' for name in (*SIGNALS, 'clipped'))}"
    " WHERE episode_id=? AND idx=?"
)
_NO_PUSH: Float32 = np.empty(0, np.float32)
SAMPLED = 64
"""Episodes that are read to find a run's push scale."""


class Signals(Part):
    """Numbers that training computed per token."""

    def add(self, episode_id: str, signals: TrainSignals) -> None:
        """Queue signals over all tokens of the episode. Raises NotFound, ValueError."""
        rows = self.file.select(
            "SELECT idx, n, advantage IS NOT NULL FROM turn_tokens WHERE episode_id=? ORDER BY idx",
            (episode_id,),
        )
        if not rows:
            raise NotFound(f"No turns of episode {episode_id!r} in {self.file.path}.")
        total = sum(n for _, n, _ in rows)
        if total != len(signals.advantage):
            raise ValueError(
                f"signals have {len(signals.advantage)} tokens, episode {episode_id} has {total}"
            )
        whole = [
            None if (array := getattr(signals, name)) is None else pack(array) for name in SIGNALS
        ]
        clipped, start, written = pack(signals.clipped, I1), 0, False
        for index, n, known in rows:
            parts = [None if data is None else data[4 * start : 4 * (start + n)] for data in whole]
            values = [b"" if data and no_number(data) else data for data in parts]
            last = index == rows[-1][0] and not written
            if any(values) or known or last:  # of turns of NaN one row marks it trained
                written = True
                flags = clipped[start : start + n]
                self.file.write_later(
                    _SET_SIGNALS, (*values, flags if any(flags) else b"", episode_id, index)
                )
            start += n

    def get(self, episode_id: str) -> TrainSignals | None:
        """Return signals over all tokens of the episode; None if it was not trained."""
        names = (*SIGNALS, "clipped")
        sql = f"SELECT n, {', '.join(names)} FROM turn_tokens WHERE episode_id=? ORDER BY idx"
        with decoding(f"The training signals of episode {episode_id}"):
            rows = self.file.select(sql, (episode_id,))
            if all(row[1] is None for row in rows):
                return None
            counts, *columns = zip(*rows, strict=True)
            given = dict(zip(names, columns, strict=True))
            # A training may lack these altogether.
            optional = ("logp_ref", "value", "returns", "logp_teacher", "reward_advantage")
            unused = [name for name in optional if all(blob is None for blob in given[name])]
            arrays = {name: read_array(name, blobs, counts) for name, blobs in given.items()}
            return TrainSignals(**arrays | dict.fromkeys(unused))

    def push_scale(self, run_id: str | None) -> float:
        """Return the 95th percentile of |push| over the run's trained tokens, 0 if there are none.

        Reads at most SAMPLED episodes, evenly spaced in time, so that it costs the same for every length of run.
        """
        rows = self.file.select(
            "SELECT id FROM episodes WHERE run_id IS ? AND fact=? ORDER BY rowid",
            (run_id, str(Fact.TRAINED)),
        )
        every = max(-(-len(rows) // SAMPLED), 1)
        pushes = np.concatenate([_NO_PUSH, *(self._push(row[0]) for row in rows[::every])])
        known = np.abs(pushes[np.isfinite(pushes)])
        return float(np.quantile(known, 0.95)) if len(known) else 0.0

    def most_pushed(self, episode_ids: Iterable[str]) -> str | None:
        """Return the episode whose tokens were pushed most in sum of |push|; the first of equals, None of none."""
        sums = {episode: float(np.nansum(np.abs(self._push(episode)))) for episode in episode_ids}
        return max(sums, key=sums.__getitem__, default=None)

    def _push(self, episode_id: str) -> Float32:
        signals = self.get(episode_id)
        return _NO_PUSH if signals is None else signals.push


RETIRED = "~"
"""Stands in the names of groups whose episodes another group has replaced."""


class Marks(Part):
    """Dispositions and advantages, drift, tags and notes."""

    def set_facts(self, rows: Iterable[tuple[str, str, float | None]]) -> None:
        """Set (episode id, `Fact` value, advantage or None) of the episodes of a step."""
        with self.file.transaction() as conn:
            for episode, fact, advantage in rows:
                known = None if advantage is None or math.isnan(advantage) else float(advantage)
                conn.execute(
                    "UPDATE episodes SET fact=?, advantage=coalesce(?, advantage) WHERE id=?",
                    (str(fact), known, episode),
                )

    def retire(
        self,
        run_id: str,
        group: str,
        episodes: Iterable[str] = (),
        fact: Fact = Fact.SKIPPED_CHANGED,
    ) -> int:
        """Rename a group of a run to GROUP~2 and so on, with a fact that says why: another may take its name.

        With `episodes` only these leave the group, and those that were cancelled. Returns the number of episodes that
        had ended by themselves.
        """
        of = (group, run_id)
        ids = dumps(list(episodes))
        here = "WHERE group_id=?1 AND run_id=?2 AND (?3='[]' OR id IN (SELECT value FROM json_each(?3))"
        here += f" OR outcome='{Outcome.CANCELLED}')"
        with self.file.transaction() as conn:
            names = (f"{group}{RETIRED}{n}" for n in itertools.count(2))
            known = "SELECT 1 FROM groups WHERE id=? AND run_id=?"
            new = next(
                name for name in names if conn.execute(known, (name, run_id)).fetchone() is None
            )
            conn.execute(
                "INSERT INTO groups (id, run_id, task_id, step, at, why, pack)"
                " SELECT ?3, run_id, task_id, step, at, why, pack FROM groups WHERE id=?1 AND run_id=?2",
                (*of, new),
            )
            count = conn.execute(
                f"UPDATE episodes SET fact=?4, advantage=NULL {here} AND kind='train' AND outcome<>?5",
                (*of, ids, fact, Outcome.CANCELLED),
            ).rowcount
            key = "run_id || '/' || step || '/' || ?4 || '/' || sample"
            conn.execute(f"UPDATE episodes SET group_id=?4, key={key} {here}", (*of, ids, new))
            left = "SELECT 1 FROM episodes e WHERE e.group_id=groups.id AND e.run_id=groups.run_id"
            conn.execute(
                f"DELETE FROM groups WHERE id=?1 AND run_id=?2 AND NOT EXISTS ({left})", of
            )
        return count

    def retire_evals(self, run_id: str, step: int) -> None:
        """Forget the evaluations of a run from a step on, and retire the groups of their attempts."""
        attempts = (
            "SELECT DISTINCT group_id FROM episodes WHERE run_id=? AND step>=? AND kind='eval'"
        )
        with self.file.transaction() as conn:
            conn.execute("DELETE FROM evals WHERE run_id=? AND step>=?", (run_id, step))
            for (group,) in conn.execute(attempts, (run_id, step)).fetchall():
                self.retire(run_id, group)

    def add_drift(self, episode_id: str, drift: Drift) -> None:
        """Queue a place where a rendering differs from the ids; for a running episode it is written with it."""
        texts = clean(drift.expected), clean(drift.got)
        row = (episode_id, drift.kind, drift.turn, drift.position, *texts)
        with self.file.lock:
            running = self.file.running(episode_id)
            if running is None:
                self.file.write_later(PUT_DRIFT, row)
            else:
                running.drift.append(row)
                self.file.wake()

    def drift(self, episode_id: str) -> list[Drift]:
        """Return places where a rendering of this episode differed from its ids."""
        sql = "SELECT kind, turn, position, expected, got FROM drift WHERE episode_id=? ORDER BY id"
        return [Drift(*row) for row in self.file.select(sql, (episode_id,))]

    def tag(self, episode_id: str, tag: str) -> None:
        """Add a tag to an episode."""
        self.file.write("INSERT OR IGNORE INTO tags VALUES (?,?,?)", (tag, episode_id, time.time()))

    def untag(self, episode_id: str, tag: str) -> None:
        """Remove a tag from an episode."""
        self.file.write("DELETE FROM tags WHERE tag=? AND episode_id=?", (tag, episode_id))

    def note(self, episode_id: str, text: str) -> None:
        """Set the note of an episode; an empty one removes it."""
        if text:
            self.file.write(
                "INSERT OR REPLACE INTO notes VALUES (?,?,?)",
                (episode_id, clean(text), time.time()),
            )
        else:
            self.file.write("DELETE FROM notes WHERE episode_id=?", (episode_id,))


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
            names = (name, *(f"{name}-{k}" for k in range(2, len(taken) + 3)))
            free = next(n for n in names if n not in taken)
            cursor = conn.execute(
                "INSERT INTO score_sets (run_id, name, at, spec) VALUES (?,?,?,?)",
                (run_id, free, time.time(), dumps(dict(spec))),
            )
            conn.executemany(
                "INSERT INTO scores (set_id, episode_id, reward, delta, advantage, fact, parts, turns)"
                " VALUES (?,?,?,?,?,?,?,?)",
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
        rows = self.file.select(
            "SELECT t.name, s.episode_id, s.reward, s.delta, s.advantage, s.fact, s.parts, s.turns"
            " FROM scores s JOIN score_sets t ON t.id=s.set_id WHERE s.episode_id=? ORDER BY t.id",
            (episode_id,),
        )
        return [
            build(
                Score, row, fact=read_fact(row[5]), parts=loads(row[6]), turns=tuple(loads(row[7]))
            )
            for row in rows
        ]

    def remove(self, run_id: str | None, name: str) -> int:
        """Delete a score set. Returns how many there were (0 or 1)."""
        return self.file.write(
            "DELETE FROM score_sets WHERE run_id IS ? AND name=?", (run_id, name)
        )
