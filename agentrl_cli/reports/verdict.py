"""A finished training in two sentences: the metrics that rose or did not, the reward part that
moved most, and the next step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import variance
from typing import Any

MOST = 10
"""Steps at each end that are compared, at most; a quarter of short runs."""
FEWEST = 8
"""Steps below which nothing is concluded."""
LEAST = 0.02
"""Change below which a number has not moved, however steady it is."""
NEARLY_ALL, HARDLY = 0.95, 0.05
"""Shares of solved episodes from which nothing is left to learn, and below which nothing can be."""


@dataclass(frozen=True, slots=True)
class Change:
    """The mean of a metric at both ends of a run."""

    before: float
    after: float
    margin: float
    """Two standard errors of the difference, at least LEAST."""

    @property
    def word(self) -> str:
        if abs(self.after - self.before) < self.margin:
            return "stayed"
        return "rose" if self.after > self.before else "fell"

    @property
    def text(self) -> str:
        if self.word == "stayed":
            return f"stayed at {self.after:.2f}"
        return f"{self.word} from {self.before:.2f} to {self.after:.2f}"


def change(values: Sequence[float], window: int) -> Change:
    """Compare the first and the last `window` values."""
    first, last = values[:window], values[-window:]
    error = math.sqrt(sum(variance(part) / len(part) for part in (first, last) if len(part) > 1))
    return Change(sum(first) / len(first), sum(last) / len(last), max(LEAST, 2 * error))


def verdict(steps: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Return two sentences about the metrics of a run's steps, oldest first; none if there are too few."""
    solved = [float(step["solved"]) for step in steps if "solved" in step]
    if len(solved) < FEWEST:
        return []
    window = min(MOST, max(1, len(solved) // 4))
    train = change(solved, window)
    rates = [float(step["eval/solved"]) for step in steps if step.get("eval/solved") is not None]
    checked = Change(rates[0], rates[-1], LEAST) if len(rates) > 1 else None
    return [
        _what_happened(train, checked, _describe_parts(steps, window), window),
        _what_next(train, checked, solved, window, name),
    ]


def _what_happened(train: Change, checked: Change | None, part: str, window: int) -> str:
    text = f"Solved in training {train.text} (means of the first and last {window} steps)"
    if checked is not None:
        joined = "and" if checked.word == train.word else "but"
        text += f", {joined} on the validation tasks it {checked.text}"
    return f"{text}; {part}."


def _describe_parts(steps: Sequence[Mapping[str, Any]], window: int) -> str:
    """Return a clause about the reward part whose mean changed most."""
    names = sorted(
        {
            key
            for step in steps
            for key in step
            if key.startswith("rewards/") and key.endswith("/mean")
        }
    )
    changes: dict[str, Change] = {}
    for name in names:
        values = [float(step[name]) for step in steps if name in step]
        if len(values) >= 2 * window:
            changes[name.split("/", 1)[1].removesuffix("/mean")] = change(values, window)
    moved = {name: found for name, found in changes.items() if found.word != "stayed"}
    if not moved:
        return "no reward part moved"
    best = max(moved, key=lambda name: abs(moved[name].after - moved[name].before))
    return (
        f"of the reward parts, {best} moved most, by {moved[best].after - moved[best].before:+.2f}"
    )


def _what_next(
    train: Change, checked: Change | None, solved: Sequence[float], window: int, name: str
) -> str:
    """Return advice from the training's and the validation's change."""
    if train.after < HARDLY:
        return (
            "Hardly anything was solved, so there was nothing to reinforce: `agentrl check` shows why, and a warm start"
            " (`agentrl sft warm`), easier rows or another model help."
        )
    if train.word == "fell":
        again = f"agentrl train{f' --model {name}@best' if checked else ''} --set algo.kl_coef=0.01"
        return f"It unlearned: try half of train.lr, or a KL penalty: `{again}`."
    if (
        checked is not None
        and train.word == "rose"
        and checked.word != "rose"
        and checked.after < NEARLY_ALL
    ):
        return (
            "It may have memorised its rows, or found a gap in the reward: read `agentrl replay best`, and add rows or"
            " close the gap."
        )
    if train.after >= NEARLY_ALL:
        return "Nothing is left to learn on these rows: measure it with `agentrl eval`, then take harder ones."
    if train.word == "stayed":
        return "Try more steps, a higher train.lr or larger groups (rollout.group_size)."
    # against the window just before, not the first: a curve that rose early may have been flat for long
    middle = solved[-2 * window : -window]
    if middle and train.after - sum(middle) / len(middle) > LEAST:
        return f"It was still rising: agentrl train --resume {name} --steps {2 * len(solved)}"
    return f"It has levelled off: `agentrl ls -f 'run:{name} outcome:failed'` lists what it still fails."
