"""Code that a tool server runs in the sandbox: limits, and seeds that outlive it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config import RolloutConfig
from agentrl_cli.plugins.verl_tool.journal import Journal
from agentrl_cli.plugins.verl_tool.trajectories import Call, Trajectories
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tools import as_tool
from tests.helpers.sandbox import open_sandbox


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with await open_sandbox(workers=1) as opened:
        yield opened


async def test_a_tool_server_holds_calls_to_a_packs_limits_and_to_those_of_a_rollout(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with contextlib.closing(Journal(tmp_path / "journal.db")) as journal:
        more: dict[str, Any] = {
            "open_session": sandbox.session,
            "limits": RolloutConfig().replace(observation={"chars": 60}),
        }
        more["sessions"] = {"quick": {"wall": 0.4}, "other": {"wall": 2.5}}
        server = Trajectories([as_tool("run_python")], journal, **more)
        try:
            for pack, says in (("quick", "timed out after 0.4 s"), ("other", "")):
                await server.open(pack, {"task": {"pack": pack}})
                code = "import time; time.sleep(0.8)"
                answer = await server.call(Call(pack, "1", "run_python", {"code": code}))
                assert says in answer["result"]["text"], answer
                answer = await server.call(
                    Call(pack, "2", "run_python", {"code": "print('x' * 500)"})
                )
                assert answer["result"]["truncated"] and len(answer["result"]["text"]) < 100
        finally:
            await server.shutdown()


async def test_a_tool_server_that_restarts_draws_the_same_numbers_again(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    code = {"code": "import random; random.random()"}
    seen = []
    for key in ("a", "b"):
        journal = Journal(tmp_path / "j.db")
        server = Trajectories([as_tool("run_python")], journal, open_session=sandbox.session)
        await server.open("t", {"seed": 4})
        seen.append((await server.call(Call("t", key, "run_python", code)))["result"]["text"])
        await server.shutdown(0.1)
        journal.close()
    fresh = await sandbox.session(seed=4)
    assert [(await fresh.cell(code["code"])).text() for _ in seen] == seen
