"""A training whose episodes processes make: the same weights, also if workers die or sample from vLLM servers."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli import Config
from agentrl_cli.plugins.ray.open import check_workers
from agentrl_cli.plugins.ray.pool import ClusterPolicy
from agentrl_cli.plugins.ray.processes import open_links
from agentrl_cli.plugins.ray.remote import RemoteWorker
from agentrl_cli.rollout import Job
from agentrl_cli.runtime import new_training, open_runtime
from agentrl_cli.sandbox import owner
from agentrl_cli.store import Store
from agentrl_cli.trainer import Trainer, build_trainer
from agentrl_cli.trainer.prefetch import ages
from agentrl_cli.types import (
    Outcome,
)
from tests.helpers.remote import StandIn, serve_all
from tests.helpers.train import Started, episodes_of, settings, start_code, write_model, write_pack
from tests.plugins.ray.links import SERVICES

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
