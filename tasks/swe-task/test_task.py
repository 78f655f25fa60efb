"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
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


def test_tasks_in_harbors_layout(tmp_path: Path) -> None:
    PACK.module.harbor(str(tmp_path), 5, 2)
    found = {
        path.relative_to(tmp_path / "swe-5-0001").as_posix() for path in tmp_path.glob("*1/**/*")
    }
    assert {"task.toml", "instruction.md", "solution/solve.sh", "tests/test.sh"} <= found
    assert "environment/Dockerfile" in found
