"""Packs served as an OpenEnv environment: played by the package's client and this one, and trained on by TRL."""

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config, Episode, Outcome, Pack, ScriptedPolicy, load_pack
from agentrl_cli.paths import bundled_model
from agentrl_cli.plugins.openenv.served import UNLIMITED, PackEnvironment, Played
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.context import RolloutContext
from tests.helpers.chat import CHAT
from tests.helpers.cli import Cli
from tests.helpers.gateway import call
from tests.helpers.processes import served
from tests.helpers.programs import episode_of, python_with

ROOT = Path(__file__).parents[3]
PLAY = """
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


def openenv_server(python: str, project: Path, token: str = "") -> AbstractContextManager[str]:
    """Yield the address of `agentrl tools serve --openenv` on a project, run by that interpreter."""
    words = "-m agentrl_cli tools serve --openenv --port 0 --project".split()
    more = [] if token else ["--no-auth"]
    given = {"PYTHONPATH": str(ROOT), "AGENTRL_TOKEN": token}
    return served([python, *words, str(project), *more], **given)


@pytest.fixture
def python() -> str:
    return python_with("openenv", "openenv websockets torch peft sqlite_utils")


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
        words = [python, "-c", PLAY, url, "key", str(rows)]
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
