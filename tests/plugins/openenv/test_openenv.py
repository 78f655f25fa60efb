"""OpenEnv environments behind an address: sessions side by side, tools, rewards, and what is refused."""

import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.cli import Cli
from tests.helpers.gateway import call
from tests.helpers.processes import comes
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


def lives(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    python = python_with("openenv", "openenv websockets")
    file = tmp_path_factory.mktemp("openenv") / "server.py"
    file.write_text(SERVER)
    found, processes = {}, []
    for name, kind, most in (("NUMBERS", "numbers", 64), ("BOX", "box", 64), ("ONE", "numbers", 1)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [python, str(file), kind, str(port), str(most)]
        process = subprocess.Popen(words)
        processes.append(process)
        found[name] = f"http://127.0.0.1:{port}"

        assert comes(partial(answers, port), partial(lives, process))
    yield found
    for process in processes:
        process.terminate()
        process.wait()


def test_sessions_side_by_side(servers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, url in servers.items():
        monkeypatch.setenv(name, url)
    compare("openenv", "openenv websockets", PLAY)


async def test_a_project_of_an_address(
    servers: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli, python = Cli(capsys, tmp_path), python_with("openenv", "openenv websockets")
    source = f"openenv:{servers['NUMBERS']}?size=6"
    cli("init", "numbers", "--from", source, "--python", python)
    episode = await episode_of(
        tmp_path / "numbers", [call("act", number=number) for number in range(10)]
    )
    assert episode.error == "" and episode.reward in {1 - n / 8 for n in range(10)}
    assert "round" in str(episode.turns[0].messages) + str(episode.turns[1].messages)
    taken = f"openenv:{servers['ONE']}"
    cli("init", "one", "--from", taken, "--python", python)
    nowhere = "openenv:http://127.0.0.1:9"
    cli("init", "two", "--from", nowhere, "--python", python, code=1, said="does not answer")


async def test_a_project_of_a_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_with("openenv", "openenv websockets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SERVER)
    cli, given = Cli(capsys, tmp_path), ("--python", python)
    cli("init", "numbers", "--from", "openenv:mine:Numbers?size=6", *given)
    said = [call("act", number=number) for number in range(10)]
    episode = await episode_of(tmp_path / "numbers", said)
    assert episode.error == "" and episode.reward in {1 - n / 8 for n in range(10)}
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
