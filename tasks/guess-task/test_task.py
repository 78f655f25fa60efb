"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from agentrl_cli import Config, load_pack
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.rewards import RewardContext
from agentrl_cli.sandbox import Sandbox

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    async def check() -> list[str]:
        if not PACK.sandbox:
            return [str(problem) for problem in await check_pack(PACK, None)]
        async with await Sandbox.open(Config().sandbox) as sandbox:
            return [str(problem) for problem in await check_pack(PACK, sandbox)]

    assert asyncio.run(check()) == []


def test_a_slow_guesser_earns_less() -> None:
    task = PACK.tasks("heldout")[0]  # 1 to 100: a binary search needs at most 7
    values = []
    for guesses in (7, 14, 10):
        ctx = RewardContext(task, "", state={"feedback": [0.1] * (guesses - 1) + [1.0]})
        values.append(PACK.module.quick(None, ctx))
    assert values == [1.0, 0.0, 1 - 3 / 7]
    lost = RewardContext(task, "", state={"feedback": [0.1]})
    assert PACK.module.quick(None, lost) == 0.0 and PACK.module.right(None, lost).value == 0.0


def test_a_demonstration_may_heed_nothing() -> None:
    row = dict(PACK.tasks("train")[0].data)
    assert PACK.module.demonstrate(row, random.Random(0), 1.0)[-1]["content"] == str(row["secret"])
    assert PACK.module.demonstrate(row, random.Random(0), 0.0)[-1]["role"] == "user"
