"""Environments of verifiers and evals of Inspect in an interpreter of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.commands import main
from agentrl_cli.compat.programs import Foreign
from agentrl_cli.config import Config
from agentrl_cli.errors import EnvError, MissingDependency
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job
from agentrl_cli.tasks import load_pack
from agentrl_cli.types import Outcome, Task
from tests.helpers.gateway import call
from tests.helpers.processes import soon

CHAT = Chat(ByteTokenizer())

WORKER = """
import asyncio, os, sys, time
from agentrl_loop import serve

class Worker:
    def __init__(self, config):
        if config["task"] == "missing":
            import no_such_module
        while config["task"] and not os.path.exists(config["task"]):
            time.sleep(0.02)
        self.runs = 0
    def rows(self, limit):
        print("not an answer")
        return [{"id": str(n), "prompt": "?", "sample": n} for n in range(limit)], []
    async def run(self, request):
        self.runs += 1
        if request["sample"] == 0:
            raise ValueError("a broken sample")
        if request["sample"] == 1:
            open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "begun"), "w").close()
            await asyncio.sleep(3600)
        if request["sample"] == 2:
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        return {"reward": self.runs / 4}

serve(Worker, forked=%s)
"""


@pytest.mark.parametrize("forked", [False, True])
async def test_a_worker_fails_is_stopped_and_begins_again(forked: bool, tmp_path: Path) -> None:
    """A broken run is its own episode's; a cancelled one is stopped; a dead one is started again."""
    (tmp_path / "worker.py").write_text(WORKER % forked)
    foreign = Foreign(str(tmp_path / "worker.py"), "package")
    slow = Foreign(str(tmp_path / "worker.py"), "package", task=str(tmp_path / "ready"))
    loading = asyncio.ensure_future(asyncio.to_thread(slow.rows, 1))
    assert [row["sample"] for row in foreign.rows(2)] == [0, 1], "it does not wait for one that loads"
    assert not loading.done()
    (tmp_path / "ready").touch()
    assert len(await loading) == 1

    async def play(sample: int) -> float:
        return await foreign.solve(Task("t", "", "", "train", (), {"sample": sample}), "http://none", "key", "model")

    with pytest.raises(EnvError, match="ValueError: a broken sample"):
        await play(0)
    stopped = asyncio.create_task(play(1))
    await soon((tmp_path / "begun").exists)
    stopped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped
    # In a process of its own each run is the first; in one process those before it are counted.
    assert await play(3) == (0.25 if forked else 0.75)
    with pytest.raises(EnvError, match="its process died" if forked else "last words"):
        await play(2)
    assert await play(3) == 0.25
    with pytest.raises(MissingDependency, match="no_such_module"):
        Foreign(str(tmp_path / "worker.py"), "package", task="missing").rows(1)


REAL = {
    "verifiers:glossary": [call("facts_lookup", name="Ada Lovelace"), "<answer>{}</answer>"],
    "verifiers:scratchpad": [call("scratchpad_roundtrip", word="alpha"), "alpha"],
    "inspect:inspect_evals@agent_threat_bench_memory_poison": [call("memory_read", key="vacation_policy"), "20 days"],
    "inspect:inspect_evals@agentdojo?workspace=banking&with_injections=false": [call("get_iban"), "Done."],
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", REAL)
async def test_a_published_environment_is_played_by_its_own_loop(source: str, tmp_path: Path) -> None:
    kind = source.partition(":")[0]
    python = os.environ.get(f"{kind.upper()}_PYTHON", "")
    if not python:
        if find_spec("verifiers" if kind == "verifiers" else "inspect_ai") is None:
            pytest.skip(f"{kind} is not installed, and {kind.upper()}_PYTHON names no interpreter that has it")
        python = sys.executable
    folder = tmp_path / "own"
    assert main(["init", str(folder), "--from", source, "--python", python]) == 0
    pack = load_pack(folder)
    first = min((task for split in pack.splits() for task in pack.tasks(split)), key=lambda task: task.data["sample"])
    config = Config.model_validate({"rollout": {"max_tokens": 32000, "max_new_tokens": 200}})
    rollout = AgentRollout(ScriptedPolicy(REAL[source], CHAT.tokenizer), CHAT, {pack.name: pack}, config)
    episode = await rollout.episode(Job(first, 0))
    assert episode.outcome in (Outcome.SOLVED, Outcome.FAILED) and episode.linear, episode.error
    assert episode.tool_calls == 1 and not episode.tool_errors
    if source == "verifiers:scratchpad":
        assert episode.solved
