"""Packs served as an OpenEnv environment: played by the package's client and this one, and trained on by TRL."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config, Episode, Outcome, Pack, ScriptedPolicy, Task, load_pack
from agentrl_cli.agents.runners.base import WorldFault
from agentrl_cli.errors import EnvError, SandboxUnavailable
from agentrl_cli.paths import bundled_model
from agentrl_cli.plugins.openenv.agent import OpenEnv
from agentrl_cli.plugins.openenv.image import MOST, serve_image
from agentrl_cli.plugins.openenv.served import UNLIMITED, PackEnvironment, Played
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.sandbox import image
from agentrl_cli.sandbox.container import connect
from tests.helpers.chat import CHAT, call
from tests.helpers.cli import Cli
from tests.helpers.processes import ROOT, run_code, served
from tests.helpers.programs import episode_of, python_with
from tests.plugins.openenv.test_openenv import LIAR

CLIENTS = """
import asyncio, json, sys
from openenv.core import GenericEnvClient
url, token, file = sys.argv[1:]
rows = [json.loads(line) for line in open(file)]
head = {"Authorization": f"Bearer {token}"}

async def play(seed):
    row = rows[seed]
    async with GenericEnvClient(base_url=url, headers=head) as env:
        seen = await env.reset(seed=seed)
        assert row["prompt"] in seen.observation["result"], seen
        assert seen.metadata["messages"][-1] == {"role": "user", "content": row["prompt"]}
        given = {"expression": row["expression"]}
        seen = await env.step({"type": "call_tool", "tool_name": "calculator", "arguments": given})
        assert (seen.observation["result"], seen.done, seen.reward) == (row["answer"], False, None)
        state = await env.state()
        assert state["task"].endswith(row["id"]) and state["step_count"] == 1, state
        text = {"text": f"Answer: {row['answer'] if seed % 2 else 'none'}"}
        seen = await env.step({"type": "call_tool", "tool_name": "answer", "arguments": text})
        assert seen.done and seen.metadata["rewards"]["exact"] == seed % 2, seen
        try:
            await env.step({"type": "call_tool", "tool_name": "answer", "arguments": text})
        except RuntimeError as error:
            assert "reset" in str(error)
        else:
            raise AssertionError
        return seen.reward

async def main():
    found = await asyncio.gather(*(play(seed) for seed in range(64)))
    async with GenericEnvClient(base_url=url, headers=head) as env:
        await env.reset(seed=1)
        listed = await env.step({"type": "list_tools"})
        names = [tool["name"] for tool in listed.observation["tools"]]
        again = await env.reset(index=1, split="test")  # in the middle of an episode
        test = again.metadata["messages"][-1]["content"]
    refused = ""
    try:
        async with GenericEnvClient(base_url=url) as env:
            await env.reset()
    except ConnectionError as error:
        refused = str(error)
    print(json.dumps({"rewards": found, "names": names, "test": test, "refused": refused}))

asyncio.run(main())
"""


@pytest.fixture
def python() -> str:
    return python_with("openenv", "openenv websockets torch peft sqlite_utils")


def openenv_server(python: str, project: Path, token: str = "") -> AbstractContextManager[str]:
    """Yield the address of `agentrl tools serve --openenv` on a project, run by that interpreter."""
    words = "-m agentrl_cli tools serve --openenv --port 0 --project".split()
    more = [] if token else ["--no-auth"]
    given = {"PYTHONPATH": str(ROOT), "AGENTRL_TOKEN": token}
    return served([python, *words, str(project), *more], **given)


@pytest.fixture
def project(tmp_path: Path, cli: Cli) -> Path:
    cli("init", "calc-task", "calc")
    return tmp_path / "calc"


async def test_by_two_clients_at_once(
    python: str,
    project: Path,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = project / "data" / "train.jsonl"
    with openenv_server(python, project, "key") as url:
        words = [python, "-c", CLIENTS, url, "key", str(rows)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        right = [reward for seed, reward in enumerate(found["rewards"]) if seed % 2]
        assert min(right) >= 1 and max(found["rewards"][::2]) < 1
        assert found["names"] == ["calculator", "answer"] and "403" in found["refused"]
        tests = (project / "data" / "test.jsonl").read_text().splitlines()
        assert found["test"] == json.loads(tests[1])["prompt"]
        monkeypatch.setenv("OPENENV_TOKEN", "key")
        cli("init", "back", "--from", f"openenv:{url}?size=4", "--python", python)
        sample = load_pack(tmp_path / "back").tasks("train")[0].data["sample"]
        row = json.loads(rows.read_text().splitlines()[sample])
        said = [
            call("calculator", expression=row["expression"]),
            call("answer", text=f"Answer: {row['answer']}"),
        ]
        episode = await episode_of(tmp_path / "back", said)
    assert episode.error == "" and episode.reward is not None and episode.reward >= 1
    assert row["prompt"] in str(episode.turns[0].messages) + str(episode.turns[1].messages)


def test_trl_trains_on_it(python: str, project: Path, tmp_path: Path) -> None:
    python_with("openenv", "trl openenv datasets")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    out, base = tmp_path / "out", bundled_model()
    script = str(ROOT / "examples" / "openenv_trl.py")
    with openenv_server(python, project) as url:
        words = [python, script, url, "--model", str(base), "--steps", "1", "--out", str(out)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 1: reward " in done.stdout
    from safetensors.torch import load_file

    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    assert any(
        (after[name] != before[name].to(after[name])).any() for name in after if name in before
    )


def context_of(pack: Pack, **settings: Any) -> RolloutContext:
    config = Config.model_validate({"rollout": settings})
    policy = ScriptedPolicy((), CHAT.tokenizer, context_length=UNLIMITED)
    return Rollout(policy, CHAT, {pack.name: pack}, config).context


async def play(pack: Pack, turns: Any, **settings: Any) -> Episode:
    played = Played(context_of(pack, **settings), pack, Job(pack.tasks("train")[0], 0))
    said, ended = await played.hear()
    name, arguments = next(turns)
    while ended is None:
        played.take(name, arguments)
        said, ended = await played.hear()
        if ended is None:
            name, arguments = turns.send(said[-1]["content"])
    with pytest.raises(ValueError, match="reset"):
        played.take(name, arguments)
    return ended


async def test_a_user_answers_and_limits_end() -> None:
    pack = load_pack("guess-task")

    def halves() -> Any:
        low, high = 1, 50
        while True:
            guess = (low + high) // 2
            text = yield "answer", {"text": str(guess)}
            low, high = (guess + 1, high) if "higher" in text.casefold() else (low, guess - 1)

    solved = await play(pack, halves(), max_turns=8)
    assert solved.outcome is Outcome.SOLVED and (solved.reward or 0) >= 1
    cut = await play(pack, halves(), max_turns=1)
    assert cut.outcome is Outcome.TRUNCATED_TURNS and len(cut.turns) > 2


async def test_ungraded_is_no_reward() -> None:
    def fails(episode: Episode, ctx: Any) -> float:
        raise RuntimeError("no")

    pack = load_pack("calc-task")
    pack = replace(pack, rewards=tuple(replace(one, function=fails) for one in pack.rewards))
    ended = await play(pack, iter([("answer", {"text": "1"})]))
    assert ended.outcome is Outcome.ENV_ERROR and not ended.graded


async def test_a_seed_is_a_number() -> None:
    pack, sent = load_pack("calc-task"), json.loads('{"seed": "x"}')
    environment = PackEnvironment(context_of(pack), {"train": pack.tasks("train")})
    with pytest.raises(ValueError, match="are whole numbers, not 'x'"):
        await environment.reset_async(**sent)


def test_what_is_missing_is_said(project: Path, cli: Cli) -> None:
    cli.folder = project
    for words, said in (
        ("--mcp", "--mcp does nothing with --openenv"),
        ("--journal j.db --idle 5", "--journal and --idle do nothing with --openenv"),
        (
            "--parser qwen --done-if-invalid",
            "--parser and --done-if-invalid do nothing with --open",
        ),
    ):
        cli("tools", "serve", "--openenv", *words.split(), code=2, said=said)
    if find_spec("websockets") is None:
        init = ("init", "x", "--from", "openenv:http://127.0.0.1:9", "--python", sys.executable)
        cli(*init, code=3, said="-m pip install websockets")
    if find_spec("openenv") is None:
        said = "pip install 'agentrl-cli[openenv-server]'"
        cli("tools", "serve", "--openenv", code=3, said=said)


NAME = "agentrl-test-openenv"


PYTHON = "/usr/local/bin/python3"


START = [PYTHON, "/server.py", "0.0.0.0", "8000"]


DIES = [PYTHON, "-c", "print('no map at /maps')"]


CONTAINED = """
import asyncio, sys
from agentrl_cli.commands import main
from agentrl_cli.sandbox.container import LABEL, connect
from tests.helpers.chat import call
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
def made(engine: Any, client: str) -> Iterator[str]:
    websockets = subprocess.check_output(
        [client, "-c", "import websockets; print(websockets.__path__[0])"], text=True
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
def client() -> str:
    return python_with("openenv", "websockets")


def test_a_container_lives_as_long_as_the_process(
    made: str, engine: Any, client: str, tmp_path: Path, cli: Cli
) -> None:
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_code(CONTAINED, made, client, cwd=tmp_path, env=around)
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
            client,
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
    engine: Any, client: str, tmp_path: Path
) -> None:
    agent = OpenEnv(f"docker:{NAME}:absent", python=client)
    task = Task("p/0", "p", "", "train", (), {"sample": 0})
    with pytest.raises(WorldFault, match="has no image"):
        await agent.solve(task, "http://127.0.0.1:9", "key", "model")
