"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl_cli import load_pack
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.rewards import RewardContext

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    assert asyncio.run(check_pack(PACK, None)) == []


def test_looking_up_is_a_function_of_the_key() -> None:
    assert PACK.module.lookup("bird1") == PACK.module.lookup("bird1") != PACK.module.lookup("bird2")


def test_exact_means_exact() -> None:
    task = PACK.tasks("train")[0]
    assert PACK.module.exact(None, RewardContext(task, task.data["answer"])).value == 1.0
    assert PACK.module.exact(None, RewardContext(task, task.data["answer"] + "!")).value == 0.0
