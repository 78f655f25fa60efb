"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl_cli import Config, load_pack
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.rewards import RewardContext
from agentrl_cli.sandbox import Sandbox

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    async def check() -> list[str]:
        async with await Sandbox.open(Config().sandbox) as sandbox:
            return [str(problem) for problem in await check_pack(PACK, sandbox)]

    assert asyncio.run(check()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Answer: 42", "42"),
        ("so\nAnswer:  7 \nAnswer: 8", "8"),
        ("the answer is 42", None),
        ("Answer:", None),
    ],
)
def test_the_last_answer_line_counts(text: str, said: str | None) -> None:
    assert PACK.module.answer_of(text) == said


def test_a_guess_that_happens_to_be_wrong_scores_zero_but_keeps_its_format() -> None:
    task = next(task for task in PACK.tasks("train") if task.data["kind"] == "answer")
    ctx = RewardContext(task, "Answer: -1")
    value, detail = asyncio.run(PACK.module.tests(None, ctx))
    assert (value, PACK.module.format(None, ctx)) == (0.0, 1.0)
    assert task.data["answer"] in detail


def test_tool_errors_cost() -> None:
    assert PACK.module.tool_errors(SimpleNamespace(tool_errors=2), None) == -1.0
    assert PACK.module.tool_errors(SimpleNamespace(tool_errors=0), None) == 0.0
