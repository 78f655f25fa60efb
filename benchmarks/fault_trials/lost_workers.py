"""kill -9 at workers of a training, and nodes removed under it: it must end as the same training without workers."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from agentrl_cli.errors import NotFound, StoreError
from agentrl_cli.store import Store
from benchmarks.fault_trials.commands import (
    MODES,
    TRAIN,
    Command,
    differences,
    ending,
    project_of,
    run,
)
from tests.helpers.train import write_project

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "resources": {"rollout": 1}}
HEAD = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
STEPS, KILLS = 12, 3
"""Steps of each training, and how often something is killed in it: a job that kills three workers is given up."""

Strike = Callable[[Command], bool]


def kill_workers(
    rng: random.Random, work: Path, model: Path, kind: str, kills: int
) -> dict[str, Any]:
    """A row of trials, kills and what was wrong; `kind` is processes or ray."""
    MODES[kind] = {"train": {**TRAIN["train"], "steps": STEPS}}
    alone = project_of(work / "alone", model, kind)
    code, said = run(alone, "train")
    if code:
        raise SystemExit(said)
    want, count, trial = ending(alone), 0, 0
    wrong: list[str] = []
    with processes(rng) if kind == "processes" else ray_cluster(rng) as (settings, strike):
        while count < kills:
            trial += 1
            project = write_project(
                _made(work / f"trial-{trial}"),
                model,
                **{**TRAIN, **MODES[kind], "cluster": settings},
            )
            command = Command(project, "train")
            for steps in range(KILLS):
                count += _strike_once(command, strike, project, steps, rng.uniform(0.0, 1.0))
            code = command.wait()
            bad = differences(kind, ending(project), want) if not code else [command.output[-300:]]
            wrong += [f"trial {trial}: {text}" for text in bad]
            shutil.rmtree(project)
    return {"trials": trial, "kills": count, "wrong": wrong}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _strike_once(command: Command, strike: Strike, project: Path, steps: int, after: float) -> bool:
    """Whether something was killed, `after` seconds after the training had made so many steps."""
    while command.alive and _steps(project) < steps:
        command.process.join(0.1)
    command.process.join(after)
    while command.alive:
        if strike(command):
            return True
        command.process.join(0.1)
    return False


def _steps(project: Path) -> int:
    db = project / "runs" / "agentrl.db"
    try:
        with Store.open(db, readonly=True) as store:
            return sum(len(store.runs.steps(row.id)) for row in store.runs.all())
    except (NotFound, StoreError):  # it is being made
        return 0


def _kill_one(rng: random.Random, found: list[psutil.Process]) -> bool:
    """Whether one of these processes was killed."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        if found:
            os.kill(rng.choice(found).pid, signal.SIGKILL)
            return True
    return False


@contextlib.contextmanager
def processes(rng: random.Random) -> Iterator[tuple[dict[str, Any], Strike]]:
    """Two worker processes of this machine."""

    def strike(command: Command) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(command.process.pid).children(recursive=True)
            return _kill_one(
                rng, [one for one in children if "plugins.ray.processes" in " ".join(one.cmdline())]
            )
        return False

    yield {"kind": "processes", "workers": 2}, strike


@contextlib.contextmanager
def ray_cluster(rng: random.Random) -> Iterator[tuple[dict[str, Any], Strike]]:
    """A Ray cluster of three nodes: a strike kills an actor, every third one a node, for which another comes."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={**HEAD, "object_store_memory": 80 * 2**20}
    )
    nodes = [cluster.add_node(**NODE) for _ in range(2)]
    strikes = 0

    def actors(node: Any) -> list[psutil.Process]:
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        running = [one for one in raylet.children() if one.status() != psutil.STATUS_ZOMBIE]
        return [one for one in running if one.name().startswith("ray::Rollout")]

    def strike(_: Command) -> bool:
        nonlocal strikes
        used = [node for node in nodes if actors(node)]
        if not used:
            return False
        strikes += 1
        node = rng.choice(used)
        if strikes % 3:
            return _kill_one(rng, actors(node))
        nodes.remove(node)
        cluster.remove_node(node, allow_graceful=False)  # a machine that is lost says nothing
        nodes.append(cluster.add_node(**NODE))
        return True

    try:
        yield (
            {
                "kind": "ray",
                "workers": 2,
                "address": cluster.address,
                "resources": {"rollout": 1.0},
            },
            strike,
        )
    finally:
        cluster.shutdown()
