"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

from agentrl_cli import Config, load_pack
from agentrl_cli.check import check_pack
from agentrl_cli.rewards import RewardContext
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.types import ToolResult

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    async def check() -> list[str]:
        if not PACK.sandbox:
            return [str(problem) for problem in await check_pack(PACK, None)]
        async with await Sandbox.open(Config().sandbox) as sandbox:
            return [str(problem) for problem in await check_pack(PACK, sandbox)]

    assert asyncio.run(check()) == []


def test_only_the_rows_of_the_last_good_query_count() -> None:
    task = next(
        task for task in PACK.tasks("heldout") if task.family == "listing" and task.data["answer"].count("\n") > 1
    )
    header, *rows = task.data["answer"].splitlines()
    texts = {"\n".join(["other", *rows]): 1.0, "\n".join([header, *reversed(rows)]): 0.0, header: 0.0}
    for text, expected in texts.items():
        results = [ToolResult("x\n1"), ToolResult(text), ToolResult("Error: no", error="exception")]
        episode = SimpleNamespace(turns=[SimpleNamespace(results=results)])
        assert PACK.module.result(episode, RewardContext(task, "")).value == expected


def test_a_demonstration_may_be_wrong() -> None:
    row = dict(PACK.tasks("train")[0].data)
    assert PACK.module.demonstrate(row, random.Random(0), 1.0) == PACK.module.solve(row)
    assert "no such column" in PACK.module.demonstrate(row, random.Random(0), 0.0)[1]["content"] or row["family"] == "x"
