"""Environments of verifiers and evals of Inspect in an interpreter of their own."""

from __future__ import annotations

import asyncio
import json
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
from agentrl_cli.types import Episode, Outcome, Task
from tests.helpers.gateway import MODEL, call, served, world_of
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
    assert [row["sample"] for row in foreign.rows(2)] == [0, 1], (
        "it does not wait for one that loads"
    )
    assert not loading.done()
    (tmp_path / "ready").touch()
    assert len(await loading) == 1

    async def play(sample: int) -> float:
        return await foreign.solve(
            Task("t", "", "", "train", (), {"sample": sample}), "http://none", "key", "model"
        )

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
    "inspect:inspect_evals@agent_threat_bench_memory_poison": [
        call("memory_read", key="vacation_policy"),
        "20 days",
    ],
    "inspect:inspect_evals@agentdojo?workspace=banking&with_injections=false": [
        call("get_iban"),
        "Done.",
    ],
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", REAL)
async def test_a_published_environment_is_played_by_its_own_loop(
    source: str, tmp_path: Path
) -> None:
    kind = source.partition(":")[0]
    python = os.environ.get(f"{kind.upper()}_PYTHON", "")
    if not python:
        if find_spec("verifiers" if kind == "verifiers" else "inspect_ai") is None:
            pytest.skip(
                f"{kind} is not installed, and {kind.upper()}_PYTHON names no interpreter that has it"
            )
        python = sys.executable
    folder = tmp_path / "own"
    assert main(["init", str(folder), "--from", source, "--python", python]) == 0
    pack = load_pack(folder)
    first = min(
        (task for split in pack.splits() for task in pack.tasks(split)),
        key=lambda task: task.data["sample"],
    )
    config = Config.model_validate({"rollout": {"max_tokens": 32000, "max_new_tokens": 200}})
    rollout = AgentRollout(
        ScriptedPolicy(REAL[source], CHAT.tokenizer), CHAT, {pack.name: pack}, config
    )
    episode = await rollout.episode(Job(first, 0))
    assert episode.outcome in (Outcome.SOLVED, Outcome.FAILED) and episode.linear, episode.error
    assert episode.tool_calls == 1 and not episode.tool_errors
    if source == "verifiers:scratchpad":
        assert episode.solved


LATE = """
import asyncio, json, os, sys, urllib.request
from pathlib import Path
sys.path.insert(0, os.path.dirname(__file__))
from agentrl_loop import serve

class Worker:
    def __init__(self, config):
        self.config = config
    def rows(self, limit):
        assert Path(self.config["package"]).is_file()
        return [{"id": "r", "prompt": "?", "sample": 0}], []
    def rehearse(self):
        import large
    async def run(self, request):
        import large
        await asyncio.sleep(self.config["options"].get("start", 0))
        body = json.dumps({"messages": [{"role": "user", "content": "?"}]}).encode()
        head = {"authorization": "Bearer " + request["api_key"], "content-type": "application/json"}
        asked = urllib.request.Request(request["base_url"] + "/chat/completions", body, head)
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked).read()
        await asyncio.sleep(self.config["options"].get("after", 0))
        return {"reward": 1.0}

serve(Worker, forked=True)
"""
LARGE = "open(__file__ + '.imported', 'a').write('x')\n"


def rehearsed(folder: Path) -> Path:
    """A worker of which each run imports a module that counts its imports."""
    (folder / "late.py").write_text(LATE)
    (folder / "large.py").write_text(LARGE)
    (folder / "eval.py").write_text("")
    return folder / "late.py"


async def played(code: str, folder: Path, **agent: object) -> Episode:
    """An episode of a pack whose agent.py has this code."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text('{"id": "r", "prompt": "?", "sample": 0}\n')
    (folder / "agent.py").write_text(code)
    agent = {"function": "agent.py:solve", **agent}
    (folder / "task.yaml").write_text(f"name: p\nsandbox: false\nagent: {json.dumps(agent)}\n")
    return await episode_of(folder)


async def episode_of(folder: Path) -> Episode:
    pack = load_pack(folder)
    rollout = AgentRollout(
        ScriptedPolicy(["Hi."], CHAT.tokenizer), CHAT, {pack.name: pack}, Config()
    )
    return await rollout.episode(Job(pack.tasks("train")[0], 0))


async def test_what_a_run_imports_is_imported_once_for_all(tmp_path: Path) -> None:
    """By a rehearsal and by the program that runs are forked from: never by a run itself."""
    foreign = Foreign(str(rehearsed(tmp_path)), tmp_path / "eval.py")
    async with served(world_of(lambda key, ids: "Hi.")) as world:
        for number in range(3):
            task = Task("t", "", "", "train", (), {"sample": 0})
            assert await foreign.solve(task, world.base(f"k{number}"), "key", MODEL) == 1.0
    assert (tmp_path / "large.py.imported").read_text() == "xx"


async def test_a_foreign_agents_time_counts_from_its_first_call(tmp_path: Path) -> None:
    """What it takes to start, when all of a step do, is not its own; what it does then is."""
    worker = rehearsed(tmp_path)
    code = "from pathlib import Path\nfrom agentrl_cli.compat.programs import Foreign\n"
    code += f"solve = Foreign({str(worker)!r}, Path({str(tmp_path / 'eval.py')!r}), options=OPTIONS).solve\n"
    slow = await played(code.replace("OPTIONS", "{'start': 4}"), tmp_path / "slow", timeout=3)
    assert slow.outcome is Outcome.SOLVED, slow.error
    hangs = await played(code.replace("OPTIONS", "{'after': 60}"), tmp_path / "hangs", timeout=1)
    assert hangs.outcome is Outcome.AGENT_TIMEOUT and "1 s" in hangs.error


async def test_init_writes_paths_that_work_from_the_project_and_when_both_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--python and a file are typed relative to where init runs; the project is a folder below, or elsewhere."""
    here = tmp_path / "here"
    (here / "v" / "bin").mkdir(parents=True)
    worker = rehearsed(tmp_path)
    python = here / "v" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{worker}" "$2"\n')
    python.chmod(0o755)
    (here / "my_eval.py").write_text("")
    monkeypatch.chdir(here)
    given = ["--from", "inspect:my_eval.py@temps", "--python", "v/bin/python"]
    assert main(["init", "temps", *given]) == 0
    text = (here / "temps" / "agent.py").read_text()
    assert 'HERE / "../my_eval.py"' in text and 'python=HERE / "../v/bin/python"' in text
    monkeypatch.chdir("/")
    assert (await episode_of(here / "temps")).outcome is Outcome.SOLVED
    here.rename(tmp_path / "there")
    assert (await episode_of(tmp_path / "there" / "temps")).outcome is Outcome.SOLVED
    monkeypatch.chdir(tmp_path / "there")
    assert main(["init", str(tmp_path / "far" / "temps"), *given]) == 0, (
        "not beside them: the whole path"
    )
    assert (
        str(tmp_path / "there" / "my_eval.py")
        in (tmp_path / "far" / "temps" / "agent.py").read_text()
    )
    assert (await episode_of(tmp_path / "far" / "temps")).outcome is Outcome.SOLVED
