"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

from agentrl_cli import Config, load_pack
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.rewards import RewardContext
from agentrl_cli.rewards.rules import contains
from agentrl_cli.sandbox import Sandbox

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    async def check() -> list[str]:
        if not PACK.sandbox:
            return [str(problem) for problem in await check_pack(PACK, None)]
        async with await Sandbox.open(Config().sandbox) as sandbox:
            return [str(problem) for problem in await check_pack(PACK, sandbox)]

    assert asyncio.run(check()) == []


def test_answers_and_calls_are_counted() -> None:
    task = next(task for task in PACK.tasks("train") if len(task.data["gt"]) == 2)
    first, second = task.data["gt"]
    for text, value in (
        (f"{first} and {second}", 1.0),
        (f"only {first}", 0.0),
        (f"{first}1 and {second}", 0.0),
    ):
        assert contains(None, RewardContext(task, text)).value == value  # type: ignore[arg-type]
    for made, failed, worth in ((2, 0, 1.0), (1, 0, 0.0), (2, 1, 0.0)):
        episode = SimpleNamespace(tool_calls=made, tool_errors=failed)
        assert PACK.module.calls(episode, RewardContext(task, "")) == worth


def test_the_table_reads_minimind_s_signs() -> None:
    table = PACK.module.MOCK_RESULTS
    assert table["calculate_math"]({"expression": "（3 + 4）× 2^2 ÷ 7"}) == {"result": "4"}
    assert table["unit_converter"]({"value": 10, "from_unit": "KM", "to_unit": "miles"}) == {
        "result": 6.2137
    }
