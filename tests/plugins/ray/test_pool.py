"""Jobs and faults of a pool of workers, how episodes travel, and trainings whose episodes processes make."""

import asyncio
import pickle
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config, ScriptedPolicy, load_config
from agentrl_cli.config.show import full_yaml
from agentrl_cli.errors import (
    ConfigError,
    EnvironmentProblem,
    ModelError,
    PolicyError,
    RunFailed,
    StoreError,
)
from agentrl_cli.plugins.ray.open import open_pool, require_local, require_same
from agentrl_cli.plugins.ray.pool import WorkerPool
from agentrl_cli.plugins.ray.processes import name_gpus, open_links
from agentrl_cli.plugins.ray.ray_actors import (
    name_interpreter,
    require_answer,
    require_inside,
    require_room,
    resources_of,
)
from agentrl_cli.plugins.ray.remote import RemoteWorker, WorkerLost
from agentrl_cli.plugins.ray.service import (
    Call,
    Delivery,
    Hello,
    Message,
    Relay,
    Setup,
    describe_node,
    plain_error,
)
from agentrl_cli.plugins.ray.settings import ClusterConfig
from agentrl_cli.policies.load import load_policy
from agentrl_cli.policies.remote.http import Unreachable
from agentrl_cli.reports.run_data import load
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.context import Attempted, RolloutContext
from agentrl_cli.rollout.recorder import StoreRecorder
from agentrl_cli.runtime import open_runtime
from agentrl_cli.store import RunRow, Store, WorkerRow
from agentrl_cli.tasks import load_packs
from agentrl_cli.tui.watch.pages import worker_lines
from agentrl_cli.types import (
    Episode,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Task,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
)
from tests.helpers.chat import CHAT
from tests.helpers.processes import soon
from tests.helpers.train import settings, write_pack
from tests.plugins.ray.links import SERVICES, Play, ScriptedLink, copy_of

TASK = Task("t", "p", "", "train", ({"role": "user", "content": "Go."},))


@pytest.fixture
async def whole() -> Episode:
    """A real episode of the scripted policy, with a tool turn added by hand where only the codec looks at it."""
    policy, asked = ScriptedPolicy(["Hello."], CHAT.tokenizer), CHAT.tokenizer.encode("Go.")
    said = Tokens.from_generation(await policy.generate("k", asked, Config().rollout.sampling()))
    call = ToolCall("c1", "add", {"a": 1, "b": [None, "\ud800"]}, "raw")
    result = ToolResult(
        "3", metrics={"n": float("inf")}, images=(b"png",), seconds=0.5, level="ns", done=True
    )
    turns = (
        Turn(0, "user", ({"role": "user", "content": "Go."},), 0, 3),
        Turn(1, "assistant", ({"role": "assistant", "content": "Hi"},), 3, 3 + len(said), calls=(call,),
             stop_reason=StopReason.STOP, weights_version="v", started=1.5, seconds=0.25),
        Turn(2, "tool", (), 3 + len(said), 3 + len(said), results=(result,), reward=0.5, parent=1),
    )  # fmt: skip
    return Episode(
        "e",
        "t",
        "p",
        turns=turns,
        tokens=Tokens.concat([Tokens.from_ids(asked, [Origin.USER] * 3), said, Tokens.empty()]),
        reward_parts=(RewardPart("r", 1.0, primary=True, detail="ok"),),
        outcome=Outcome.SOLVED,
        flags=("X",),
    )


@pytest.fixture
def play(whole: Episode) -> Play:
    return copy_of(whole)


def pool_of(
    plays: list[Play],
    store: Store,
    kind: type[WorkerPool] = WorkerPool,
    link: type[ScriptedLink] = ScriptedLink,
    recorder: StoreRecorder | None = None,
) -> WorkerPool:
    given = {"cluster": {"kind": "processes"}, "rollout": {"concurrency": 4}}
    config = Config.model_validate(given)
    setup = Setup(config, Path(), "scripted", False)
    recorded = (recorder or StoreRecorder(store), store.episodes.discard)
    workers = [
        RemoteWorker(n, lambda play=play: link(play), setup, *recorded)  # type: ignore[misc]
        for n, play in enumerate(plays)
    ]
    return kind(workers, config, store)


async def run(pool: WorkerPool, *seeds: int) -> list[Episode]:
    """The episodes of jobs with these seeds, by a pool that is closed afterwards."""
    assert pool.store is not None
    policy = ScriptedPolicy([], CHAT.tokenizer)
    context = Rollout(policy, CHAT, {}, Config(), store=pool.store).context
    await pool.open("v0")
    try:
        jobs = [pool.attempt(Job(TASK, seed), context) for seed in seeds]
        return [one.episode for one in await asyncio.gather(*jobs)]
    finally:
        await pool.close()
        pool.store.flush()


@pytest.mark.parametrize("failed_before_its_prompt", [False, True])
def test_an_episode_arrives_as_the_store_would_return_it(
    failed_before_its_prompt: bool, whole: Episode
) -> None:
    episode = whole.with_(turns=(), tokens=Tokens.empty()) if failed_before_its_prompt else whole
    sent: list[Message] = []
    relay, delivery = Relay(1, sent.append), Delivery(None)
    relay.start(episode, "train", "")
    relay.finish(episode)
    for _, name, values in pickle.loads(pickle.dumps(sent)):
        delivery.take(name, *values)
    arrived = delivery.ended
    assert arrived is not None and not delivery.episode_id and arrived.turns == episode.turns
    assert arrived.with_(turns=(), tokens=episode.tokens) == episode.with_(turns=())
    for name in ("ids", "origin", "logp_sampled", "logp_policy", "entropy", "top_ids", "top_logps"):
        found, wanted = getattr(arrived.tokens, name), getattr(episode.tokens, name)
        assert found.tobytes() == wanted.tobytes() and found.dtype == wanted.dtype, name


def stored(store: Store) -> list[str]:
    return [row[0] for row in store.select("SELECT DISTINCT episode_id FROM turns")]


async def test_a_lost_job_is_given_again_and_counted_once(
    store: Store, whole: Episode, play: Play
) -> None:
    deaths, seen = iter(["lost0", "lost1"]), list[list[str]]()

    def dies_twice(job: Job, relay: Relay) -> Episode | None:
        if (name := next(deaths, "")) == "":
            seen.append(stored(store))
            return play(job, relay)
        relay.start(Episode(name, "t", started=1.0), "train", "")
        relay.turn(name, whole.turns[0], whole.tokens.slice(0, whole.turns[0].end))
        return None

    class Recorded(StoreRecorder):
        def turn(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
            super().turn(episode_id, turn, tokens)
            store.flush()  # it is in the file before the worker is lost
            seen.append(stored(store))

    (found,) = await run(pool_of([dies_twice], store, recorder=Recorded(store)), 7)
    (row,) = store.episodes.rows(store.episodes.ids())
    assert (row.id, row.seed, row.outcome) == (found.id, 7, Outcome.SOLVED)
    assert stored(store) == [found.id]
    assert seen[:3] == [["lost0"], ["lost1"], []], "each lost attempt is deleted before the next"


@pytest.mark.parametrize("written", [False, True])
async def test_an_episode_whose_answer_was_lost_is_not_kept_beside_its_second_try(
    store: Store, play: Play, written: bool
) -> None:
    """The worker dies between the end of an episode, which is recorded, and the answer to its job."""
    deaths = iter([True])

    class Recorded(StoreRecorder):
        def finish(self, episode: Episode) -> None:
            super().finish(episode)
            if written:
                store.flush()

    def dies_at_the_end(job: Job, relay: Relay) -> Episode | None:
        ended = play(job, relay)
        return None if next(deaths, False) else ended

    (found,) = await run(pool_of([dies_at_the_end], store, recorder=Recorded(store)), 7)
    rows = store.episodes.rows(store.episodes.ids())
    assert [row.id for row in rows] == stored(store) == [found.id]


async def test_a_job_that_kills_three_workers_is_an_env_error_and_the_others_go_on(
    store: Store, play: Play
) -> None:
    def poisoned(job: Job, relay: Relay) -> Episode | None:
        return None if job.seed == 3 else play(job, relay)

    found = await run(pool_of([poisoned, poisoned], store), *range(6))
    bad = found.pop(3)
    assert len(store.episodes.ids()) == 6 and bad.outcome is Outcome.ENV_ERROR
    assert bad.error.startswith("The worker was lost 3 times. Worker ")
    assert [episode.outcome for episode in found] == [Outcome.SOLVED] * 5


class Shared(ScriptedLink):
    """Waits until no further job comes, then dies if one of them is the job with seed 0."""

    deaths: list[int]
    twice: asyncio.Event

    async def open(self, setup: Setup) -> None:
        self.held: list[tuple[int, Job]] = []

    def _play(self, number: int, job: Job) -> None:
        self.held.append((number, job))
        if len(self.held) == 1:
            self.deciding = asyncio.ensure_future(self._decide())

    async def _decide(self) -> None:
        count = 0
        while count < len(self.held):
            count = len(self.held)
            for _ in range(50):
                await asyncio.sleep(0)
        if any(job.seed == 0 for _, job in self.held):
            Shared.deaths.append(count)
            if len(Shared.deaths) == 2:
                Shared.twice.set()
            return self._die()
        held, self.held = self.held, []
        for number, job in held:
            super()._play(number, job)


async def test_the_last_try_of_a_lost_job_is_alone_on_its_worker(store: Store, play: Play) -> None:
    Shared.deaths, Shared.twice = [], asyncio.Event()

    class Late(WorkerPool):
        async def attempt(self, job: Job, context: RolloutContext) -> Attempted:
            if job.seed == 3:
                await Shared.twice.wait()
            return await super().attempt(job, context)

    first, *others = await run(pool_of([play], store, Late, Shared), *range(4))
    assert [episode.outcome for episode in others] == [Outcome.SOLVED] * 3
    assert first.outcome is Outcome.ENV_ERROR and Shared.deaths == [3, 3, 1]


async def test_what_an_ending_worker_cancels_is_given_again(store: Store, play: Play) -> None:
    """As after a fault of its GPU: the episodes beside the failed one are cancelled there."""
    ends = iter([True])

    class Ending(ScriptedLink):
        def _play(self, number: int, job: Job) -> None:
            if not next(ends, False):
                return super()._play(number, job)
            self._emit((number, "failed", asyncio.CancelledError()))
            return self._die()

    (found,) = await run(pool_of([play], store, link=Ending), 0)
    assert found.outcome is Outcome.SOLVED


async def test_a_last_try_that_is_cancelled_leaves_its_worker_to_others(
    store: Store, play: Play
) -> None:
    pool = pool_of([play], store)
    await pool.open("v0")
    try:
        (worker,) = pool.workers
        worker.jobs.append(Job(TASK, 1))  # which it waits for
        waiting = asyncio.create_task(pool._idle_worker(Job(TASK, 0)))
        while not pool._reserved:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        worker.jobs.clear()
        assert await pool._free_worker(Job(TASK, 2)) is worker
    finally:
        await pool.close()


class Slow(ScriptedLink):
    """Loads the first weights only when `go` is set; remembers what it was sent."""

    go: asyncio.Event
    sent: list[Call]

    async def send(self, call: Call) -> None:
        self.sent.append(call)
        if call[1] == "load":
            await self.go.wait()
        await super().send(call)


async def test_a_worker_that_is_lost_while_the_run_starts_is_started_once_more(
    store: Store, play: Play
) -> None:
    deaths = iter([True, False, True, True])

    class Dying(ScriptedLink):
        async def send(self, call: Call) -> None:
            if call[1] == "load" and next(deaths):
                self._die()
            await super().send(call)

    (found,) = await run(pool_of([play], store, link=Dying), 7)
    assert found.outcome is Outcome.SOLVED
    with pytest.raises(WorkerLost, match="it died"):
        await run(pool_of([play], store, link=Dying), 8)


class Refusing(ScriptedPolicy):
    """A policy on servers that refuse the second version."""

    def last_published(self) -> None: ...

    async def hold(self) -> None: ...

    async def adopt(self, version: str, published: object) -> None: ...

    async def publish(self, version: str) -> None:
        if version == "v2":
            raise PolicyError("the server refused")


async def test_an_update_waits_for_no_worker_that_starts_and_a_failed_one_leaves_none_on_hold(
    store: Store, play: Play
) -> None:
    policy: Any = Refusing([], CHAT.tokenizer)
    Slow.go, Slow.sent = asyncio.Event(), []
    pool = pool_of([play], store)
    await pool.open("v0")
    late = RemoteWorker(1, lambda: Slow(play), pool.workers[0].setup)
    pool.workers = [*pool.workers, late]
    admitted = asyncio.ensure_future(pool._admit(late))
    await soon(lambda: bool(Slow.sent))
    await pool.publish("v1", policy, None)
    assert not late.ready
    Slow.go.set()
    await admitted
    with pytest.raises(PolicyError, match="refused"):
        await pool.publish("v2", policy, None)
    loads = [(method, *arguments[:1]) for _, method, arguments in Slow.sent[1:]]
    assert loads == [("load", "v0"), ("load", "v1"), ("hold",), ("load", "v1")]
    await pool.close()


def test_an_interpreter_with_a_blank_in_its_path_is_quoted() -> None:
    found = [name_interpreter(path) for path in ("/a b/python", "/a/python")]
    assert found == [{"py_executable": "'/a b/python'"}, {}]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "No Ray cluster answers at 127.0.0.1:1: Connection refused"),
        ("somewhere", "not host:port"),
        ("silent", r"No Ray cluster answers at 127.0.0.1:\d+: timed out"),
    ],
)
def test_a_cluster_that_does_not_answer(address: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = address.replace("silent", f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises((ConfigError, EnvironmentProblem), match=said):
            require_answer(address, "", within=0.1)


def test_what_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No kind of worker named 'procesess'\. Did you mean"):
        Config.model_validate({"cluster": {"kind": "procesess"}})
    with pytest.raises(ValueError, match=r"cluster\.worker_gpus: leave out GPU"):
        Config.model_validate({"cluster": {"resources": {"GPU": 1}}})
    given: dict[str, Any] = {"packs": ["calc-task", "a/../../other"]}
    outside = r"task\.packs names a/\.\./\.\./other, outside the project folder"
    with pytest.raises(ConfigError, match=outside):
        require_inside(Config.model_validate({"task": given}))
    each = resources_of(ClusterConfig(worker_gpus=0.5, resources={"CPU": 2}))
    nodes = [{"CPU": 3.0, "GPU": 2.0}] * 4
    require_room(4, each, nodes)
    small = r"5 workers with 2 CPU and 0\.5 GPU each do not fit .*; its nodes have 3 CPU, 2 GPU; 3"
    with pytest.raises(ConfigError, match=small):
        require_room(5, each, nodes)
    given = {"kind": "processes", "workers": 2, "worker_gpus": 99}
    few = pytest.raises(ConfigError, match="2 workers with 99 GPUs each need 198")
    with few, open_links(Config.model_validate({"cluster": given}), tmp_path):
        pass
    packs = load_packs([str(write_pack(tmp_path / "pack"))], base=tmp_path)
    far = r"far has Python 3\.9, and .*torch 1\.0.*code of the pack bandit none"
    with pytest.raises(EnvironmentProblem, match=far):
        require_same(packs, [Hello("far", 1, {"Python": "3.9", "torch": "1.0"})])
    node = replace(describe_node(packs), node="far")
    (tmp_path / "pack" / "helper.py").write_text("LIMIT = 2\n")
    with pytest.raises(EnvironmentProblem, match=r"far has code of the pack bandit \w+, and \w+ h"):
        require_same(packs, [node])
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    with pytest.raises(StoreError, match="network disk"):
        require_local(tmp_path / "agentrl.db", mounts)
    require_local(Path("/other/agentrl.db"), mounts)


def test_resources_have_names_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("cluster:\n  resources: {CPU: 4, rollout: 1}\n")
    config, _ = load_config(files=[tmp_path / "a.yaml"], sets=["cluster.resources.CPU=0.5"])
    assert config.model_dump()["cluster"]["resources"] == {"CPU": 0.5, "rollout": 1.0}
    (tmp_path / "b.yaml").write_text(full_yaml(config))
    assert load_config(files=[tmp_path / "b.yaml"])[0] == config


def test_workers_get_gpus_of_those_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert name_gpus(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7,5")
    assert name_gpus(2) == ["2", "GPU-7"]


def test_an_error_of_a_worker_keeps_the_nearest_class_of_the_tree() -> None:
    for error, kind in (
        (Unreachable("away", hint="start it"), PolicyError),
        (ModelError("m"), ModelError),
        (KeyError("k"), RunFailed),
    ):
        arrived = pickle.loads(pickle.dumps(plain_error(error)))
        assert type(arrived) is kind and str(error) in arrived.message
        assert arrived.hint == getattr(error, "hint", "")


async def test_objects_of_a_script_cannot_go_to_workers(tmp_path: Path) -> None:
    write_pack(tmp_path)
    given = {"task": {"packs": ["."]}, "model": {"name": "scripted"}}
    config = Config.model_validate({**given, "cluster": {"kind": "processes"}})
    with pytest.raises(ConfigError, match="packs or hooks are objects"):
        async with open_runtime(config, base=tmp_path, db=tmp_path / "s.db", hooks=[object()]):
            pass


@pytest.mark.slow
async def test_a_worker_that_cannot_see_the_model_refuses_before_anything_runs(
    tmp_path: Path,
) -> None:
    project = write_pack(tmp_path / "pack")
    config = Config.model_validate(settings(tmp_path / "model", cluster={"kind": SERVICES}))
    loaded = load_policy("scripted", config, base=project)
    packs: dict[str, Any] = load_packs(["."], base=project)
    with pytest.raises(ModelError, match=r"Worker 0: .*model"):
        async with open_pool(config, project, loaded, packs):
            pass


def test_watch_has_a_page_of_the_workers(store: Store) -> None:
    run = store.runs.add(RunRow(id="", name="r", kind="train", status="running"))
    common: dict[str, Any] = {"kind": "ray", "version": "a-run-with-a-name@3", "running": 4}
    common |= {"finished": 1200, "tokens": 9, "rate": 88.6, "lost": 0, "error": "", "at": 0.0}
    good = {"node": "gpu-1", "pid": 11, "state": "ready", "at": time.time()}
    bad = {"node": "gpu-2", "pid": 12, "state": "starting", "lost": 2, "error": "the node died"}
    rows = [WorkerRow(run.id, n, **common | own) for n, own in enumerate((good, bad))]
    store.workers.put(rows)
    store.flush()
    assert store.workers.all(run.id) == rows
    text = [line.plain for line in worker_lines(load(store, run.id), 120)]
    assert text[0] == "WORKERS 2 (ray), 1 ready, 89 tokens/s"
    assert text[2].split() == "0 gpu-1 11 ready …run-with-a-name@3 4 1,200 89 0".split()
    assert "the node died" in text[4]


# --- trainings: the same weights, also if workers die or sample from vLLM servers ---
