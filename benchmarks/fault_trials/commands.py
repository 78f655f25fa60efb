"""What the trials share: projects of a tiny random model, and commands as processes of their own."""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import random
import shutil
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from agentrl_cli.store import Store
from agentrl_cli.types import Outcome
from tests.helpers.train import PRELOADED, agentrl_process, write_project

STEPS, EPISODES = 4, 8
PATIENCE = 300.0

TRAIN: dict[str, Any] = {
    "deterministic": True,
    "rollout": {"concurrency": 3},
    "train": {
        "steps": STEPS,
        "save_every": 2,
        "eval": {"every": 2, "tasks": 2, "samples": 1},
        "lr": 1e-2,
    },
    "algo": {"skip": {"zero_variance": False}},
}
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"deterministic": False, "rollout": {"concurrency": 3, "async_staleness": 1}},
    "LoRA": {"adapter": {"enabled": True, "r": 4}},
    "PPO": {
        "algo": {"advantage": {"name": "gae", "value_lr": 1e-2}, "skip": {"zero_variance": False}}
    },
}
"""Trainings, by what differs from TRAIN."""


LOGS = Path(tempfile.mkdtemp(prefix="agentrl-faults-logs-"))
"""What commands print; not beside the project, whose disk may be full."""
atexit.register(shutil.rmtree, LOGS, ignore_errors=True)


class Command:
    """`agentrl ARGS` in `project` as a process of its own, forked from a server that has imported torch."""

    def __init__(self, project: Path, *args: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.log = LOGS / f"{random.randrange(10**12)}.log"
        self.process: BaseProcess = context.Process(
            target=agentrl_process, args=(str(project), str(self.log), list(args))
        )
        self.process.start()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.is_file() else ""

    @property
    def alive(self) -> bool:
        return self.process.exitcode is None

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit status. Raises TimeoutError after `seconds`, with what was printed."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(self.output)
        return self.process.exitcode

    def kill(self, after: float) -> bool:
        """Kills the process after `after` seconds; True if it still ran then."""
        self.process.join(after)
        alive = self.alive
        self.process.kill()
        self.process.join()
        return alive


def run(project: Path, *args: str) -> tuple[int, str]:
    """Exit status and output of `agentrl ARGS`."""
    command = Command(project, *args)
    return command.wait(), command.output


def ending(project: Path) -> dict[str, Any]:
    """All that interruptions must not change: weights, samples, decisions, metrics, drift, evaluations."""
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        (row,) = [row for row in store.runs.all() if row.kind == "train"]
        rows = store.episodes.rows(store.episodes.ids("kind:train", "time", run=row.id))
        episodes = [store.episodes.get(one.id) for one in rows]
        kept = [episode for episode in episodes if episode.outcome is not Outcome.CANCELLED]
        sampled = {
            f"{e.step}/{e.group_id}/{e.sample}": (
                e.tokens.ids.tolist(),
                e.reward,
                str(e.fact),
                e.advantage,
            )
            for e in kept
        }
        last = next(c.path for c in store.runs.checkpoints(row.id) if c.kind == "last")
        folder = project / "runs" / last if not Path(last).is_absolute() else Path(last)
        weights = {
            p.name: hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.glob("*.safetensors"))
        }
        metrics = [
            {k: v for k, v in step.items() if not k.startswith(("time/", "at"))}
            for step in store.runs.steps(row.id)
        ]
        return {
            "state": (row.status, row.step, row.error, len(store.live.all(row.id))),
            "doubles": len(kept) - len(sampled),
            "undecided": sum(not e.fact for e in kept),
            "sampled": sampled,
            "metrics": metrics,
            "evals": [(e.step, e.pass_rate) for e in store.runs.evals(row.id)],
            "weights": weights,
        }


def differences(mode: str, got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """What is wrong with an ending. Sampling ahead depends on time, so there only what must always hold is compared."""
    wrong = [name for name in ("doubles", "undecided") if got[name]]
    if mode == "async":
        whole = got["state"] == want["state"] and len(got["sampled"]) == STEPS * EPISODES
        steps = [step["step"] for step in got["metrics"]] == list(range(1, STEPS + 1))
        return wrong + ([] if whole and steps else ["not whole"])
    return wrong + [name for name in want if got[name] != want[name]]


def project_of(folder: Path, model: Path, mode: str) -> Path:
    folder.mkdir(parents=True)
    return write_project(folder, model, **{**TRAIN, **MODES[mode]})
