"""A training that is killed between any two commits, and resumed, leaves the store that an uninterrupted one leaves."""

import contextlib
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.store import Store
from agentrl_cli.types import Outcome
from tests.helpers.train import TASK_PY, episodes_of, spawn, write_pack, write_project

STEPS = 3
SLOW = """
import asyncio


async def even(episode, ctx):
    '''Episodes end apart, so that they are committed apart, while others run.'''
    await asyncio.sleep(0.15 * (episode.sample % 3))
    output = episode.tokens.ids[episode.tokens.trained_mask]
    share = float((output % 2 == 0).mean())
    return ctx.part(share if share < 0.5 else 1.0, f"{len(output)} tokens")


REWARDS = {"even": even, "length": length}
"""


def kill_at_commit(number: int) -> None:
    """Sends this process SIGKILL right before its commit of this number, counted from 1; 0: never. Notes how many were.

    CPython's audit events hand over every connection, just before it is made: nothing of the package is changed.
    """
    seen, new = 0, []

    def trace(statement: str) -> None:
        nonlocal seen
        if statement == "COMMIT":
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            Path("commits").write_text(str(seen))

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "sqlite3.connect/handle":
            new.append(args[0])
        elif new and not event.startswith("sqlite3"):
            with contextlib.suppress(sqlite3.ProgrammingError):  # closed meanwhile
                new.pop().set_trace_callback(trace)

    sys.addaudithook(audit)


def project_of(folder: Path, model: Path) -> Path:
    write_pack(folder, code=TASK_PY + SLOW)
    train = {
        "steps": STEPS,
        "save_every": 2,
        "eval_every": 1,
        "eval_tasks": 3,
        "eval_samples": 2,
        "lr": 3e-2,
    }
    given: dict[str, Any] = {"rollout": {"concurrency": 3, "max_new_tokens": 12}, "train": train}
    return write_project(
        folder, model, deterministic=True, algo={"drop_zero_variance": False}, **given
    )


def ending(project: Path) -> dict[str, Any]:
    """All that a kill must not change: metrics, facts, drift, evaluations, checkpoints, what was sampled."""
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        (run,) = store.runs.all()
        assert (run.status, run.step, run.error) == ("finished", STEPS, "")
        kept = [
            episode
            for episode in episodes_of(store, run)
            if episode.outcome is not Outcome.CANCELLED
        ]
        last = next(Path(c.path) for c in store.runs.checkpoints(run.id) if c.kind == "last")
        return {
            "metrics": [
                {name: value for name, value in row.items() if not name.startswith(("time/", "at"))}
                for row in store.runs.steps(run.id)
            ],
            "sampled": Counter(
                (e.step, e.group_id, e.sample, tuple(e.tokens.ids.tolist())) for e in kept
            ),
            "facts": {
                (e.step, e.group_id, e.sample): (e.fact, e.advantage, e.reward, e.flags)
                for e in kept
            },
            "drift": Counter(
                (e.step, e.group_id, e.sample, d.kind)
                for e in kept
                for d in store.marks.drift(e.id)
            ),
            "evals": [(row.step, row.pass_rate, row.n_samples) for row in store.runs.evals(run.id)],
            "checkpoints": sorted((c.kind, c.step) for c in store.runs.checkpoints(run.id)),
            "alerts": sorted((a["name"], a["text"]) for a in store.journal.alerts(run.id)),
            "weights": (last / "model.safetensors").read_bytes(),
        }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[dict[str, Any], int]:
    """How the uninterrupted run ends, and how many commits it made."""
    project = project_of(tmp_path_factory.mktemp("whole") / "project", model)
    code, output = spawn(project, "train", before=partial(kill_at_commit, 0))
    assert code == 0, output
    found = ending(project)
    assert sum(found["drift"].values()) > 20 and all(
        "drift/resegmented" in row for row in found["metrics"]
    ), "without drift in the metrics a lost one would not be seen"
    return found, int((project / "commits").read_text())


def test_killed_between_commits_again_and_again(
    tmp_path: Path, model: Path, whole: tuple[dict[str, Any], int]
) -> None:
    found, count = whole
    project, rng = project_of(tmp_path / "project", model), random.Random(5)
    code, output = spawn(
        project, "train", before=partial(kill_at_commit, rng.randint(6, count // 3))
    )
    assert code == -signal.SIGKILL, output
    for number in (rng.randint(1, 12) for _ in range(4)):
        code, output = spawn(
            project, "train", "--resume", "last", before=partial(kill_at_commit, number)
        )
        if code == 0:
            break
        assert code == -signal.SIGKILL, output
    else:
        code, output = spawn(project, "train", "--resume", "last")
    assert code == 0, output
    after = ending(project)
    assert {name for name in found if after[name] != found[name]} == set()
