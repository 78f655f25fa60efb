"""An environment in an image: its container is started on loopback, and is removed with the process."""

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.agents.runners.base import WorldFault
from agentrl_cli.errors import EnvError, SandboxUnavailable
from agentrl_cli.plugins.openenv.agent import OpenEnv
from agentrl_cli.plugins.openenv.image import MOST, serve_image
from agentrl_cli.sandbox import image
from agentrl_cli.sandbox.container import connect
from agentrl_cli.types import Task
from tests.helpers.cli import Cli
from tests.helpers.processes import ROOT, run_code
from tests.helpers.programs import python_with
from tests.plugins.openenv.test_openenv import LIAR

NAME = "agentrl-test-openenv"
PYTHON = "/usr/local/bin/python3"
START = [PYTHON, "/server.py", "0.0.0.0", "8000"]
DIES = [PYTHON, "-c", "print('no map at /maps')"]
PLAY = """
import asyncio, sys
from agentrl_cli.commands import main
from agentrl_cli.sandbox.container import LABEL, connect
from tests.helpers.gateway import call
from tests.helpers.programs import episode_of
from pathlib import Path
assert main(["init", "p", "--from", f"openenv:docker:{sys.argv[1]}?size=2", "--python", sys.argv[2]]) == 0
for _ in range(2):  # the second begins after its container was killed
    episode = asyncio.run(episode_of(Path("p"), [call("go")] * 3, max_turns=2))
    assert episode.error == "" and "hello" in str(episode.turns[1].messages), episode
    (container,) = connect().containers(filters={"ancestor": sys.argv[1]})
    assert [port["IP"] for port in container["Ports"]] == ["127.0.0.1"], container
    print(container["Id"])
    connect().kill(container["Id"])
"""


@pytest.fixture(scope="module")
def engine() -> Any:
    try:
        api = connect()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    if not image.exists(api, image.tag([])):
        pytest.skip("`agentrl sandbox build-image` makes the image that this test begins with")
    return api


@pytest.fixture
def made(engine: Any, python: str) -> Iterator[str]:
    websockets = subprocess.check_output(
        [python, "-c", "import websockets; print(websockets.__path__[0])"], text=True
    )
    files, folder = io.BytesIO(), Path(websockets.strip())
    with tarfile.open(fileobj=files, mode="w") as tar:
        tar.add(folder, "websockets", filter=lambda one: None if ".so" in one.name else one)
        script = tarfile.TarInfo("server.py")
        script.size = len(LIAR.encode())
        tar.addfile(script, io.BytesIO(LIAR.encode()))
    container = engine.create_container(image.tag([]), ["true"])["Id"]
    try:
        engine.put_archive(container, "/", files.getvalue())
        for tag, words in (("latest", START), ("dies", DIES)):
            engine.commit(container, NAME, tag, conf={"Entrypoint": words, "Cmd": [], "User": "0"})
        yield NAME
    finally:
        engine.remove_container(container, force=True)
        for tag in ("latest", "dies"):
            engine.remove_image(f"{NAME}:{tag}", force=True)


@pytest.fixture(scope="module")
def python() -> str:
    return python_with("openenv", "websockets")


def test_a_container_lives_as_long_as_the_process(
    made: str, engine: Any, python: str, tmp_path: Path, cli: Cli
) -> None:
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_code(PLAY, made, python, cwd=tmp_path, env=around)
    assert not engine.containers(all=True, filters={"id": done.stdout.split()[-1]})
    for name, code, said in (
        (f"{made}:dies", 1, ("does not answer on port 8000", "no map at /maps")),
        (f"{made}:absent", 2, "docker pull"),
        ("Bad Name", 1, "invalid reference format"),
    ):
        cli(
            "init",
            "odd",
            "--from",
            f"openenv:docker:{name}",
            "--python",
            python,
            code=code,
            said=said,
        )
    assert not engine.containers(all=True, filters={"ancestor": f"{made}:dies"})


def test_a_container_that_ends_is_followed_by_a_new_one(
    made: str, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = {serve_image(made)}
    assert serve_image(made) in found
    for count in range(1, MOST + 2):
        [running] = engine.containers(filters={"ancestor": made})
        engine.kill(running["Id"])
        engine.wait(running["Id"])
        if count > MOST:
            with pytest.raises(EnvError, match="has ended 4 times: exit code 137"):
                serve_image(made)
            engine.remove_container(running["Id"], force=True)
        else:
            assert serve_image(made).startswith("http://127.0.0.1:")
            assert (
                caplog.messages
                == [f"The container of {made} has ended (exit code 137): a new one is started."]
                * count
            )


async def test_an_image_that_is_lost_is_not_the_models_fault(
    engine: Any, python: str, tmp_path: Path
) -> None:
    agent = OpenEnv(f"docker:{NAME}:absent", python=python)
    task = Task("p/0", "p", "", "train", (), {"sample": 0})
    with pytest.raises(WorldFault, match="has no image"):
        await agent.solve(task, "http://127.0.0.1:9", "key", "model")
