"""Hostile texts and bodies: read in linear time, answered with a sentence."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.parsers import load_parser
from agentrl_cli.config import RolloutConfig
from agentrl_cli.plugins.verl_tool.app import ToolServer
from agentrl_cli.plugins.verl_tool.parser import PARSER
from agentrl_cli.plugins.verl_tool.trajectories import Call
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tools import as_tool
from tests.helpers.chat import add, schema
from tests.helpers.growth import exponent
from tests.plugins.verl_tool.test_server import world

TOOLS = [schema("python", {"code": "string"}), schema("bash", {"code": "string"})]


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


PATHS = ("/v1/open", "/v1/call", "/v1/rewards", "/v1/close", "/get_observation")


TEXTS = (
    b"",
    b"\xff",
    b"[]",
    b"5",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"trajectory": "\\ud800"}',
)


OPENS: dict[str, list[Any]] = {
    "tools": [5, "add", {"add": 1}, [5], [[]], [None], "", True],
    "task": [5, [1], {"data": 5}, {"prompt": 5}, {"prompt": ["x"]}, {"pack": [1]}],
    "seed": ["x", None, -1, 1.5, True, 10**30, []],
}


EXTRAS = (5, [5], "x", {"a": 1}, [[["a", 1]]], [None])


KEYS = "trajectory tools task seed calls trajectories trajectory_ids actions extra_fields".split()


VALUES: list[Any] = [
    *(None, 5, "", "a", "b", [], {}, ["a"], [5], [None], {"a": 1}, True, -1, 1e300, "\ud800", [[]]),
    [{"trajectory": "a", "key": "k", "name": "add", "arguments": {"a": 1}}],
    [{"finish": 1}],
    [{"key": []}],
]


def bodies() -> Iterator[tuple[str, bytes]]:
    """(path, body) of requests that must not be answered with 500."""
    yield from itertools.product(PATHS, TEXTS)
    for name, values in OPENS.items():
        yield from (("/v1/open", json.dumps({name: value}).encode()) for value in values)
    for extra in EXTRAS:
        asked = {"trajectory_ids": ["a"], "actions": ["x"], "extra_fields": extra}
        yield "/get_observation", json.dumps(asked).encode()
    rng = random.Random(18)
    for _ in range(800):
        path = rng.choice([*PATHS, "/get_observation"])
        chosen = rng.sample(KEYS, rng.randint(1, 4))
        chosen += ["trajectory_ids", "actions"] * ("get" in path)
        yield path, json.dumps({key: rng.choice(VALUES) for key in chosen}).encode()


REFUSED: list[tuple[str, Any]] = [
    ("/get_observation", {"extra_fields": 5, "trajectory_ids": ["a"], "actions": ["x"]}),
    ("/v1/open", {"tools": 5}),
    ("/v1/call", []),
    ("/v1/call", {}),
    ("/v1/call", {"calls": [1]}),
    ("/v1/call", {"calls": [{"trajectory": "t", "arguments": {}}]}),
]


async def test_bodies(tmp_path: Path) -> None:
    from aiohttp.test_utils import TestClient, TestServer

    wrong: Counter[int] = Counter()
    async with world(tmp_path / "j.db", [as_tool(add)]) as trajectories:
        server = ToolServer(trajectories, load_parser("hermes"), token="")
        async with TestClient(TestServer(server.app())) as client:
            for path, body in bodies():
                async with client.post(path, data=body) as answer:
                    said = await answer.json()
                    assert answer.status < 500, (path, body[:200], said)
                    assert answer.status == 200 or said["error"]["message"], (path, body[:200])
                    wrong[answer.status] += 1
            for path, given in REFUSED:
                assert (await client.post(path, json=given)).status == 400, given
    assert wrong[200] > 40 and wrong[400] > 200


async def test_a_tool_server_holds_calls_to_a_packs_limits_and_to_those_of_a_rollout(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    more = {
        "open_session": sandbox.session,
        "limits": RolloutConfig().replace(observation={"chars": 60}),
        "sessions": {"quick": {"wall": 0.4}, "other": {"wall": 2.5}},
    }
    async with world(tmp_path / "j.db", [as_tool("run_python")], **more) as server:
        for pack, says in (("quick", "timed out after 0.4 s"), ("other", "")):
            await server.open(pack, {"task": {"pack": pack}})
            slow, long = {"code": "import time; time.sleep(0.8)"}, {"code": "print('x' * 500)"}
            answer = await server.call(Call(pack, "1", "run_python", slow))
            assert says in answer["result"]["text"], answer
            found = (await server.call(Call(pack, "2", "run_python", long)))["result"]
            assert found["truncated"] and len(found["text"]) < 100


async def test_a_tool_server_that_restarts_draws_the_same_numbers_again(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    code, tools = {"code": "import random; random.random()"}, [as_tool("run_python")]
    seen = []
    for key in ("a", "b"):
        async with world(tmp_path / "j.db", tools, open_session=sandbox.session) as server:
            await server.open("t", {"seed": 4})
            answer = await server.call(Call("t", key, "run_python", code))
            seen.append(answer["result"]["text"])
    fresh = await sandbox.session(seed=4)
    assert [(await fresh.cell(code["code"])).text() for _ in seen] == seen
