"""Hostile texts and bodies: read in linear time, answered with a sentence."""

import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.parsers import load_parser
from agentrl_cli.config import RolloutConfig
from agentrl_cli.plugins.verl_tool.app import ToolServer
from agentrl_cli.plugins.verl_tool.journal import Journal
from agentrl_cli.plugins.verl_tool.parser import PARSER
from agentrl_cli.plugins.verl_tool.trajectories import Call, Trajectories
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tools import as_tool, tool
from tests.helpers.chat import schema
from tests.helpers.growth import exponent
from tests.helpers.sandbox import open_sandbox

TOOLS = [schema("python", {"code": "string"}), schema("bash", {"code": "string"})]
DEEP = 50_000


@pytest.mark.parametrize(
    "unit",
    [
        "<python>",
        "</python>",
        "<bash>",
        "```python\n",
        "``` ",
        "```input\n",
        "\n```",
        "<mcp_call>",
        "<sql>x</sql>",
    ],
)
def test_a_text_of_tags_is_read_in_linear_time(unit: str) -> None:
    assert exponent(lambda n: parse_text(unit * n, PARSER, TOOLS), 500) < 1.5


def bodies() -> Iterator[tuple[str, bytes]]:
    """(path, body) of requests that must not be answered with 500."""
    for path in ("/v1/open", "/v1/call", "/v1/rewards", "/v1/close", "/get_observation"):
        for body in (
            b"",
            b"\xff",
            b"[]",
            b"5",
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"trajectory": "\\ud800"}',
        ):
            yield path, body
    tools: Any
    seed: Any
    for tools in (5, "add", {"add": 1}, [5], [[]], [None], "", True):
        yield "/v1/open", json.dumps({"tools": tools}).encode()
    for task in (5, [1], {"data": 5}, {"prompt": 5}, {"prompt": ["x"]}, {"pack": [1]}):
        yield "/v1/open", json.dumps({"task": task}).encode()
    for seed in ("x", None, -1, 1.5, True, 10**30, []):
        yield "/v1/open", json.dumps({"seed": seed}).encode()
    for extra in (5, [5], "x", {"a": 1}, [[["a", 1]]], [None]):
        given = {"trajectory_ids": ["a"], "actions": ["x"], "extra_fields": extra}
        yield "/get_observation", json.dumps(given).encode()
    rng = random.Random(18)
    values: list[Any] = [
        None,
        5,
        "",
        "a",
        "b",
        [],
        {},
        ["a"],
        [5],
        [None],
        {"a": 1},
        True,
        -1,
        1e300,
        "\ud800",
        [[]],
    ]
    values += [
        [{"trajectory": "a", "key": "k", "name": "add", "arguments": {"a": 1}}],
        [{"finish": 1}],
        [{"key": []}],
    ]
    keys = [
        "trajectory",
        "tools",
        "task",
        "seed",
        "calls",
        "trajectories",
        "trajectory_ids",
        "actions",
        "extra_fields",
    ]
    for _ in range(800):
        path = rng.choice(
            [
                "/v1/open",
                "/v1/call",
                "/v1/rewards",
                "/v1/close",
                "/get_observation",
                "/get_observation",
            ]
        )
        chosen = rng.sample(keys, rng.randint(1, 4)) + (
            ["trajectory_ids", "actions"] if "get" in path else []
        )
        yield path, json.dumps({key: rng.choice(values) for key in chosen}).encode()


async def test_bodies(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    from aiohttp.test_utils import TestClient, TestServer

    @tool
    def add(a: int) -> str:
        """Add one.

        Args:
            a: A number.
        """
        return str(a + 1)

    journal = Journal(tmp_path / "j.db")
    trajectories = Trajectories([add], journal)
    server = ToolServer(trajectories, load_parser("hermes"), token="")
    wrong: dict[int, int] = {}
    try:
        async with TestClient(TestServer(server.app())) as client:
            for path, body in bodies():
                async with client.post(path, data=body) as answer:
                    said = await answer.json()
                    assert answer.status < 500, (path, body[:200], said)
                    assert answer.status == 200 or said["error"]["message"], (path, body[:200])
                    wrong[answer.status] = wrong.get(answer.status, 0) + 1
            actions = {"extra_fields": 5, "trajectory_ids": ["a"], "actions": ["x"]}
            assert (await client.post("/get_observation", json=actions)).status == 400
            assert (await client.post("/v1/open", json={"tools": 5})).status == 400
    finally:
        await trajectories.shutdown(0.1)
        journal.close()
    assert wrong[200] > 40 and wrong[400] > 200


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
