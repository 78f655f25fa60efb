"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np

from agentrl_cli import load_pack
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.rewards import RewardContext
from agentrl_cli.tools import ToolContext

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    assert asyncio.run(check_pack(PACK, None)) == []


def test_the_small_picture_hides_the_dots_and_a_crop_shows_them() -> None:
    module = PACK.module
    scenes = [[[shape, "red", dots] for shape in module.SHAPES] for dots in (1, 4)]
    assert (module.small(scenes[0]) == module.small(scenes[1])).all()
    assert not (module._larger(scenes[0][0]) == module._larger(scenes[1][0])).all()


def test_crop_shows_the_shape_of_the_colour() -> None:
    task = next(task for task in PACK.tasks("train") if task.family == "dots")
    for one in task.data["scene"]:
        seen = PACK.module.crop.function(one[1], ToolContext(task=task))
        assert (np.asarray(seen) == PACK.module._larger(one)).all()


def test_a_guess_is_mostly_wrong() -> None:
    rng = random.Random(0)
    rows = [dict(task.data) for task in PACK.tasks("train") if task.family == "dots"]
    said = [PACK.module.demonstrate(row, rng, 0.0)[0]["content"] for row in rows]
    right = sum(text == row["answer"] for text, row in zip(said, rows, strict=True))
    assert 0.1 < right / len(rows) < 0.45
    task = PACK.tasks("test")[0]
    assert PACK.module.right(None, RewardContext(task, f" {task.data['answer']}. ")).value == 1.0
