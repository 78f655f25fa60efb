"""Jobs and faults of a pool of workers, how episodes travel, and trainings whose episodes processes make."""

import asyncio
import contextlib
import pickle
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

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
from agentrl_cli.plugins.ray.open import check_workers, open_pool, require_local, require_same
from agentrl_cli.plugins.ray.pool import ClusterPolicy, WorkerPool
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
from agentrl_cli.runtime import new_training, open_runtime
from agentrl_cli.sandbox import owner
from agentrl_cli.store import RunRow, Store, WorkerRow
from agentrl_cli.tasks import load_packs
from agentrl_cli.trainer import Trainer, build_trainer
from agentrl_cli.trainer.prefetch import ages
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
from tests.helpers.remote import StandIn, serve_all
from tests.helpers.train import Started, episodes_of, settings, start_code, write_model, write_pack
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

STEPS = 3
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
HEAD = {**NODE, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
HOOK = """
import os, signal
from pathlib import Path

class Saboteur:
    '''Kills or stops the worker in the middle of an episode, once for each file.'''

    def on_rollout_end(self, rollout, task):
        for name, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            plan = Path("FOLDER") / f"{name}-{rollout.step}"
            try:
                plan.unlink()
            except FileNotFoundError:
                continue
            os.kill(os.getpid(), number)
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of several threads differ in their last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.asynccontextmanager
async def training(folder: Path, model: Path, **cluster: Any) -> AsyncIterator[Trainer]:
    """A deterministic training; `cluster` are its settings."""
    sections = {
        "deterministic": True,
        "rollout": {"concurrency": 4},
        "train": {"steps": STEPS, "lr": 1e-2, "eval_every": 2, "eval_tasks": 2},
        "algo": {"drop_zero_variance": False},
        "hooks": ["hook.py:Saboteur"],
    }
    if not (folder / "task.yaml").is_file():
        write_pack(folder)
    (folder / "hook.py").write_text(HOOK.replace("FOLDER", str(folder)))
    config = Config.model_validate(settings(model, cluster=cluster, **sections))
    async with open_runtime(
        config, base=folder, db=folder / "runs" / "agentrl.db", trainable=True
    ) as opened:
        yield build_trainer(config, new_training(opened), opened.loaded, opened.rollout())


def outcome_of(trainer: Trainer) -> dict[str, Any]:
    """All of a run that must not depend on who made its episodes."""
    store, run = trainer.store, trainer.run
    kept = {
        (e.kind, e.step, e.group_id, e.sample): (
            e.tokens.ids.tolist(),
            e.tokens.logp_sampled.tobytes(),
            [
                (turn.role, turn.messages, turn.weights_version.rpartition("@")[2])
                for turn in e.turns
            ],
            (e.reward, e.outcome, e.fact, e.advantage, e.seed, e.flags),
        )
        for e in (
            store.episodes.get(row.id)
            for row in store.episodes.rows(store.episodes.ids(run=run.id))
        )
    }
    assert len(kept) == len(store.episodes.ids(run=run.id)), "every episode is there once"
    assert not store.live.all(run.id)
    weights = {name: tensor.clone() for name, tensor in trainer.loaded.model.state_dict().items()}
    return {"episodes": kept, "weights": weights}


def lost_workers(trainer: Trainer) -> list[str]:
    logs = trainer.store.journal.logs(trainer.run.id)
    return [row["text"] for row in logs if "was lost" in row["text"]]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["episodes"] == theirs["episodes"]
    for name, tensor in ours["weights"].items():
        assert torch.equal(tensor, theirs["weights"][name]), name


@pytest.mark.slow
async def test_processes_give_the_weights_of_one_process_even_if_they_die_or_hang(
    tmp_path: Path, model: Path, one_thread: None
) -> None:
    async with training(tmp_path / "here", model) as trainer:
        await trainer.train()
        here = outcome_of(trainer)
    folder = tmp_path / "processes"
    folder.mkdir()
    (folder / "kill-1").touch()
    (folder / f"stop-{STEPS}").touch()  # at the end: nothing waits for a third process
    async with training(folder, model, kind="processes", workers=2, patience=15) as trainer:
        await trainer.train()
        assert_same(here, outcome_of(trainer))
        lost = lost_workers(trainer)
    assert not list(folder.glob("kill-*")) + list(folder.glob("stop-*"))
    assert len(lost) == 2 and "ended with status -9" in lost[0] and "no sign of life" in lost[1]


async def test_workers_of_a_strangers_kind_sample_while_the_run_trains(
    tmp_path: Path, model: Path
) -> None:
    sections = {
        "train": {"steps": 5, "lr": 1e-2},
        "rollout": {"async_staleness": 2, "concurrency": 4},
        "cluster": {"kind": SERVICES, "workers": 2},
    }
    config = Config.model_validate(settings(model, **sections))
    write_pack(tmp_path)
    async with open_runtime(config, base=tmp_path, db=tmp_path / "s.db", trainable=True) as opened:
        store, run = opened.store, new_training(opened)
        run = await build_trainer(config, run, opened.loaded, opened.rollout()).train()
        rows, episodes = store.runs.steps(run.id), episodes_of(store, run)
    with Store.open(tmp_path / "s.db", readonly=True) as store:
        written = store.workers.all(run.id)
    assert [(row.lost, row.state) for row in written] == [(0, "closed")] * 2, "closed, not lost"
    assert run.status == "finished" and len(episodes) == 5 * 8
    found: dict[int, list[int]] = {step: [] for step in range(1, 6)}
    for episode in episodes:
        found[episode.step or 0] += ages(episode, [run.name], (episode.step or 0) - 1)
    assert {max(one) for one in found.values()} <= {0, 1, 2} and max(found[2]), (
        "sampled before the first update"
    )
    assert [row["staleness/max"] for row in rows] == [max(one) for one in found.values()]
    assert {row["sampling/sampling_logp_difference/max"] > 0 for row in rows[1:]} == {True}


async def test_response_tokens_limit_the_packs_beside_one_that_an_agent_plays(
    tmp_path: Path, model: Path
) -> None:
    packs = [tmp_path / name for name in ("ours", "theirs")]
    for folder in packs:
        folder.mkdir()
        write_pack(folder)
    (packs[1] / "agent.py").write_text("def solve(task):\n    return 1.0\n")
    spec = packs[1] / "task.yaml"
    spec.write_text(spec.read_text().replace("bandit", "played") + "agent: agent.py:solve\n")
    config = Config.model_validate(
        settings(
            model,
            task={"packs": [str(folder) for folder in packs]},
            rollout={"response_tokens": 8, "max_new_tokens": 16},
            cluster={"kind": SERVICES, "workers": 1},
        )
    )
    async with open_runtime(config, base=tmp_path, db=tmp_path / "s.db") as opened:
        task = next(one for pack in opened.packs.values() for one in pack.tasks("train"))
        (episode,) = await opened.rollout().run([Job(task, 0, 0)])
    assert int(episode.tokens.trained_mask.sum()) == 8


async def test_doctor_tries_each_worker_and_names_one_that_cannot_start(
    tmp_path: Path, model: Path
) -> None:
    write_pack(tmp_path)
    given = {"cluster": {"kind": SERVICES, "workers": 2}}
    config = Config.model_validate(settings(model, **given))
    said: list[str] = []
    found = await check_workers(config, tmp_path, tmp_path / "s.db", said.append)
    names = ["", " versions", " clock", " job"]
    assert [name for name, *_ in found[1:]] == [
        f"worker {n}{what}" for n in (0, 1) for what in names
    ]
    assert {status for _, status, _, _ in found} == {"ok"} and said == [
        f"starting 2 workers ({SERVICES})"
    ]
    config.hooks = ["missing.py:Hook"]
    *_, (name, status, detail, _) = await check_workers(config, tmp_path, tmp_path / "s.db", print)
    assert (name, status) == ("workers", "fail") and "missing.py" in detail
    assert not (tmp_path / "s.db").exists()
    Store.open(tmp_path / "s.db").close()
    config.hooks, config.model.name = [], "none@last"
    *_, (*_, detail, _) = await check_workers(config, tmp_path, tmp_path / "s.db", print)
    assert detail == "No run named 'none'."


DRIVER = """
import sys, tempfile, time
from pathlib import Path
from agentrl_cli.plugins.ray.processes import open_links
from agentrl_cli.config import Config
tempfile.tempdir = sys.argv[1]
with open_links(Config.model_validate({"cluster": {"kind": "processes", "workers": 1}}), Path()) as (links, save):
    save.args[0].joinpath("m@1.safetensors").write_bytes(b"weights")
    print(save.args[0], flush=True)
    while not Path("end").exists():
        time.sleep(0.05)
"""


def driver(folder: Path, log: str) -> tuple[Started, Path]:
    """A run with workers, and where their weights are."""
    started = start_code(folder, DRIVER, str(folder), log=log)
    return started, Path(started.line("/"))


def test_weights_of_a_killed_run_go_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, left = driver(tmp_path, "killed.txt")
    alive, kept = driver(tmp_path, "alive.txt")
    try:
        killed.process.kill()
        killed.end()
        assert left.parent == tmp_path and left.joinpath("m@1.safetensors").is_file()
        foreign = tmp_path / left.name.replace(
            owner._machine(), "-00000000-"
        )  # of a machine that shares the folder
        link = tmp_path / left.name.replace(left.name[-8:], "aaaaaaaa")
        foreign.mkdir()
        link.symlink_to(foreign)
        config = Config.model_validate({"cluster": {"kind": "processes", "workers": 1}})
        with open_links(config, tmp_path):
            assert not left.exists()
        assert kept.is_dir() and foreign.is_dir() and link.is_symlink()
    finally:
        (tmp_path / "end").touch()
        alive.end()
    assert not kept.exists()


def parent_of(worker: RemoteWorker) -> int:
    assert worker.hello is not None
    return int(Path(f"/proc/{worker.hello.pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # of Ray
async def test_ray_gives_the_weights_of_one_process_with_a_lost_actor_and_a_lost_node(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # for the node that is added
    pytest.importorskip("ray", reason="needs the extra ray")
    from ray.cluster_utils import Cluster

    node = {**NODE, "resources": {"rollout": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        nodes = [cluster.add_node(**node) for _ in range(2)]
        async with training(tmp_path / "here", model) as trainer:
            await trainer.train()
            here = outcome_of(trainer)
        folder = tmp_path / "ray"
        folder.mkdir()
        (folder / "kill-1").touch()
        given = {
            "kind": "ray",
            "workers": 2,
            "address": cluster.address,
            "resources": {"rollout": 1.0},
        }
        async with training(folder, model, **given) as trainer:
            running = asyncio.ensure_future(trainer.train())
            while not running.done() and trainer.step < 1:
                await asyncio.sleep(0.05)
            policy = trainer.loaded.policy
            assert isinstance(policy, ClusterPolicy)
            while not (ready := [one for one in policy.workers.workers if one.ready]):
                await asyncio.sleep(0.05)
            parent = parent_of(ready[-1])  # the process of a Ray node that starts its actors
            (used,) = (
                node for node in nodes if node.all_processes["raylet"][0].process.pid == parent
            )
            await asyncio.to_thread(cluster.remove_node, used)
            cluster.add_node(**node)  # one that comes back is used again; Ray wants the main thread
            await running
            assert_same(here, outcome_of(trainer))
            lost = lost_workers(trainer)
            assert len(lost) >= 2 and "ActorDiedError: Worker unexpectedly exits" in lost[0], lost
            assert not (folder / "kill-1").exists()
    finally:
        cluster.shutdown()


WEIGHTS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc")


class Strict(StandIn):
    """Refuses to change its weights while turns run: a real server would sample them with both."""

    def __init__(self, folder: Path) -> None:
        super().__init__("vllm", folder)
        self.running = 0

    async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert path not in WEIGHTS or not self.running, path
        self.running += path == "/v1/completions"
        try:
            return await super().handle(path, body)
        finally:
            self.running -= path == "/v1/completions"


async def trained(
    folder: Path, model: Path, remote: dict[str, Any], workers: int, **sections: Any
) -> dict[str, Any]:
    train = {"steps": 2, "lr": 1e-2}
    cluster = {"kind": SERVICES, "workers": workers} if workers else {}
    sections |= {"remote": remote, "train": train, "cluster": cluster}
    config = Config.model_validate(settings(model, **sections))
    write_pack(folder)
    async with open_runtime(config, base=folder, db=folder / "s.db", trainable=True) as opened:
        loaded, store, run = opened.loaded, opened.store, new_training(opened)
        ended = await build_trainer(config, run, loaded, opened.rollout()).train()
        assert ended.status == "finished"
        found = episodes_of(store, run)
        assert not any(e.outcome in (Outcome.ENV_ERROR, Outcome.CANCELLED) for e in found), [
            e.error for e in found
        ]
        ages = [
            e.step - 1 - int(t.weights_version.rpartition("@")[2])
            for e in found
            for t in e.turns
            if t.role == "assistant" and e.step is not None
        ]
        weights = {
            name: one.detach().clone()
            for name, one in loaded.model.named_parameters()
            if one.requires_grad
        }
        return {
            "weights": weights,
            "ages": ages,
            "steps": store.runs.steps(run.id),
            "count": len(found),
        }


@pytest.mark.parametrize("adapter", [True, False])
async def test_workers_sample_from_servers_with_each_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: bool
) -> None:
    monkeypatch.setenv("SERVER_KEY", "k")
    model = write_model(tmp_path / "model")
    kept = {"adapter": {"enabled": adapter, "r": 2}, "algo": {"drop_zero_variance": False}}
    stands = [Strict(model) for _ in range(2)]
    async with serve_all(*stands) as urls:
        remote = {
            "backend": "vllm",
            "urls": urls,
            "model": "base",
            "api_key_env": "SERVER_KEY",
            "retries": 0,
        }
        here = await trained(tmp_path / "here", model, remote, 0, **kept)
        before = [one.generated for one in stands]
        there = await trained(tmp_path / "workers", model, remote, 2, **kept)
        assert all(one.generated > had for one, had in zip(stands, before, strict=True)), (
            "both servers have turns"
        )
        stands[0].dies_at = {stands[0].generated + 6}
        late = await trained(
            tmp_path / "late", model, remote, 2, **kept, rollout={"async_staleness": 1}
        )
    gap = max(
        float((here["weights"][name] - there["weights"][name]).abs().max())
        for name in here["weights"]
    )
    assert gap <= 1e-5
    assert set(there["ages"]) == {0} and set(late["ages"]) == {0, 1}
    for found in (here, there, late):
        assert found["count"] == 2 * 8
        assert all(
            row["sampling/sampling_logp_difference/max"] < 1e-4 for row in found["steps"][:1]
        )
        assert all(row["probe/logp_difference"] < 1e-4 for row in found["steps"]), (
            "each server has the new weights"
        )
