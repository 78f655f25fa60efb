"""The conformance check finds what it claims to find."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agentrl_cli.check import check_pack
from agentrl_cli.paths import packs_dir
from agentrl_cli.tasks import load_pack


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    folder = tmp_path / "echo-task"
    shutil.copytree(packs_dir() / "echo-task", folder)
    return folder


async def problems(folder: Path) -> list[str]:
    return [str(problem) for problem in await check_pack(load_pack(folder), None)]


async def test_the_shipped_pack_is_whole(pack: Path) -> None:
    assert await problems(pack) == []


async def test_a_wrong_solution_a_scoring_blank_and_a_lying_tool_result(pack: Path) -> None:
    code = (pack / "task.py").read_text()
    (pack / "task.py").write_text(
        code + "\n\ndef exact(episode, ctx):\n    return 0.0\n\n\nREWARDS = {'exact': exact}\n"
    )
    assert any("the reference solution ends as failed" in problem for problem in await problems(pack))
    (pack / "task.py").write_text(code + "\n\nREWARDS = {'exact': lambda episode, ctx: 1.0}\n")
    assert any("an empty answer scores 1.0" in problem for problem in await problems(pack))
    (pack / "task.py").write_text(
        code.replace('"content": row["answer"]},\n        final', '"content": "lie"},\n        final')
    )
    assert any("the solver says that the tool answers 'lie'" in problem for problem in await problems(pack))


async def test_a_bad_row_a_task_in_two_splits_and_an_unlisted_family(pack: Path) -> None:
    train, test = pack / "data" / "train.jsonl", pack / "data" / "test.jsonl"
    rows = train.read_text().splitlines()
    test.write_text(
        rows[0].replace("train-0000", "test-0000").replace('"say"', '"shout"').replace('"look"', '"shout"') + "\n"
    )
    found = await problems(pack)
    assert any("the same task is in train" in problem for problem in found)
    assert any("'shout'" in problem for problem in found)
    train.write_text("\n".join([rows[0], "{not json"]) + "\n")
    assert any("train.jsonl:2: not JSON" in problem for problem in await problems(pack))
