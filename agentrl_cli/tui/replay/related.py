"""Episodes that belong to the one that is shown: other steps, other checkpoints, the same failure. No textual."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_cli.store import EpisodeRow, Store
from agentrl_cli.tui.common.text import quote
from agentrl_cli.types import group_pairs

BOOKMARK = "mark"
"""The tag that `b` sets; `tag:mark` lists the bookmarks."""
MOST = 5000
"""Rows read at most in a search for checkpoints."""


def at_step(store: Store, episode_id: str, step: int) -> str | None:
    """Return the same task at the nearest step before (−1) or after (+1), the same sample if there is one."""
    row = store.episodes.row(episode_id)
    if row.step is None:
        return None
    sign, sort = (">", "step") if step > 0 else ("<", "-step")
    text = f"{_of_task(row)} kind:{quote(row.kind)} step:{sign}{row.step}"
    rows = store.episodes.used(text, sort, row.run_id, limit=64)
    nearest = [other for other in rows if other.step == rows[0].step]
    return min(nearest, key=lambda other: other.sample != row.sample).id if nearest else None


def _of_task(row: EpisodeRow) -> str:
    pack = f" pack:{quote(row.pack)}" if row.pack else ""
    return f"task:{quote(row.task_id)}{pack}"


def versions(store: Store, episode_id: str) -> list[EpisodeRow]:
    """Return one finished episode of this task for every policy that tried it, oldest first; this one for its own.

    A policy is (run, kind, weights version). Of several attempts the one with the same sample number is taken.
    """
    row = store.episodes.row(episode_id)
    text = f"{_of_task(row)} -outcome:none -kind:chat -kind:whatif"
    found: dict[tuple[str | None, str, str], EpisodeRow] = {}
    for other in store.episodes.rows(store.episodes.ids(text, "time", limit=MOST)):
        key = (other.run_id, other.kind, other.weights_version)
        if key not in found or other.sample == row.sample:
            found[key] = other
    found[(row.run_id, row.kind, row.weights_version)] = row
    return sorted(found.values(), key=lambda item: (item.started, item.rowid))


def other_version(rows: list[EpisodeRow], episode_id: str) -> int | None:
    """Return which of `versions` to show beside this one: the first, or the last if this is the first."""
    places = [n for n, row in enumerate(rows) if row.id != episode_id]
    if not places:
        return None
    return places[-1] if rows[0].id == episode_id else places[0]


def same_flag(store: Store, episode_id: str) -> tuple[str, str | None]:
    """Return (filter, run) of all episodes of this step with the same first flag; an empty filter without a flag."""
    row = store.episodes.row(episode_id)
    if not row.flags:
        return "", row.run_id
    step = f" step:{row.step} kind:{row.kind}" if row.step is not None else ""
    return f"flag:{row.flags[0]}{step}", row.run_id


FRESH = 30.0
"""Seconds without an update after which a running episode counts as left behind by a killed run."""


def newest(store: Store, run: str | None, only: str | None = None) -> str | None:
    """Return the episode to follow: the newest running one that has a turn, else the last stored.

    Of this run if it has one, else of any; `only`: the run that the list is limited to.
    """
    now = time.time()
    going = [row for row in store.live.all(only) if row.turn and now - row.updated < FRESH]
    own = [row for row in going if row.run_id == run]
    if going:
        return max(own or going, key=lambda row: row.started).episode_id
    rows = store.episodes.rows(store.episodes.ids("-outcome:none", "-time", only, limit=1))
    return rows[0].id if rows else None


def same_failure(store: Store, episode_id: str) -> list[tuple[str, int, int]]:
    """Return (first flag, episodes of this step with it, episodes of this step); none without a flag or a step."""
    row = store.episodes.row(episode_id)
    if not row.flags or row.step is None:
        return []
    step = f"step:{row.step} kind:{quote(row.kind)}"
    rows = store.episodes.used(step, "time", row.run_id)
    return [(row.flags[0], sum(row.flags[0] in other.flags for other in rows), len(rows))]


def by_step(store: Store, episode_id: str) -> tuple[str, list[tuple[int, float, int]]]:
    """Return (kind, [(step, mean reward, attempts)]) of this task in this run: in evaluations, else in training."""
    row = store.episodes.row(episode_id)
    for kind in ("eval", "train"):
        text = f"{_of_task(row)} kind:{kind} -outcome:none -reward:none -step:none"
        rows = store.episodes.used(text, "step", row.run_id, limit=MOST)
        rewards = group_pairs(
            (other.step, other.reward)
            for other in rows
            if other.step is not None and other.reward is not None
        )
        if len(rewards) > 1:
            return kind, [
                (step, sum(found) / len(found), len(found))
                for step, found in sorted(rewards.items())
            ]
    return "", []


@dataclass(frozen=True, slots=True)
class Around:
    """The episodes that the store has beside one."""

    failures: Sequence[tuple[str, int, int]] = ()
    """As `same_failure` returns it."""
    children: int = 0
    kind: str = ""
    steps: Sequence[tuple[int, float, int]] = ()
    """As `by_step` returns them."""


def around(store: Store, episode_id: str) -> Around:
    """Return episodes with the same flag, what-ifs and chats from this one, and the task at other steps."""
    children = len(store.episodes.ids(f"parent:{quote(episode_id)}"))
    return Around(same_failure(store, episode_id), children, *by_step(store, episode_id))


def mark(store: Store, episode_id: str, text: str, *, note: bool) -> tuple[tuple[str, ...], str]:
    """Set the note, or add tags and remove those with a minus in front. Returns (tags, note) as they are then."""
    if note:
        store.marks.note(episode_id, text)
    for word in [] if note else text.replace(",", " ").split():
        change = store.marks.untag if word.startswith("-") else store.marks.tag
        change(episode_id, word.removeprefix("-"))
    row = store.episodes.row(episode_id)
    return row.tags, row.note
