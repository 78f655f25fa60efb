"""Agents of other projects in an interpreter of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.errors import EnvError, MissingDependency
from agentrl_cli.types import Episode, Outcome, Task
from tests.helpers.gateway import MODEL, served, world_of
from tests.helpers.processes import soon
from tests.helpers.programs import agent_of, episode_of, rehearsed

CHAT = Chat(ByteTokenizer())

WORKER = """
import asyncio, os, sys, time

class Worker:
    def __init__(self, config):
        if config["task"] == "missing":
            import no_such_module
        while config["task"] and not os.path.exists(config["task"]):
            time.sleep(0.02)
        self.runs = 0
    def rows(self, limit):
        print("not an answer")
        return [{"id": str(n), "prompt": "?", "sample": n} for n in range(limit)]
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

WORKER, FORKED = Worker, %s
"""


@pytest.mark.parametrize("forked", [False, True])
async def test_a_worker_fails_is_stopped_and_begins_again(forked: bool, tmp_path: Path) -> None:
    """A broken run is its own episode's; a cancelled one is stopped; a dead one is started again."""
    (tmp_path / "worker.py").write_text(WORKER % forked)
    kind = agent_of(tmp_path / "worker.py")
    foreign, slow = kind("package"), kind("package", task=str(tmp_path / "ready"))
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
        kind("package", task="missing").rows(1)


async def played(code: str, folder: Path, **agent: object) -> Episode:
    """An episode of a pack whose agent.py has this code."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text('{"id": "r", "prompt": "?", "sample": 0}\n')
    (folder / "agent.py").write_text(code)
    agent = {"function": "agent.py:solve", **agent}
    (folder / "task.yaml").write_text(f"name: p\nsandbox: false\nagent: {json.dumps(agent)}\n")
    return await episode_of(folder)


async def test_what_a_run_imports_is_imported_once_for_all(tmp_path: Path) -> None:
    """By a rehearsal and by the program that runs are forked from: never by a run itself."""
    foreign = agent_of(rehearsed(tmp_path))(tmp_path / "eval.py")
    async with served(world_of(lambda key, ids: "Hi.")) as world:
        for number in range(3):
            task = Task("t", "", "", "train", (), {"sample": 0})
            assert await foreign.solve(task, world.base(f"k{number}"), "key", MODEL) == 1.0
    assert (tmp_path / "large.py.imported").read_text() == "xx"


async def test_a_foreign_agents_time_counts_from_its_first_call(tmp_path: Path) -> None:
    """What it takes to start, when all of a step do, is not its own; what it does then is."""
    worker = rehearsed(tmp_path)
    code = "from pathlib import Path\nfrom agentrl_cli.agents.programs import ForeignAgent\n"
    code += f"class Other(ForeignAgent):\n    name, worker, needs = 'other', Path({str(worker)!r}), ''\n"
    code += f"solve = Other(Path({str(tmp_path / 'eval.py')!r}), options=OPTIONS).solve\n"
    slow = await played(code.replace("OPTIONS", "{'start': 4}"), tmp_path / "slow", timeout=3)
    assert slow.outcome is Outcome.SOLVED, slow.error
    hangs = await played(code.replace("OPTIONS", "{'after': 60}"), tmp_path / "hangs", timeout=1)
    assert hangs.outcome is Outcome.AGENT_TIMEOUT and "1 s" in hangs.error
