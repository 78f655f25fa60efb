"""Run with `pytest`: the pack is whole, its variants show what they should, and answers are read as mathematics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import load_pack
from agentrl_cli.rewards import RewardContext
from agentrl_cli.tasks.forms import normal
from agentrl_cli.tools.calculator import calculator

PACK = load_pack(Path(__file__).parent)


def grade(expected: str, text: str) -> tuple[float | None, str]:
    """(value, reason or detail) of the primary part."""
    (reward,) = (one for one in PACK.rewards if one.primary)
    task = PACK.task({"id": "1", "prompt": "?", "answer": expected}, "test")
    ctx = RewardContext(task, text)
    part: Any = reward.function(None, ctx)
    part = asyncio.run(part) if asyncio.iscoroutine(part) else part
    return (None, ctx.reason) if part is None else tuple(part)


def test_every_solution_is_right_and_an_empty_answer_is_wrong() -> None:
    for split in ("train", "validation", "test", "heldout"):
        for task in PACK.tasks(split):
            (said,) = PACK.module.solve({**task.data, "prompt": ""})
            assert grade(task.data["answer"], said["content"])[0] == 1.0
    for shown in PACK.module.demonstrations("validation-calculator"):
        call, result, final = shown["messages"][-3:]
        expression = call["tool_calls"][0]["function"]["arguments"]["expression"]
        assert (
            calculator(expression).text
            == result["content"]
            == final["content"].removeprefix("Answer: ")
        )
    assert grade("42", "I do not know.")[0] == grade("42", "")[0] == 0.0


def test_variants_have_tools_and_solved_examples() -> None:
    plain, tools, shots = (
        PACK.tasks(split)[0] for split in ("test", "test-calculator", "test-4shot")
    )
    assert (plain.tools, tools.tools, shots.tools) == ((), ("calculator",), ())
    assert len({task.id for task in (plain, tools, shots)}) == 3  # one evaluation may have them all
    assert [m["role"] for m in shots.prompt] == ["system", *["user", "assistant"] * 4, "user"]
    assert shots.prompt[-1] == plain.prompt[-1] and shots.prompt[2]["content"].splitlines()[
        -1
    ].startswith("Answer: ")
    assert PACK.source("gsm8k").kind == "dataset"


def test_rows_of_gsm8k_and_math_have_an_answer() -> None:
    assert normal({"question": "?", "answer": "2 * 600 = 1200\n#### 1,200"})["answer"] == "1200"
    row = {"problem": "?", "solution": r"so \boxed{1}, no, \boxed{\frac{1}{2}}.", "type": "Algebra"}
    assert (normal(row)["answer"], normal(row)["family"]) == (r"\frac{1}{2}", "Algebra")


@pytest.mark.parametrize(
    ("expected", "text", "value"),
    [
        ("2857", "72 * 39 + 49\nAnswer: 2,857 pens", 1.0),
        ("2857", "答案：2857 支", 1.0),
        ("42", "6 * 7\nanswer: 42", 1.0),
        ("42", "6 * 7\n**Answer:**\n42", 1.0),
        ("21/10", "**Answer:** 2.1", 1.0),
        (r"\frac{1}{2}", r"Therefore $\boxed{0.5}$.", 1.0),
        ("1024", "Answer: 2^{10}", 1.0),
        ("42", "Answer: 41", 0.0),
        ("42", "Answer: ???", None),
    ],
)
def test_answers_are_read_by_math_verify(expected: str, text: str, value: float | None) -> None:
    """One that it cannot read is ungraded, with the reason."""
    pytest.importorskip("math_verify", reason="pip install 'agentrl-cli[math]'")
    found, reason = grade(expected, text)
    assert found == value
    assert value is not None or reason == "math-verify cannot read the answer '???'"
