"""Reading episodes: ordered lists of them (one integer each), lines of a list, and whole episodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl_cli.errors import NotFound
from agentrl_cli.store.base import StoreBase, batches
from agentrl_cli.store.codec import blob_floats, decoding, load_metrics, loads, marks, number, tokens_of
from agentrl_cli.store.filters import compile_filter, compile_sort
from agentrl_cli.store.rows import DriftRow, EpisodeRow, build, columns
from agentrl_cli.types import (
    Episode,
    Outcome,
    RewardPart,
    StopReason,
    ToolCall,
    ToolResult,
    TrainSignals,
    Turn,
)

_COLUMNS = columns(EpisodeRow)[:-2]
_PLACE = {name: place for place, name in enumerate(_COLUMNS)}
_ROW = f"SELECT {','.join(_COLUMNS)} FROM episodes"
_TOKENS = "n, ids, origin, logp_sampled, logp_policy, entropy, top_ids, top_logps"
_SIGNALS = "n, advantage, logp_train, ratio, clipped, weight, logp_ref, value, returns"
_CALLS = (
    "SELECT turn, name, call_id, arguments, raw, call_error, result_turn, result, result_error, reward, metrics,"
    " seconds, level, truncated, done, images FROM tool_calls WHERE episode_id=? ORDER BY turn, idx"
)


class EpisodeReader(StoreBase):
    """Everything about episodes."""

    def episode_ids(
        self, filter: str = "", sort: str = "-time", run: str | None = None, limit: int | None = None
    ) -> list[int]:
        """The rowids of the episodes that match, in order, at most `limit`: 100,000 of them in a tenth of a second.

        Raises UsageError for a filter or an order that cannot be, naming the nearest field.
        """
        where, params = compile_filter(filter)
        if run is not None:
            where, params = f"({where}) AND e.run_id=?", [*params, run]
        sql = f"SELECT e.rowid FROM episodes e WHERE {where} ORDER BY {compile_sort(sort)} LIMIT ?"
        return [row[0] for row in self._rows(sql, [*params, -1 if limit is None else limit])]

    def episode_rows(self, rowids: Sequence[int]) -> list[EpisodeRow]:
        """The list lines of episodes, in the order given; one that was deleted meanwhile is left out."""
        found: dict[int, EpisodeRow] = {}
        for part in batches(rowids):
            for row in self._list_lines(f"rowid IN ({marks(len(part))})", part):
                found[row.rowid] = row
        return [found[rowid] for rowid in rowids if rowid in found]

    def episode_row(self, episode_id: str) -> EpisodeRow:
        """The list line of one episode. Raises NotFound naming the nearest."""
        rows = self._list_lines("id=?", (episode_id,))
        return rows[0] if rows else self._list_lines("id=?", (self.resolve_episode(episode_id),))[0]

    def siblings(self, episode_id: str) -> list[EpisodeRow]:
        """All episodes of this one's group, itself included, by sample number; only itself where it has no group."""
        row = self.episode_row(episode_id)
        if row.group_id is None:
            return [row]
        return sorted(
            self._list_lines(
                "group_id=? AND run_id IS ? AND parent_id IS ?", (row.group_id, row.run_id, row.parent_id)
            ),
            key=lambda item: (item.sample, item.rowid),
        )

    def children(self, episode_id: str) -> list[EpisodeRow]:
        """What-ifs of an episode, oldest first."""
        return self._list_lines("parent_id=?", (episode_id,))

    def finished(self, run_id: str, step: int, kind: str = "train") -> dict[str, str]:
        """key → id of the finished episodes of a step: what a resume need not generate again."""
        sql = "SELECT key, id FROM episodes WHERE run_id=? AND step=? AND kind=? AND outcome IS NOT NULL ORDER BY rowid"
        return dict(self._rows(sql, (run_id, step, kind)))

    def resolve_episode(self, name: str, run: str | None = None) -> str:
        """The id meant by `last`, `best`, `worst`, an id, a unique prefix of one or a link `agentrl:ID@t2.31`.

        Raises NotFound naming the nearest.
        """
        scope, params = ("e.run_id=?", [run]) if run else ("1", [])
        errors = [outcome.value for outcome in Outcome if outcome.is_error]
        ungraded = f"outcome NOT IN ({marks(len(errors))})"
        graded = f"SELECT id FROM episodes e WHERE {scope} AND reward IS NOT NULL AND {ungraded}"
        pushed = "abs(coalesce(advantage, 0)) DESC"
        typical = "flags NOT IN ('', '[]'), coalesce(advantage, 0) = 0, abs(coalesce(advantage, 0))"
        queries: dict[str, tuple[str, list[Any]]] = {
            "last": (f"SELECT id FROM episodes e WHERE {scope} ORDER BY outcome IS NULL, started DESC", params),
            # Of equally good ones what is typical, not a fluke: nothing odd in it, trained on, and no lone success of
            # its group (whose advantage is large); the newest of these.
            "best": (f"{graded} ORDER BY reward DESC, {typical}, started DESC", [*params, *errors]),
            # Of equally bad ones the one that pushed the weights most: there is more to see in it.
            "worst": (f"{graded} ORDER BY reward, {pushed}, started DESC", [*params, *errors]),
        }
        if name in queries:
            sql, values = queries[name]
            row = self._row(f"{sql} LIMIT 1", values)
            if row is None:
                raise NotFound(f"There is no {name} episode yet in {self.path}.", hint="`agentrl rollout` makes some.")
            return str(row[0])
        wanted = name.removeprefix("agentrl:").split("@")[0].lower()
        found = self._rows("SELECT id FROM episodes WHERE id>=? AND id<? LIMIT 2", (wanted, wanted + "\U0010ffff"))
        if wanted and found and (len(found) == 1 or found[0][0] == wanted):
            return str(found[0][0])
        raise self._no_episode(wanted, several=len(found) > 1)

    def _no_episode(self, wanted: str, *, several: bool) -> NotFound:
        """Ids are ordered by time, so the nearest are those around it."""
        near = self._rows("SELECT id FROM episodes WHERE id>=? ORDER BY id LIMIT 50", (wanted,))
        if several:
            ids = ", ".join(row[0] for row in near[:5] if row[0].startswith(wanted))
            return NotFound(f"{wanted!r} could be several episodes.", hint=f"Give more of the id: {ids}…")
        near += self._rows("SELECT id FROM episodes WHERE id<? ORDER BY id DESC LIMIT 50", (wanted,))
        hint = "`agentrl ls` lists them; last, best and worst work too."
        return NotFound.of("episode", wanted, [row[0] for row in near], hint=hint)

    def _list_lines(self, where: str, params: Sequence[Any]) -> list[EpisodeRow]:
        rows = self._rows(f"{_ROW} WHERE {where} ORDER BY rowid", params)
        ids = [row[_PLACE["id"]] for row in rows]
        tags: dict[str, list[str]] = {}
        notes: dict[str, str] = {}
        for part in batches(ids):
            inside = f"episode_id IN ({marks(len(part))})"
            for episode, tag in self._rows(f"SELECT episode_id, tag FROM tags WHERE {inside} ORDER BY tag", part):
                tags.setdefault(episode, []).append(tag)
            notes.update(self._rows(f"SELECT episode_id, text FROM notes WHERE {inside}", part))
        outcome, flags = _PLACE["outcome"], _PLACE["flags"]
        lines = []
        for row, episode in zip(rows, ids, strict=True):
            line = build(
                EpisodeRow,
                row,
                outcome=None if row[outcome] is None else Outcome(row[outcome]),
                flags=tuple(loads(row[flags])) if row[flags] else (),
                tags=tuple(tags.get(episode, ())),
                note=notes.get(episode, ""),
            )
            lines.append(line)
        return lines

    # Whole episodes

    def episode(self, episode_id: str) -> Episode:
        """An episode as it was written, or as far as it got. Raises NotFound naming the nearest, StoreError."""
        line = self.episode_row(episode_id)
        with decoding(f"Episode {line.id}"):
            return self._episode(line)

    def _episode(self, line: EpisodeRow) -> Episode:
        tokens = self._rows(f"SELECT {_TOKENS} FROM turn_tokens WHERE episode_id=? ORDER BY idx", (line.id,))
        parts = self._rows(
            "SELECT name, value, weight, is_primary, detail, fakeable FROM reward_parts"
            " WHERE episode_id=? ORDER BY idx",
            (line.id,),
        )
        return Episode(
            id=line.id,
            task_id=line.task_id,
            pack=line.pack,
            family=line.family,
            run_id=line.run_id,
            step=line.step,
            group_id=line.group_id,
            sample=line.sample,
            seed=line.seed,
            kind=line.kind,
            parent_id=line.parent_id,
            parent_turn=line.parent_turn,
            weights_version=line.weights_version,
            turns=tuple(self.turns(line.id)),
            tokens=tokens_of(tokens),
            reward_parts=tuple(
                RewardPart(name, number(value), number(weight), bool(primary), detail, bool(fakeable))
                for name, value, weight, primary, detail, fakeable in parts
            ),
            outcome=line.outcome,
            error=line.error,
            flags=line.flags,
            fact=line.fact,
            advantage=line.advantage,
            started=line.started,
            ended=line.ended,
        )

    def turns(self, episode_id: str) -> list[Turn]:
        """The turns of an episode, in order, with calls and results."""
        calls: dict[int, list[ToolCall]] = {}
        results: dict[int, list[ToolResult]] = {}
        for row in self._rows(_CALLS, (episode_id,)):
            turn, name, call_id, arguments, raw, error, answered = row[:7]
            if call_id is not None:
                calls.setdefault(turn, []).append(ToolCall(call_id, name, loads(arguments), raw, error))
            if answered is not None:
                results.setdefault(answered, []).append(self._result(row[7:]))
        rows = self._rows(
            "SELECT idx, role, messages, token_start, token_end, stop_reason, weights_version, started, seconds,"
            " reward, diverged FROM turns WHERE episode_id=? ORDER BY idx",
            (episode_id,),
        )
        return [
            Turn(
                index=index,
                role=role,
                messages=tuple(loads(messages)),
                start=start,
                end=end,
                calls=tuple(calls.get(index, ())),
                results=tuple(results.get(index, ())),
                stop_reason=None if reason is None else StopReason(reason),
                weights_version=version,
                started=started,
                seconds=seconds,
                reward=reward,
                diverged=bool(diverged),
            )
            for index, role, messages, start, end, reason, version, started, seconds, reward, diverged in rows
        ]

    def _result(self, row: Sequence[Any]) -> ToolResult:
        text, error, reward, metrics, seconds, level, truncated, done, images = row
        return ToolResult(
            text=text,
            error=error,
            reward=reward,
            metrics={} if metrics is None else load_metrics(metrics),
            images=tuple(self._image(digest) for digest in loads(images) or ()),
            seconds=seconds,
            level=level,
            truncated=bool(truncated),
            done=bool(done),
        )

    def _image(self, digest: str) -> bytes:
        row = self._row("SELECT data FROM attachments WHERE hash=?", (digest,))
        return bytes(row[0]) if row else b""

    def signals(self, episode_id: str) -> TrainSignals | None:
        """What training found per token, over all tokens of the episode; None where it was not trained."""
        with decoding(f"What training left of episode {episode_id}"):
            return self._signals(episode_id)

    def _signals(self, episode_id: str) -> TrainSignals | None:
        rows = self._rows(f"SELECT {_SIGNALS} FROM turn_tokens WHERE episode_id=? ORDER BY idx", (episode_id,))
        if not any(row[1] is not None for row in rows):
            return None

        def floats(column: int) -> np.ndarray[Any, np.dtype[np.float32]]:
            return np.concatenate([blob_floats(row[column], row[0]) for row in rows])

        def optional(column: int) -> np.ndarray[Any, np.dtype[np.float32]] | None:
            return floats(column) if any(row[column] is not None for row in rows) else None

        clipped = [np.frombuffer(row[4] or bytes(row[0]), np.int8) for row in rows]
        return TrainSignals(
            advantage=floats(1),
            logp_train=floats(2),
            ratio=floats(3),
            clipped=np.concatenate(clipped),
            weight=floats(5),
            logp_ref=optional(6),
            value=optional(7),
            returns=optional(8),
        )

    def drift(self, episode_id: str) -> list[DriftRow]:
        """Where a rendering of this episode differed from its ids."""
        sql = "SELECT episode_id, kind, turn, position, expected, got FROM drift WHERE episode_id=? ORDER BY id"
        return [DriftRow(*row) for row in self._rows(sql, (episode_id,))]

    def group_stats(self, group_id: str, run_id: str | None) -> tuple[int, float, float]:
        """How many finished episodes a group has, and mean and standard deviation of their rewards (NaN of none)."""
        rows = self._rows(
            "SELECT reward FROM episodes WHERE group_id=? AND run_id IS ? AND reward IS NOT NULL", (group_id, run_id)
        )
        if not rows:
            return 0, math.nan, math.nan
        rewards = np.array([row[0] for row in rows])
        return len(rows), float(rewards.mean()), float(rewards.std())

    def group_why(self, group_id: str | None, run_id: str | None) -> str:
        """What picked a group's task, where it was not simply its turn."""
        if group_id is None or not self._rows("SELECT 1 FROM pragma_table_info('groups') WHERE name='why'"):
            return ""  # the second: a store of before, which readers do not bring up to date
        row = self._row("SELECT why FROM groups WHERE id=? AND run_id IS ?", (group_id, run_id))
        return str(row[0]) if row else ""

    def task_results(self, run_id: str, until: int) -> list[tuple[str, str, int, int, int]]:
        """(pack, task, step, solved, graded) of a training's steps up to `until`, oldest first; errors do not count."""
        errors = [outcome.value for outcome in Outcome if outcome.is_error]
        return self._rows(
            "SELECT pack, task_id, step, sum(outcome='solved'), count(*) FROM episodes WHERE run_id=? AND kind='train'"
            f" AND step<=? AND outcome NOT IN ({marks(len(errors))}) GROUP BY step, pack, task_id ORDER BY step",
            (run_id, until, *errors),
        )

    def task_stats(self, run: str | None = None) -> list[list[Any]]:
        """[task, pack, family, split, episodes, mean reward, share solved] of every task that has episodes.

        The last two are of those that were graded, None if none was.
        """
        rows = self._rows(
            "SELECT task_id, pack, max(family), max(split), count(*), avg(reward),"
            " avg(CASE WHEN reward IS NOT NULL THEN outcome='solved' END) FROM episodes"
            " WHERE ?1 IS NULL OR run_id=?1 GROUP BY pack, task_id ORDER BY pack, task_id",
            (run,),
        )
        return [list(row) for row in rows]

    def episode_counts(self, run: str | None = None) -> dict[str, int]:
        """run id → how many episodes it has, from an index alone; only of `run` where it is given."""
        where = "run_id IS NOT NULL" if run is None else "run_id=?"
        sql = f"SELECT run_id, count(*) FROM episodes WHERE {where} GROUP BY run_id"
        return dict(self._rows(sql, () if run is None else (run,)))

    def tag_counts(self, run: str | None = None) -> dict[str, int]:
        """tag → how many episodes carry it."""
        sql = (
            "SELECT tag, count(*) FROM tags t JOIN episodes e ON e.id=t.episode_id"
            " WHERE ?1 IS NULL OR e.run_id=?1 GROUP BY tag ORDER BY tag"
        )
        return dict(self._rows(sql, (run,)))

    def tool_stats(self, run: str | None = None, since: int = 0) -> list[list[Any]]:
        """[tool, calls, malformed, failed, mean seconds, slowest, kinds of error] from step `since` on, busiest first.

        A malformed call never ran; a failed one did, or was refused. A call without a readable name is `(unreadable)`.
        """
        rows = self._rows(
            "SELECT CASE WHEN c.name='' THEN '(unreadable)' ELSE c.name END, count(*), sum(c.call_error IS NOT NULL),"
            " sum(c.call_error IS NULL AND c.result_error IS NOT NULL), avg(c.seconds), max(c.seconds),"
            " group_concat(DISTINCT c.result_error)"
            " FROM tool_calls c JOIN episodes e ON e.id=c.episode_id"
            " WHERE (?1 IS NULL OR e.run_id=?1) AND ifnull(e.step, 0)>=?2 GROUP BY 1 ORDER BY 2 DESC",
            (run, since),
        )
        return [list(row) for row in rows]
