"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl_cli import load_pack
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.rewards import RewardContext

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    assert asyncio.run(check_pack(PACK, None)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [("Answer: 1,234", "1234"), ("Answer: -5", "-5"), ("Answer: 1\nAnswer: 2", "2"), ("42", None)],
)
def test_the_last_answer_line_counts_without_separators(text: str, said: str | None) -> None:
    assert PACK.module.answer_of(text) == said


def test_exact_means_exact() -> None:
    task = PACK.tasks("train")[0]
    right = asyncio.run(_score(task, f"Answer: {task.data['answer']}"))
    wrong = asyncio.run(_score(task, f"Answer: {task.data['answer']}1"))
    assert (right, wrong) == (1.0, 0.0)


async def _score(task: object, text: str) -> float:
    return float(PACK.module.exact(None, RewardContext(task, text)).value)  # type: ignore[arg-type]
