"""Servers that misbehave: each ends its episode with a sentence, ungraded, and nothing waits for ever."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl_cli.types import Outcome
from tests.helpers.cli import Cli
from tests.helpers.gateway import call
from tests.helpers.programs import episode_of, python_with

SERVER = """
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
    words = [python, "-c", SERVER, "127.0.0.1", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}", python
        finally:
            process.kill()


@pytest.mark.parametrize("mode", [*PLAYED])
async def test_an_episode_ends_with_a_sentence(
    mode: str, server: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, python = server
    source = f"openenv:{url}/{mode}?size=2&patience=2"
    Cli(capsys, tmp_path)("init", "odd", "--from", source, "--python", python)
    episode = await episode_of(tmp_path / "odd", [call("go")] * 3)
    assert episode.outcome is Outcome.ENV_ERROR and not episode.graded
    assert PLAYED[mode] in episode.error and len(episode.error) < 2000, episode.error


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("tools", "there are more than 2000"),
        ("names", "the name 7 is not a text"),
        ("kind", "lists tools that cannot be read"),
        ("schema", "does not answer as an OpenEnv server"),
        ("endless", "/schema is longer than"),
        ("elsewhere", "302"),
        ("moved", "redirect"),
        ("closed", "export OPENENV_TOKEN"),
    ],
)
def test_a_project_is_refused_with_a_sentence(
    mode: str,
    said: str,
    server: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, python = server
    source = f"openenv:{url}/{mode}?size=2&patience=2"
    Cli(capsys, tmp_path)("init", "odd", "--from", source, "--python", python, code=1, said=said)


async def test_a_step_refused_in_an_odd_way_is_answered(
    server: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, python = server
    Cli(capsys, tmp_path)(
        "init", "odd", "--from", f"openenv:{url}/errors?size=2", "--python", python
    )
    episode = await episode_of(tmp_path / "odd", [call("go")] * 2, max_turns=2)
    assert episode.error == "" and "Error: [3]" in str(episode.turns[3].messages)
