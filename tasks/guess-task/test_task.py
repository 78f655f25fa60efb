"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from agentrl_cli import load_pack
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.rewards import RewardContext

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    assert asyncio.run(check_pack(PACK, None)) == []


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
