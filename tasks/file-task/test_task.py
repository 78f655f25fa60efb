"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from agentrl_cli import Config, load_pack
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.sandbox import Sandbox

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    async def check() -> list[str]:
        async with await Sandbox.open(Config().sandbox) as sandbox:
            return [str(problem) for problem in await check_pack(PACK, sandbox)]

    assert asyncio.run(check()) == []


def test_the_bug_is_one_and_the_repair_is_what_was_there() -> None:
    for task in PACK.tasks("train")[:20]:
        row = task.data
        assert row["source"].count(row["wrong"]) == 1 and row["wrong"] != row["right"]
        for text, passes in (
            (row["source"], False),
            (row["source"].replace(row["wrong"], row["right"]), True),
        ):
            scope: dict[str, object] = {}
            exec(text, scope)
            results = [
                scope[test["call"]](*test["args"]) == test["expect"] for test in row["tests"]
            ]  # type: ignore[operator]
            assert all(results) is passes


def test_a_demonstration_may_repair_nothing() -> None:
    row = dict(PACK.tasks("train")[0].data)
    assert [m["role"] for m in PACK.module.demonstrate(row, random.Random(0), 0.0)] == [
        "assistant",
        "tool",
        "assistant",
    ]
