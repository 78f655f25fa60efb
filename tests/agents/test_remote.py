"""Agents elsewhere: those that ask for tasks, environments of other projects in an interpreter of their own.

Programs of agents in the sandbox: the model's server is reachable, and nothing else of this machine is.
"""

import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from agentrl_cli import Episode, Outcome, Store, Task
from agentrl_cli.agents import program_loop
from agentrl_cli.agents import worker as shipped
from agentrl_cli.agents.programs import ForeignWorld
from agentrl_cli.agents.runners.server import EpisodeServer
from agentrl_cli.errors import ConfigError, EnvError, MissingDependency, NotFound
from agentrl_cli.rollout import Job
from tests.agents.test_runners import pack_of, play, rollout_of
from tests.helpers.chat import CHAT, call
from tests.helpers.gateway import MODEL, served, world_of
from tests.helpers.processes import ROOT, free_port, soon
from tests.helpers.programs import agent_of, episode_of, rehearsed


class Elsewhere:
    """An agent's process elsewhere, as far as HTTP goes."""

    def __init__(self, address: str) -> None:
        limits = httpx2.Limits(max_keepalive_connections=0)
        self.client = httpx2.AsyncClient(
            base_url=f"http://{address}", trust_env=False, timeout=None, limits=limits
        )

    async def claim(self) -> dict[str, Any]:
        while True:
            try:
                answer = await self.client.post("/tasks/claim", json={"wait": 5})
            except httpx2.ConnectError:
                await asyncio.sleep(0.02)
                continue
            assert answer.status_code in (200, 204), answer.text
            if answer.status_code == 200:
                return dict(answer.json())

    async def ask(self, work: dict[str, Any]) -> httpx2.Response:
        body = {"messages": work["task"]["messages"]}
        headers = {"authorization": f"Bearer {work['api_key']}"}
        return await self.client.post(
            f"{work['base_url']}/chat/completions", json=body, headers=headers
        )

    async def say(self, work: dict[str, Any], what: str, **body: Any) -> httpx2.Response:
        return await self.client.post(f"/tasks/{work['lease']}/{what}", json=body)


def begun(
    folder: Path, store: Store | None = None, n: int = 1, **agent: Any
) -> tuple[asyncio.Task[Episode], Elsewhere]:
    address = f"127.0.0.1:{free_port()}"
    pack = pack_of(folder, agent={"remote": address, "timeout": 600, **agent})
    return asyncio.ensure_future(play(pack, store=store, n=n)), Elsewhere(address)


async def test_an_agent_elsewhere_claims_a_task_and_gives_its_reward(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        playing, agent = begun(tmp_path / "pack", store, fields=["answer"])
        work = await agent.claim()
        assert work["task"]["answer"] == "2" and work["lease_seconds"] == 60
        again = await agent.client.post("/tasks/claim", json={"wait": 0})
        assert again.status_code == 204  # no one gets it twice
        assert (await agent.ask(work)).json()["choices"][0]["message"]["content"] == "Four."
        for what, body, code in (
            ("heartbeat", {}, 200),
            ("end", {"reward": "much"}, 400),
            ("end", {"reward": 1.0}, 200),
        ):
            assert (await agent.say(work, what, **body)).status_code == code
        episode = await playing
        assert len(store.episodes.get(episode.id).turns) == 2
    assert (episode.outcome, episode.reward) == (Outcome.SOLVED, 1.0), episode.error
    assert (await agent.say(work, "end", reward=0.0)).status_code == 409
    assert (await agent.ask(work)).status_code == 409
    for header in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert (await agent.client.post("/tasks/claim", json={}, headers=header)).status_code == 403


async def test_a_task_of_an_agent_that_died_is_given_again_at_most_twice(tmp_path: Path) -> None:
    playing, agent = begun(tmp_path / "a", lease=3.0)
    dead = await agent.claim()
    await agent.ask(dead)
    work = await agent.claim()
    assert not {work["lease"], work["base_url"]} & {dead["lease"], dead["base_url"]}
    refused = await agent.ask(dead), await agent.say(dead, "heartbeat")
    assert [answer.status_code for answer in refused] == [409, 409]
    for _ in range(40):  # it lives longer than a lease
        await asyncio.sleep(0.1)
        assert (await agent.say(work, "heartbeat")).status_code == 200
    await agent.ask(work)
    await agent.say(work, "end", reward=0.5)
    episode = await playing
    found = (episode.outcome, episode.reward, len(episode.turns))
    assert found == (Outcome.FAILED, 0.5, 2), episode.error
    playing, agent = begun(tmp_path / "b", lease=0.1)
    for _ in range(3):
        await agent.claim()
    episode = await playing
    assert episode.outcome is Outcome.ENV_ERROR and "each died" in episode.error


async def test_of_agents_that_wait_one_gets_the_task(tmp_path: Path) -> None:
    playing, agent = begun(tmp_path, lease=1.0)
    await agent.claim()  # and dies: its task is offered while two others wait
    waiting = (agent.client.post("/tasks/claim", json={"wait": 5}) for _ in range(2))
    answers = sorted(await asyncio.gather(*waiting), key=lambda answer: answer.status_code)
    assert [answer.status_code for answer in answers] == [200, 204]
    await agent.ask(answers[0].json())
    await agent.say(answers[0].json(), "end", reward=1.0)
    assert (await playing).outcome is Outcome.SOLVED


async def test_a_task_waits_while_agents_are_at_work(tmp_path: Path) -> None:
    playing, agent = begun(tmp_path, n=3, timeout=1.5)
    for _ in range(3):  # the last is claimed after more than 1.5 s
        work = await agent.claim()
        await agent.ask(work)
        await asyncio.sleep(0.9)
        await agent.say(work, "end", reward=1.0)
    assert (await playing).outcome is Outcome.SOLVED


async def test_ends_of_agents_elsewhere(tmp_path: Path) -> None:
    ended = []
    for error in ("no key", "Rejected: not in the form\nValueError: none"):
        playing, agent = begun(tmp_path / error[:2], rejects=["Rejected"])
        work = await agent.claim()
        await agent.ask(work)
        await agent.say(work, "end", error=error)
        ended.append(await playing)
    alone = await begun(tmp_path / "alone", timeout=0.2)[0]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = await play(pack_of(tmp_path / "taken", agent={"remote": address}))
    for episode, outcome, said in (
        (ended[0], Outcome.AGENT_ERROR, "no key"),
        (ended[1], Outcome.FAILED, "ValueError"),
        (alone, Outcome.ENV_ERROR, "No agent asked"),
        (refused, Outcome.ENV_ERROR, "Cannot listen on"),
    ):
        assert episode.outcome is outcome and said in episode.error
    for address, said in (("0.0.0.0:8500", "other machines"), ("8500", "is not an address")):
        with pytest.raises(ConfigError, match=said):
            await play(pack_of(tmp_path / "odd", agent={"remote": address}))


AGENT = """
import json, os, sys, urllib.request
OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

def ask(task, base_url, api_key):
    body = json.dumps({"messages": task["messages"]}).encode()
    head = {"authorization": "Bearer " + api_key, "content-type": "application/json"}
    answer = OPEN(urllib.request.Request(base_url + "/chat/completions", body, head))
    return json.loads(answer.read())["choices"][0]["message"]["content"]

def solve(task, base_url, api_key):
    said = ask(task, base_url, api_key)
    if task["answer"] == "4":
        raise RuntimeError("the search failed") from ConnectionError("refused")
    return float(said == "Four.")

async def later(task, base_url, api_key, model):
    return solve(task, base_url, api_key)

def odd(question): ...

def endless(task, base_url, api_key):
    ask(task, base_url, api_key)
    return float("inf")

def leaves(task, base_url, api_key):
    ask(task, base_url, api_key)
    sys.exit("no more money")
"""


@pytest.mark.parametrize("name", ["solve", "later"])
async def test_the_worker_that_ships_plays_tasks_with_the_standard_library_alone(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "worker.py").write_bytes(Path(shipped.__file__).read_bytes())
    address = f"127.0.0.1:{free_port()}"
    pack = pack_of(tmp_path / "pack", agent={"remote": address, "fields": ["answer"]})
    async with working(tmp_path, f"-I -S worker.py {address} mine.py:{name} --at-once 2"):
        rollout = rollout_of(pack, lambda key, ids: "Four.")
        episodes = await rollout.run([Job(task, 7) for task in pack.tasks("train")])
    assert [episode.outcome for episode in episodes if episode.solved] == [Outcome.SOLVED] * 3
    (failed,) = [episode for episode in episodes if not episode.solved]
    assert failed.outcome is Outcome.AGENT_ERROR and "ConnectionError: refused" in failed.error


@asynccontextmanager
async def working(folder: Path, words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker of `AGENT` in a process of its own, which ends with this."""
    (folder / "mine.py").write_text(AGENT)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words.split()),
        cwd=folder,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    yield process
    if process.returncode is None:
        process.terminate()
    await process.communicate()


@pytest.mark.parametrize(
    ("name", "error"), [("endless", "inf is not a reward"), ("leaves", "SystemExit: no more money")]
)
async def test_the_worker_reports_a_reward_that_is_not_a_finite_number_and_an_exit(
    tmp_path: Path, name: str, error: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with working(tmp_path, f"-m agentrl_cli.agents.worker {address} mine:{name}"):
        pack = pack_of(tmp_path / "pack", agent={"remote": address, "timeout": 60})
        episode = await play(pack)
    assert episode.outcome is Outcome.AGENT_ERROR and error in episode.error


async def test_the_worker_refuses_a_function_that_no_task_fits(tmp_path: Path) -> None:
    async with working(
        tmp_path, f"-m agentrl_cli.agents.worker 127.0.0.1:{free_port()} mine:odd"
    ) as process:
        said = (await process.communicate())[1].decode()
    assert process.returncode == 1 and "'question', which no task gives" in said


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

    async def play(sample: int) -> float | dict[str, float] | None:
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
    write_world(folder, code, {"function": "agent.py:solve", **agent})
    return await episode_of(folder)


def write_world(folder: Path, code: str, agent: object) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text('{"id": "r", "prompt": "?", "sample": 0}\n')
    (folder / "agent.py").write_text(code)
    (folder / "task.yaml").write_text(f"name: p\nsandbox: false\nagent: {json.dumps(agent)}\n")


def test_a_class_of_a_notebook_has_no_worker_beside_it() -> None:
    assert not hasattr(type("Own", (ForeignWorld,), {"__module__": "a notebook"}), "worker")


async def test_what_a_run_imports_is_imported_once_for_all(tmp_path: Path) -> None:
    foreign = agent_of(rehearsed(tmp_path))(tmp_path / "eval.py")
    task = Task("t", "", "", "train", (), {"sample": 0})
    async with served(world_of(lambda key, ids: "Hi.")) as world:
        for number in range(3):
            assert await foreign.solve(task, world.base(f"k{number}"), "key", MODEL) == 1.0
    assert (tmp_path / "large.py.imported").read_text() == "xx"


async def test_a_foreign_agents_time_counts_from_its_first_call(tmp_path: Path) -> None:
    worker = rehearsed(tmp_path)
    code = (
        "from pathlib import Path\nfrom agentrl_cli.agents.programs import ForeignAgent\n"
        f"class Other(ForeignAgent):\n    name, worker, needs = 'other', Path({str(worker)!r}), ''\n"
    )
    code += f"solve = Other(Path({str(tmp_path / 'eval.py')!r}), options=OPTIONS).solve\n"
    slow = await played(code.replace("OPTIONS", "{'start': 4}"), tmp_path / "slow", timeout=3)
    assert slow.outcome is Outcome.SOLVED, slow.error
    hangs = await played(code.replace("OPTIONS", "{'after': 60}"), tmp_path / "hangs", timeout=1)
    assert hangs.outcome is Outcome.AGENT_TIMEOUT and "1 s" in hangs.error


async def test_a_server_that_cannot_be_opened_keeps_no_episode_waiting() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[str]:
        yield Path("/no/such/place").read_text()

    with pytest.raises(EnvError, match=r"A place: .*No such file"):
        await EpisodeServer.here(CHAT).open_place("A place", broken)


WRONG = """
class Worker:
    def __init__(self, config):
        pass
    async def run(self, request):
        raise ValueError("\\udc80" + "错" * 5000)

WORKER, FORKED = Worker, True
"""


def test_an_error_in_any_language_is_written_at_once(tmp_path: Path) -> None:
    """Runs write to one pipe: what is longer than it takes at once may stand inside another's line."""
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    given = [program_loop.__file__, str(tmp_path / "wrong.py"), json.dumps({"options": {}})]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *given], **pipes) as program:
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write(b'{"id": 0, "do": "run"}\n')
        program.stdin.flush()
        ready, answer = program.stdout.readline(), program.stdout.readline()
        program.stdin.close()
    assert json.loads(ready)["ready"] and len(answer) <= select.PIPE_BUF
    assert json.loads(answer)["error"].startswith("ValueError: \udc80错错")


# --- worlds of other projects, played by the loop ---


WORLDS = """
class World:
    tools = [{"type": "function", "function": {"name": "act", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}}]
    def __init__(self, sample):
        self.prompt, self.sum = [{"role": "user", "content": f"Add to {sample}."}], sample
    def say(self, text):
        return "Call act.", False
    def call(self, name, arguments):
        if arguments["n"] == 13:
            raise RuntimeError("the board broke")
        self.sum += arguments["n"]
        return f"It is {self.sum}.", self.sum > 1
    def reward(self):
        return self.sum / 2

class Worker:
    size = 2
    def __init__(self, config):
        if config["package"] != "sum":
            raise LookupError("game", config["package"], ["sum", "product"])
    def open(self, sample):
        return World(sample)

WORKER, FORKED = Worker, True
"""
SUMS = """from pathlib import Path
from agentrl_cli.agents.programs import ForeignWorld

class Sums(ForeignWorld):
    name, worker, needs, tested = "sums", Path(__file__).with_name("worlds.py"), "", {"pip": "0"}

solve = Sums("sum").solve
"""


async def test_a_world_is_played_to_its_end_or_a_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_world(tmp_path, SUMS, "agent.py:solve")
    (tmp_path / "worlds.py").write_text(WORLDS)
    bad = '<tool_call>\n{"name": "act", "arguments": {"n": }}\n</tool_call>'
    said = ["Hm.", call("act", m=1), bad, call("act", n=1) + call("act", n=1) + call("act", n=9)]
    episode = await episode_of(tmp_path, said)
    assert episode.outcome is Outcome.SOLVED, episode.error
    read = [turn.messages[0]["content"] for turn in episode.turns if turn.role in ("tool", "user")]
    assert read[:2] == ["Add to 0.", "Call act."] and "check n, m" in read[2]
    assert "are not JSON" in read[3] and len(episode.turns) == 8
    limited = await episode_of(tmp_path, [call("act", n=1), "Hm."], max_turns=2)
    assert (limited.outcome, limited.reward) == (Outcome.TRUNCATED_TURNS, 0.5)
    crashed = await episode_of(tmp_path, [call("act", n=13)])
    assert crashed.outcome is Outcome.ENV_ERROR and "the board broke" in crashed.error
    assert "was tested" in caplog.text
    kind = agent_of(tmp_path / "worlds.py")
    prompts = [row["prompt"][0]["content"] for row in kind("sum").rows(9)]
    assert prompts == ["Add to 0.", "Add to 1."]
    with pytest.raises(NotFound, match="No game named 'sums'") as unknown:
        kind("sums").rows(1)
    assert unknown.value.hint == "Did you mean sum? There are: sum, product."
    world = SimpleNamespace(call=lambda name, given: (f"{name} {given}", True))
    parameters = {"properties": {"n": {"type": "integer"}}, "additionalProperties": True}
    tools = [{"function": {"name": "act", "parameters": parameters}}]
    done = program_loop._call(world, {"name": "act", "arguments": '{"m": 2}'}, tools)
    assert done == ("act {'m': 2}", True), "arguments that the schema allows without naming them"


# --- programs of agents in the sandbox ---


def pipes() -> set[str]:
    """The pipes that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("pipe:")}
