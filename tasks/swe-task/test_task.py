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
