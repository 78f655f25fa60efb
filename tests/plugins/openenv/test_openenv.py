"""OpenEnv environments behind an address, and packs served as one: sessions, tools, rewards, and what is refused."""

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from agentrl_cli import Outcome
from agentrl_cli.plugins.openenv.agent import OpenEnv
from agentrl_cli.plugins.openenv.worker import _act, text_of
from tests.helpers.chat import call
from tests.helpers.cli import Cli
from tests.helpers.processes import comes, free_port
from tests.helpers.programs import compare, episode_of, python_with

SERVER = '''
import random, sys
from typing import Any
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """Find the number from 0 to 9."""
    number: int


class Seen(Observation):
    hint: str = ""


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, **more):
        self.wanted = random.Random(seed).randrange(10)
        return Seen(hint=f"round {seed}", done=False, reward=0.0)

    def step(self, action: Guess, **more) -> Seen:
        if action.number > 9:
            raise ValueError("at most 9")
        right = action.number == self.wanted
        hint = "right" if right else "higher" if action.number < self.wanted else "lower"
        return Seen(hint=hint, done=right, reward=1.0 if right else -0.125)

    @property
    def state(self):
        return State()


class Box(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("box")

        @server.tool
        def put(word: str) -> str:
            """Put a word into the box."""
            self.words.append(word)
            return " ".join(self.words)

        super().__init__(server)

    def reset(self, seed=None, **more):
        self.words = [f"seed{seed}"]
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action, **more):
        return Observation(done=False)

    def step(self, action, **more):
        found = super().step(action, **more)
        if isinstance(found, CallToolObservation):
            found.done, found.reward = len(self.words) > 2, 0.5
        return found

    async def step_async(self, action, **more):
        found = await super().step_async(action, **more)
        if isinstance(found, CallToolObservation):
            found.done, found.reward = len(self.words) > 2, 0.5
        return found

    @property
    def state(self):
        return State()


class Bare(Numbers):
    def step(self, action, **more):
        return super().step(action)


if __name__ == "__main__":
    kind, port, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    given = (Numbers, Guess, Seen) if kind == "numbers" else (Box, CallToolAction, CallToolObservation)
    app = create_app(*given, env_name=kind, max_concurrent_envs=most)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
'''
PLAY = """
import os
from concurrent.futures import ThreadPoolExecutor
numbers, box = worker(os.environ["NUMBERS"]), worker(os.environ["BOX"])

def play(seed):
    world = numbers.open(seed)
    wanted, over, turns = random.Random(seed).randrange(10), False, 0
    assert world.prompt[1]["content"] == f"hint: round {seed}", world.prompt
    assert list(world.tools[0]["function"]["parameters"]["properties"]) == ["number"]
    for number in range(10):
        text, over = world.call("act", {"number": number})
        assert text == ("hint: right" if number == wanted else "hint: higher"), text
        if over:
            break
    same((world.reward(), 1 - 0.125 * wanted), (number, wanted))
    assert "at most 9" in world.call("act", {"number": 12})[0]
    assert world.call("act", {"number": "much"})[0].startswith("Error: ")
    world.close()
    inside = box.open(seed)
    assert [one["function"]["name"] for one in inside.tools] == ["put"]
    same((inside.call("put", {"word": "a"}), (f"seed{seed} a", False)))
    same((inside.call("put", {"word": "b"}), (f"seed{seed} a b", True)), (inside.reward(), 1.0))
    inside.close()

with ThreadPoolExecutor(64) as pool:
    list(pool.map(play, range(64)))
"""


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    python = python_with("openenv", "openenv websockets")
    file = tmp_path_factory.mktemp("openenv") / "server.py"
    file.write_text(SERVER)
    found, processes = {}, []
    for name, kind, most in (("NUMBERS", "numbers", 64), ("BOX", "box", 64), ("ONE", "numbers", 1)):
        port = free_port()
        process = subprocess.Popen([python, str(file), kind, str(port), str(most)])
        processes.append(process)
        found[name] = f"http://127.0.0.1:{port}"

        assert comes(partial(answers, port), lambda: all(one.poll() is None for one in processes))
    yield found
    for process in processes:
        process.terminate()
        process.wait()


def test_sessions_side_by_side(servers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, url in servers.items():
        monkeypatch.setenv(name, url)
    compare("openenv", "openenv websockets", PLAY)


async def test_a_project_of_an_address(servers: dict[str, str], tmp_path: Path, cli: Cli) -> None:
    python = python_with("openenv", "openenv websockets")
    source = f"openenv:{servers['NUMBERS']}?size=6"
    cli("init", "numbers", "--from", source, "--python", python)
    episode = await episode_of(
        tmp_path / "numbers", [call("act", number=number) for number in range(10)]
    )
    assert episode.error == "" and episode.reward in {1 - n / 8 for n in range(10)}
    assert "round" in str(episode.turns[0].messages) + str(episode.turns[1].messages)
    cli("init", "one", "--from", f"openenv:{servers['ONE']}", "--python", python)
    nowhere = "openenv:http://127.0.0.1:9"
    cli("init", "two", "--from", nowhere, "--python", python, code=1, said="does not answer")


def test_curves_are_found_by_the_name_in_the_metadata(
    servers: dict[str, str], server: tuple[str, str]
) -> None:
    url, python = servers["NUMBERS"], python_with("openenv", "openenv websockets")
    for package, known in ((url, "Numbers"), (f"{server[0]}/go", f"{server[0]}/go")):
        world = OpenEnv(package, python=python, options={"size": 1})
        world.rows(1)
        assert world.find_name(f"{package}?size=6") == f"{known}?size=6"
        assert world.find_name(package) == known


async def test_a_project_of_a_class(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SERVER)
    given = ("--python", python_with("openenv", "openenv websockets"))
    cli("init", "numbers", "--from", "openenv:mine:Numbers?size=6", *given)
    said = [call("act", number=number) for number in range(10)]
    with contextlib.chdir(tmp_path / "numbers"):  # where `init` says to go next
        episode = await episode_of(tmp_path / "numbers", said)
    assert episode.error == "" and episode.reward in {1 - n / 8 for n in range(10)}
    (tmp_path / "four.py").write_text(
        f"{SERVER}\n\nclass Connect4Environment(Numbers):\n    pass\n"
    )
    counted = "tiny-tools solved 0 of 24 of `Connect4Environment`"  # of one with that name
    cli("init", "four", "--from", "openenv:four:Connect4Environment?size=6", *given, said=counted)
    cli("init", "box", "--from", "openenv:mine:Box?size=2", *given)
    episode = await episode_of(tmp_path / "box", [call("put", word="a")] * 3)
    assert episode.error == "" and episode.reward == 1.0
    for name, problem in (
        ("mine:Bare", "annotate it as step(self"),
        ("mine:Nothing", "no attribute 'Nothing'"),
        ("nowhere:Maze", "No module named 'nowhere'"),
        ("maze", "neither an address, docker:IMAGE nor MODULE:CLASS"),
    ):
        cli("init", "odd", "--from", f"openenv:{name}", *given, code=1, said=problem)


def test_types_of_an_action_stand_where_they_are_named() -> None:
    """A template may show the properties of a tool alone."""
    move = {"enum": ["UP", "DOWN"], "type": "string"}
    node = {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
    action = {
        "properties": {
            "move": {"$ref": "#/$defs/Move", "description": "Where to."},
            "path": {"$ref": "#/$defs/Node"},
            "metadata": {},
        },
        "required": ["move"],
        "$defs": {"Move": move, "Node": {"properties": {"next": node}}},
    }
    assert _act(action)["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "move": {**move, "description": "Where to."},
            "path": {"properties": {"next": {"anyOf": [{}, {"type": "null"}]}}},
        },
        "required": ["move"],
    }


def test_an_observation_is_shown_in_its_own_script() -> None:
    assert text_of({"board": ["上", 1], "done": False}) == 'board: ["上", 1]'


# --- servers that misbehave ---


LIAR = """
import http, json, sys, threading, time
from websockets.http11 import Response
from websockets.datastructures import Headers
from websockets.sync.server import serve

SEEN = {"observation": {"text": "hello"}, "reward": 0.0, "done": False}
TOOL = {"name": "go", "description": "", "inputSchema": {"type": "object", "properties": {}}}
FAULTS = {
    "long": lambda: json.dumps({"type": "observation", "data": {"observation": "x" * 2**25}}),
    "list": lambda: "[]",
    "text": lambda: "{not json",
    "deep": lambda: "[" * 100_000,
    "data": lambda: json.dumps({"type": "observation", "data": 3}),
    "reward": lambda: json.dumps({"type": "observation", "data": {**SEEN, "reward": "much"}}),
    "nan": lambda: json.dumps({"type": "observation", "data": {**SEEN, "reward": float("nan"), "done": True}}),
    "huge": lambda: json.dumps({"type": "observation", "data": {**SEEN, "reward": 10**400}}),
    "done": lambda: json.dumps({"type": "observation", "data": {**SEEN, "done": "no"}}),
    "none": lambda: json.dumps({"type": "observation", "data": {"observation": "x", "done": True}}),
    "errors": lambda: json.dumps({"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": [3]}}),
}

def answer(kind, mode, counts):
    counts[kind] = counts.get(kind, 0) + 1
    if kind == "mcp":
        if mode == "tools":
            tools = [{**TOOL, "name": f"go{n}"} for n in range(2001)]
        else:
            tools = [{**TOOL, "name": 7}] if mode == "names" else 5 if mode == "kind" else [TOOL]
        return json.dumps({"type": "mcp", "data": {"result": {"tools": tools}}})
    if kind == "step" and mode in FAULTS:
        return FAULTS[mode]()
    return json.dumps({"type": "observation", "data": SEEN})

def play(socket):
    mode, counts = socket.request.path.split("/")[-2], {}
    for line in socket:
        kind = json.loads(line)["type"]
        if kind == "close":
            return
        if kind == "step" and mode == "silent":
            time.sleep(3600)
        if kind == "step" and mode == "closes":
            return
        socket.send(answer(kind, mode, counts))

def schema(connection, request):
    *_, mode, what = request.path.split("/")
    if what == "ws" and mode == "moved":
        return Response(307, "Moved", Headers({"Location": "/open/ws", "Content-Length": "0"}), b"")
    if what == "ws":
        return None
    body = json.dumps({"action": {"properties": [] if mode == "schema" else {}}}).encode()
    body = b"x" * 2**25 if mode == "endless" else body
    if mode == "closed":
        return Response(401, "Unauthorized", Headers({"Content-Length": "0"}), b"")
    if mode == "elsewhere":
        return Response(302, "Found", Headers({"Location": "http://127.0.0.1:9/", "Content-Length": "0"}), b"")
    return Response(200, "OK", Headers({"Content-Length": str(len(body))}), body)

host, port = sys.argv[1:]
with serve(play, host, int(port), process_request=schema) as server:
    print(server.socket.getsockname()[1], flush=True)
    server.serve_forever()
"""
PLAYED = {
    "long": "did not answer step: sent 1009 (message too big)",
    "list": "answered step with []",
    "text": "did not answer step: Expecting property name",
    "deep": "did not answer step: maximum recursion depth",
    "data": "answered step with",
    "reward": "could not convert string to float",
    "nan": "a reward that is not finite",
    "huge": "too large",
    "done": "neither true nor false",
    "none": "ended the episode without a reward. x",
    "silent": "did not answer step: timed out in 2.0s",
    "closes": "did not answer step: received 1000",
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, str]]:
    python = python_with("openenv", "websockets")
    words = [python, "-c", LIAR, "127.0.0.1", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}", python
        finally:
            process.kill()


@pytest.mark.parametrize("mode", ["long", "nan"])
async def test_an_episode_ends_with_a_sentence(
    mode: str, server: tuple[str, str], tmp_path: Path, cli: Cli
) -> None:
    url, python = server
    source = f"openenv:{url}/{mode}?size=2&patience=60"
    cli("init", "odd", "--from", source, "--python", python)
    episode = await episode_of(tmp_path / "odd", [call("go")] * 3)
    assert episode.outcome is Outcome.ENV_ERROR and not episode.graded
    assert PLAYED[mode] in episode.error and len(episode.error) < 2000, episode.error


REFUSED = {
    "tools": "there are more than 2000",
    "names": "the name 7 is not a text",
    "kind": "lists tools that cannot be read",
    "schema": "does not answer as an OpenEnv server",
    "endless": "/schema is longer than",
    "elsewhere": "302",
    "moved": "redirect",
    "closed": "export OPENENV_TOKEN",
}
FAULTS = """
import json
def fault(mode):
    try:
        patience = 2 if mode == "silent" else 60
        world = worker(f"{sys.argv[3]}/{mode}", size=2, patience=patience).open(0)
        assert mode in played, mode
        world.call("go", {})
        world.reward()
    except AssertionError:
        raise
    except Exception as error:
        return str(error)
    raise AssertionError(mode)

played, refused = map(json.loads, sys.argv[4:])
for mode, said in {**played, **refused}.items():
    found = fault(mode)
    assert said in found, (mode, found)
try:
    W.WORKER({"package": "http://127.0.0.1:9", "task": "", "score": "lst", "tool": False, "options": {}})
except LookupError as error:
    same((error.args[:2], ("score", "lst")))
else:
    raise AssertionError
"""


def test_every_fault_of_a_server_is_a_sentence(server: tuple[str, str]) -> None:
    tables = json.dumps(PLAYED), json.dumps(REFUSED)
    compare("openenv", "websockets", FAULTS, server[0], *tables)


async def test_a_step_refused_in_an_odd_way_is_answered(
    server: tuple[str, str], tmp_path: Path, cli: Cli
) -> None:
    url, python = server
    odd = ("init", "odd", "--python", python, "--from", f"openenv:{url}/errors?size=")
    cli(*odd[:-1], f"openenv:{url}/closed?size=2", code=1, said=REFUSED["closed"])
    cli(*odd[:-1], f"{odd[-1]}two", code=1, said="size=two is not a number")
    cli(*odd[:-1], f"{odd[-1]}2")
    episode = await episode_of(tmp_path / "odd", [call("go")] * 2, max_turns=2)
    assert episode.error == "" and "Error: [3]" in str(episode.turns[3].messages)


# --- packs served as an environment: played by the package's client and this one, and trained on by TRL ---


# --- an environment in an image: its container is started on loopback, and is removed with the process ---
