"""A training on several ranks from the command line: one that dies, a resume with another number, bad settings."""

import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agentrl_cli.store import Store
from tests.helpers.train import spawn, write_model, write_project

HOOK = """\
import os
import signal
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
                    os.kill(int(child), signal.SIGKILL)
"""
TRAIN = {"steps": 4, "lr": 1e-3, "save_every": 1, "token_budget": 128}


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
def test_a_killed_rank_ends_the_run_and_one_rank_resumes_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    whole = project_of(tmp_path / "whole", model)
    assert spawn(whole, "train")[0] == 0
    project = project_of(tmp_path / "killed", model)
    (project / "kill").touch()
    code, out = spawn(project, "train", "--ranks", "2")
    assert code == 1, out
    assert out.count("Rank 1 was killed by signal 9 (SIGKILL).") == 1 and "--resume last" in out, (
        out
    )
    assert "Traceback" not in out
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        (run,) = store.runs.all()
        assert (run.status, run.step, run.error) == (
            "failed",
            2,
            "Rank 1 was killed by signal 9 (SIGKILL).",
        )
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
    tmp_path: Path, options: list[str], message: str
) -> None:
    from tests.helpers.train import start

    project = write_project(tmp_path, tmp_path / "absent", train=TRAIN)
    code, out = start(project, "train", *options).end()
    assert code in (2, 3) and message in out and "Traceback" not in out, out
    assert not (project / "runs" / "agentrl.db").exists()
    assert os.listdir(project / "runs") == [] if (project / "runs").is_dir() else True
