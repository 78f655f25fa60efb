"""The closing sentences of a training, on made-up series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl_cli.reports.verdict import verdict


def series(solved: Sequence[float], evals: Sequence[float] = ()) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [
        {"step": n, "solved": value, "rewards/exact/mean": value, "rewards/format/mean": 0.5}
        for n, value in enumerate(solved)
    ]
    for place, rate in zip((0, -1), evals, strict=False):
        steps[place]["eval/solved"] = rate
    return steps


RISE = [0.2 + n * 0.02 for n in range(30)]


@pytest.mark.parametrize(
    ("solved", "evals", "first", "second"),
    [
        (RISE, (0.2, 0.8), "rose from 0.26 to 0.72", "agentrl train --resume run --steps 60"),
        (RISE, (0.2, 0.8), "and on the validation tasks it rose from 0.20 to 0.80", ""),
        (RISE, (), "exact moved most, by +0.46", "still rising"),
        (RISE, (0.3, 0.3), "but on the validation tasks it stayed at 0.30", "memorised"),
        (
            [0.3] * 10 + [0.99] * 30,
            (0.3, 0.99),
            "rose from 0.30 to 0.99",
            "Nothing is left to learn",
        ),
        ([0.3] * 10 + [0.7] * 30, (), "rose", "outcome:failed"),
        ([0.0] * 12, (0.0, 0.0), "stayed at 0.00", "Hardly anything was solved"),
        ([0.0] * 12, (), "no reward part moved", "agentrl check"),
        ([0.4, 0.6] * 8, (), "stayed at 0.50", "Try more steps"),
        (RISE[::-1], (), "fell from 0.72 to 0.26", "train.lr"),
    ],
)
def test_the_verdict(
    solved: list[float], evals: tuple[float, ...], first: str, second: str
) -> None:
    what, following = verdict(series(solved, evals), "run")
    assert first in what and second in following


def test_a_few_steps_are_no_evidence() -> None:
    assert verdict(series([0.1, 0.9, 0.9]), "run") == [] and verdict([{"step": 1}] * 9, "run") == []
