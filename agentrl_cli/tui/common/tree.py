"""The tree of an episode's turns for lists and headers: how deep a turn lies, which one it continues. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, groupby

from agentrl_cli.types import ROOT, Branch, Episode

DEEPEST = 4
"""Columns that indentation takes at most."""


def fork_depths(parents: Sequence[int]) -> list[int]:
    """Count the forks that lead to each turn: the first that continues a turn stays at its depth, others lie deeper.

    A context that begins after the first turn lies one deeper.
    """
    depths: list[int] = []
    continued: set[int] = set()
    for index, parent in enumerate(parents):
        if parent == ROOT:
            depths.append(int(index > 0))
        else:
            depths.append(depths[parent] + (parent in continued))
            continued.add(parent)
    return depths


def indentation(episode: Episode) -> dict[int, str]:
    """Return the mark before each turn in a list: nothing in the trunk, `└` where a fork or a context starts."""
    depths = fork_depths(episode.parents)
    before = [depths[parent] if parent >= 0 else 0 for parent in episode.parents]
    return {
        turn.index: ""
        if not depth
        else " " * (min(depth, DEEPEST) - 1) + ("└" if depth > above else " ")
        for turn, depth, above in zip(episode.turns, depths, before, strict=True)
    }


def continues(episode: Episode, turn: int) -> str:
    """Return `continues turn 1` or `another context`; empty if a turn continues the one before it."""
    parent = _parent(episode, turn)
    if parent == turn - 1:
        return ""
    return "another context" if parent == ROOT else f"continues turn {parent}"


def branch_title(episode: Episode, number: int) -> str:
    """Return `BRANCH 2 of 3: turns 0-1 4-5`, with the player of a game."""
    branches = episode.branches
    player = f" {episode.turns[branches[number][0]].player}".rstrip()
    return f"BRANCH {number + 1} of {len(branches)}{player}: turns {spans(branches[number])}"


def spans(turns: Sequence[int]) -> str:
    """Return numbers as runs: `0-1 4-5`."""
    places = count()  # within a run every number is as far from its place
    runs = [list(run) for _, run in groupby(turns, lambda turn: turn - next(places))]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def on_path(episode: Episode, turn: int, later: int) -> bool:
    """Whether `later` continues `turn`, over any number of turns."""
    while later > turn:
        later = _parent(episode, later)
    return later == turn


def _parent(episode: Episode, turn: int) -> int:
    """Return the turn that a turn continues; the one before it in a half-written run that lacks turns."""
    return episode.parent_of(turn) if turn < len(episode.turns) else turn - 1


def place_in(branch: Branch, at: int) -> int:
    """Return the token of the episode at a position of a branch; behind its last token the last."""
    return int(branch.positions[min(at, len(branch) - 1)]) if len(branch) else 0
