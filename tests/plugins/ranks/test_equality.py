"""The update on ranks is that of one process, sharded or not; a killed rank, a resume, bad settings."""

import copy
import json
import multiprocessing
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from agentrl_cli import Config, Store
from agentrl_cli.config.records import LearnerSettings
from agentrl_cli.learning.compute import MicroBatch
from agentrl_cli.learning.packing import Segment
from agentrl_cli.learning.update import Learner
from agentrl_cli.plugins.ranks.compute import Lead, Ranks, Replica, deal_batches, follow, split_for
from agentrl_cli.plugins.ranks.processes import Place, store_at
from agentrl_cli.plugins.ranks.settings import is_sharded
from agentrl_cli.plugins.ranks.team import connect, leave_groups
from tests.helpers.cli import Cli
from tests.helpers.train import PRELOADED, spawn, write_model, write_project

REWARDS = [[0.0, 1.0, 0.5, 0.25], [1.0, 0.0, 0.0, 1.0], [0.3, 0.9, 0.2, 0.1]]
KL = {"kl_coef": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "all weights": {"algo": {**KL, "aggregation": "seq_mean"}, "train": {"weight_decay": 0.1}},
    "sharded": {
        "algo": {**KL, "aggregation": "token_mean", "epochs": 2, "minibatches": 2},
        "shard": "full",
    },
    "adapter": {"algo": {**KL, "epochs": 2}, "adapter": {"enabled": True, "r": 4}},
    "value head": {"algo": {"advantage": "gae", "value_coef": 0.5, "value_bootstrap": True}},
    "sharded value head": {
        "algo": {"advantage": "gae", "value_coef": 0.5, "epochs": 2},
        "shard": "full",
    },
    "chosen tokens": {"algo": {"loss": "clip_cov", "epochs": 2, "aggregation": "seq_mean_norm"}},
    "clipped": {"train": {"max_grad_norm": 0.01, "token_budget": 24}, "shard": "full"},
}


def config_of(case: dict[str, Any], ranks: int) -> Config:
    train = {"lr": 1e-3, "warmup_steps": 0, "token_budget": 60, **case.get("train", {})}
    more = {name: value for name, value in case.items() if name not in ("shard", "train")}
    parts = {"processes": ranks, "shard": case.get("shard", "none")}
    return Config.model_validate(
        {"train": train, "ranks": parts, "model": {"device": "cpu"}, **more}
    )


def model_of(folder: Path, config: Config) -> Any:
    """The random model, with an adapter if the case has one."""
    from transformers import AutoModelForCausalLM

    from agentrl_cli.models.adapter import add_adapter

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    return add_adapter(model, config.adapter, folder) if config.adapter.enabled else model


def reference_of(config: Config, model: Any) -> Any:
    full = config.algo.kl.coef and not config.adapter.enabled
    return copy.deepcopy(model).requires_grad_(False) if full else None


def replica_of(folder: Path, config: Config, ranks: Ranks, whole: Any = None) -> Replica:
    """As a team makes it."""
    own = model_of(folder, config) if whole is None or is_sharded(config) else whole
    reference = reference_of(config, own)
    torch.manual_seed(0)
    if not is_sharded(config):
        return Replica(own, LearnerSettings.of(config), reference, ranks)
    from agentrl_cli.plugins.ranks.sharded import Sharded

    return Sharded(own, config, reference, ranks, whole=whole)


def trained(learner: Learner, model: Any, folder: Path) -> dict[str, Any]:
    """Two steps, a state that is saved and loaded between them; weights, value head and numbers of each token."""
    from tests.learning.test_update import episodes

    base = model_of(folder, Config())
    found: dict[str, Any] = {}
    for step in range(2):
        update = learner.update(episodes(base, REWARDS, seed=step), step)
        found |= {f"{step} {name}": np.float32(value) for name, value in update.metrics.items()}
        for id_, signals in update.signals.items():
            for name in (
                "advantage",
                "logp_train",
                "ratio",
                "weight",
                "logp_ref",
                "value",
                "returns",
            ):
                if getattr(signals, name) is not None:
                    found[f"{step} {id_} {name}"] = np.nan_to_num(getattr(signals, name))
        learner.load_state(copy.deepcopy(learner.state()))
    found |= {
        name: weights.detach().numpy()
        for name, weights in model.named_parameters()
        if weights.requires_grad
    }
    if learner.compute.critic is not None:
        found |= {
            f"head {name}": weights.numpy()
            for name, weights in learner.compute.critic.head.state_dict().items()
        }
    return found


def rank_process(rank: int, port: int, folder: str, report: str) -> None:
    """Rank 0 writes for each case how far two ranks are from one process."""
    torch.set_num_threads(1)
    try:
        store = store_at("127.0.0.1", port)
        ranks = connect(Place(rank, rank, 2, "127.0.0.1", port), store, torch.device("cpu"))
        far: dict[str, float] = {}
        for name, case in CASES.items():
            config, path = config_of(case, 2), Path(folder)
            if rank:
                follow(replica_of(path, config, ranks))
                continue
            model = model_of(path, config)
            lead = Lead(replica_of(path, config, ranks, model), lambda wait: None)
            two = trained(Learner(model, config, compute=lead), model, path)
            ranks.send("close")
            model = model_of(path, config)
            reference = reference_of(config, model)
            torch.manual_seed(0)
            one = trained(Learner(model, config, reference), model, path)
            assert one.keys() == two.keys(), one.keys() ^ two.keys()
            far[name] = max(float(np.abs(one[key] - two[key]).max(initial=0.0)) for key in one)
        if rank == 0:
            Path(report).write_text(json.dumps(far))
    except BaseException:
        Path(f"{report}.{rank}").write_text(traceback.format_exc())
        raise


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", layers=2)
    store = store_at("127.0.0.1", 0, is_master=True)  # on a port that no other test can take
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    report = tmp_path / "report"
    given = (store.port, str(folder), str(report))
    processes = [context.Process(target=rank_process, args=(rank, *given)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        left = processes
        while left and not any(process.exitcode for process in processes):
            wait([process.sentinel for process in left])  # one that fails leaves the other waiting
            left = [process for process in left if process.exitcode is None]
    finally:
        for process in processes:
            process.kill()
    errors = [path.read_text() for path in tmp_path.glob("report.*")]
    assert report.is_file(), "\n".join(errors) or "a rank hung"
    far = json.loads(report.read_text())
    assert far.keys() == CASES.keys()
    assert max(far.values()) <= 1e-5, far


def test_gradients_of_several_dtypes_are_summed_in_the_order_of_the_weights(model: Path) -> None:
    """In that of a set, which is another in each process, ranks added up what did not belong together."""
    seen: list[torch.dtype] = []

    class Noted(Ranks):
        def add_up(self, tensors: Sequence[Tensor]) -> None:
            seen.append(tensors[0].dtype)
            super().add_up(tensors)

    kinds = [torch.float64, torch.float16, torch.float32]
    store = store_at("127.0.0.1", 0, is_master=True)
    connect(Place(0, 0, 1, "127.0.0.1", store.port), store, torch.device("cpu"))
    try:
        control: Any = dist.group.WORLD
        ranks = Noted(control, torch.device("cpu"))
        replica = replica_of(model, config_of({}, 1), ranks)
        for order in (kinds, kinds[::-1], [*kinds[1:], kinds[0]]):
            weights = [torch.nn.Parameter(torch.ones(2, dtype=kind)) for kind in order]
            for one in weights:
                one.grad = torch.ones_like(one)
            seen.clear()
            replica._sum_gradients(weights)
            assert seen == order
    finally:
        leave_groups()


@pytest.mark.parametrize("even", [False, True])
def test_micro_batches_are_deal_batches_by_tokens(even: bool) -> None:
    lengths = [9, 2, 3, 8, 4, 4, 1]
    batches = [
        MicroBatch([[Segment(np.arange(n + 1, dtype=np.int32), np.arange(n + 1) == n)]])
        for n in lengths
    ]
    parts, numbers = deal_batches(batches, 3, even=even)
    assert sorted(n for mine in numbers for n in mine) == list(range(7))
    loads = [sum(lengths[n] for n in mine) for mine in numbers]
    assert max(loads) - min(loads) <= 2, loads
    for part, mine in zip(parts, numbers, strict=True):
        assert [batch for batch in part if not batch.padding] == [batches[n] for n in mine]
    if even:
        assert len({len(part) for part in parts}) == 1


def test_a_row_of_one_process_is_split_for_all_ranks() -> None:
    whole = [[Segment(np.arange(20, dtype=np.int32), np.arange(20) > 9)] for _ in range(4)]
    segments = [[Segment(np.arange(20, dtype=np.int32), np.zeros(20, bool))], *whole]
    assert len(split_for(segments, 4096, 1)) == 1
    rows = split_for(segments, 4096, 4)
    assert len(rows) == 4 and rows[0] == [(0, 0), (1, 0)]


HOOK = """\
import os
from pathlib import Path


class Killer:
    '''Kills the other rank when the third step is sampled, once.'''

    def __init__(self):
        self.batches = 0

    def on_batch(self, batch):
        self.batches += 1
        if self.batches == 3 and Path("kill").is_file():
            Path("kill").unlink()
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            for child in children:
                if b"plugins.ranks" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), 40)  # a real-time signal, which has no name
"""
TRAIN = {"steps": 3, "lr": 1e-3, "save_every": 1, "token_budget": 128}


def project_of(folder: Path, model: Path) -> Path:
    folder.mkdir()
    (folder / "hook.py").write_text(HOOK)
    hooks = ["hook.py:Killer"]
    return write_project(
        folder, model, train=TRAIN, deterministic=True, hooks=hooks, algo={"kl_coef": 0.05}
    )


def weights_of(project: Path) -> dict[str, object]:
    (path,) = project.glob("runs/**/checkpoints/last/model.safetensors")
    return dict(load_file(path))


@pytest.mark.skipif(sys.platform != "linux", reason="the hook finds the ranks under /proc")
def test_a_killed_rank_ends_the_run_and_one_rank_resumes_it(tmp_path: Path, model: Path) -> None:
    whole = project_of(tmp_path / "whole", model)
    assert spawn(whole, "train")[0] == 0
    project = project_of(tmp_path / "killed", model)
    (project / "kill").touch()
    code, out = spawn(project, "train", "--ranks", "2")
    assert code == 1, out
    killed = "Rank 1 was killed by signal 40."
    assert out.count(killed) == 1 and "--resume last" in out, out
    assert "Traceback" not in out
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        (run,) = store.runs.all()
        assert (run.status, run.step, run.error) == ("failed", 2, killed)
    code, out = spawn(project, "train", "--resume", "last", "--ranks", "1")
    assert code == 0 and "resumed at step 2" in out, out
    one, other = weights_of(whole), weights_of(project)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) <= 1e-5  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "64"], "ranks.gpus is 64, and torch finds"),
        (
            ["--ranks", "2", "--lora", "--set", "cluster.shard=full"],
            "cannot spread an adapter's base over ranks",
        ),
        (
            ["--ranks", "2", "--set", "cluster.shard=full", "--set", "train.optimizer=muon"],
            "train.optimizer: muon",
        ),
        (["--ranks", "2", "--nodes", "2"], "ranks.rendezvous names no HOST:PORT"),
        (
            ["--ranks", "2", "--set", "model.device=cuda"],
            "model.device is cuda, and the ranks are on the CPU",
        ),
        (
            ["--ranks", "2", "--nodes", "2", "--rendezvous", "a.invalid:1"],
            "host a.invalid of ranks.rend",
        ),
        (
            ["--ranks", "2", "--nodes", "2", "--node", "2", "--rendezvous", "a:1"],
            "--node 2 is not one of 2 machines",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, options: list[str], message: str, cli: Cli
) -> None:
    write_project(tmp_path, tmp_path / "absent", train=TRAIN)
    of_machine = {"--gpus", "a.invalid:1"} & {*options}
    cli("train", *options, code=3 if of_machine else 2, said=message)
    assert not [*tmp_path.glob("runs/*")]
