"""A run belongs to one process at a time: claims are taken before anything is touched, and only from the dead."""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import UsageError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.connection import connect
from agentrl_cli.store.holder import STALE, Holder, _start_by_ps, boot, start_of
from agentrl_cli.store.runs import _beat
from tests.helpers.cli import Cli
from tests.helpers.processes import comes
from tests.helpers.train import Started, spawn, spawn_well, start
from tests.trainer.test_resume import EPISODES, STEPS, ending, only_run, plan, project_of


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any run."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def stopped(process: Started) -> int:
    """The number of a process that has sent itself SIGSTOP, once it is stopped."""
    pid = int(process.process.pid)
    stat = Path(f"/proc/{pid}/stat")
    assert comes(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", process.process.is_alive
    ), process.log.read_text()
    return pid


def set_holder(db: Path, run_id: str, holder: Holder, heartbeat: float) -> None:
    with contextlib.closing(sqlite3.connect(db)) as conn, conn:
        values = (holder.pid, holder.pid_started, holder.boot, holder.host, heartbeat, run_id)
        conn.execute(
            "UPDATE runs SET pid=?, pid_started=?, boot=?, host=?, heartbeat=? WHERE id=?", values
        )


# --- who is dead -----------------------------------------------------------------------------------------------------


def test_a_claim_is_taken_from_the_dead_alone(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    db, now = tmp_path / "a.db", time.time()
    living, late = Holder.of(other.pid), now - 2 * STALE
    elsewhere, another = replace(living, host="elsewhere"), replace(living, boot="another")
    ended, old = replace(living, pid=2**22 + 1), replace(living, boot="", pid_started="")
    cases = [
        (living, 0.0, False),  # slow, but there
        (replace(living, pid_started="1"), now, True),  # the number was given to another process
        (ended, now, True),
        (elsewhere, now, False),
        (elsewhere, late, True),
        (another, now, False),  # another container: its numbers mean nothing here
        (another, late, True),
        (old, now, False),  # an old row
        (old, late, True),
        (replace(old, pid=ended.pid), now, True),
    ]
    by = rf"by agentrl train \(process {other.pid}"
    with Store.open(db) as store:
        for holder, heartbeat, free in cases:
            run = store.runs.add(RunRow("", "fox"))
            set_holder(db, run.id, holder, heartbeat)
            seen = store.runs.get(run.id)
            assert (seen.held, seen.state) == (not free, "interrupted" if free else "running"), seen
            if free:
                store.claims.take(run.id, "train")
                assert not store.claims.why_lost(run.id)
            else:
                with pytest.raises(UsageError, match=rf"{run.name} is in use {by}"):
                    store.claims.take(run.id, "eval")
                assert re.search(f"taken over {by}", store.claims.why_lost(run.id))
            assert store.runs.get(run.id).holder == (Holder.of() if free else holder)


def test_a_zombie_counts_as_dead(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    pid = process.pid
    assert start_of(pid) and _start_by_ps(pid)
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add(RunRow("", "fox", pid=pid))
        assert run.alive and run.holder == Holder.of(pid)
        process.kill()
        assert comes(lambda: not store.runs.get(run.id).alive)  # it stays a zombie all the while
        assert start_of(pid) is None and _start_by_ps(pid) is None
        store.claims.take(run.id, "train")
    process.wait()
    assert start_of(pid) is None and _start_by_ps(pid) is None


def test_a_claim_beats_and_is_given_back(tmp_path: Path) -> None:
    class Thrice(threading.Event):
        """A claim's end that comes after three heartbeats."""

        def wait(self, timeout: float | None = None) -> bool:
            beats.append(store.runs.get(run.id).heartbeat)
            return len(beats) > 3

    beats: list[float] = []
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add(RunRow("", "fox", status="stopped"))
        with store.claims.hold(run.id, "merge"):
            held, me = store.runs.get(run.id), Holder.of()
            assert (held.held, held.claim, held.alive, held.state) == (
                True,
                "merge",
                False,
                "stopped",
            )
            with contextlib.closing(connect(store.path)) as conn:
                _beat(conn, (run.id, me.pid, me.pid_started, me.boot, me.host), Thrice())
            assert beats == sorted(set(beats)) and len(beats) == 4
        after = store.runs.get(run.id)
        assert (after.held, after.claim, after.status) == (False, "", "stopped")
        store.runs.delete(run.id)
        assert "deleted" in store.claims.why_lost(run.id)
    assert boot() and me.pid_started


# --- real processes --------------------------------------------------------------------------------------------------


def test_two_resumes_at_once(tmp_path: Path, model: Path, whole: dict[str, Any]) -> None:
    project = project_of(tmp_path / "project", model)
    plan(project, "rollout", 2 * EPISODES + 4)
    assert spawn(project, "train")[0] == -signal.SIGKILL
    both = [start(project, "train", "--resume", "last", log=f"{n}.txt") for n in range(2)]
    (trained, output), (refused, said) = sorted(one.end() for one in both)
    assert (trained, refused) == (0, 2) and "finished at step" in output, (output, said)
    assert "is in use by agentrl train (process " in said and "Traceback" not in said
    assert ending(project) == whole


def test_a_frozen_trainer_is_not_robbed_and_a_killed_one_is(
    tmp_path: Path, model: Path, whole: dict[str, Any], cli: Cli
) -> None:
    cli.folder = project = project_of(tmp_path / "project", model)
    db = project / "runs" / "agentrl.db"
    plan(project, "rollout", EPISODES + 3, signal.SIGSTOP)
    trainer = start(project, "train", log="frozen.txt")
    pid = stopped(trainer)
    try:
        with Store.open(db) as store:
            run = only_run(store)
        set_holder(db, run.id, run.holder, heartbeat=1.0)
        out = Path(run.dir) / "merged"
        said = f"{run.name} is in use by agentrl train (process {pid} on {run.host})."
        for args in (
            ("train", "--resume", "last"),
            ("train", "--resume", "last", "--detach"),
            ("merge", f"{run.name}@base", str(out)),
            ("sft", str(out)),
        ):
            cli(*args, code=2, said=said)
        cli("runs", "delete", run.name, "--yes", code=2)
        with Store.open(db, readonly=True) as store:
            assert only_run(store).holder == run.holder and not out.exists()
    finally:
        os.kill(pid, signal.SIGKILL)
        trainer.end()
    spawn_well(project, "train", "--resume", "last")
    assert ending(project) == whole


def test_a_trainer_that_was_robbed_stops_writing(
    tmp_path: Path, model: Path, other: subprocess.Popen[bytes]
) -> None:
    project = project_of(tmp_path / "project", model)
    db = project / "runs" / "agentrl.db"
    plan(project, "batch", 2, signal.SIGSTOP)
    trainer = start(project, "train")
    pid = stopped(trainer)
    with Store.open(db) as store:
        run = only_run(store)
        set_holder(db, run.id, Holder.of(other.pid), heartbeat=time.time())
        os.kill(pid, signal.SIGCONT)
        code, output = trainer.end()
        assert code == 1 and "Traceback" not in output, output
        assert f"taken over by agentrl train (process {other.pid}" in output
        after = store.runs.get(run.id)
        assert (after.status, after.step, after.pid) == ("running", 1, other.pid) and after.alive


def test_two_evaluations_of_the_same(tmp_path: Path, model: Path) -> None:
    project = project_of(tmp_path / "project", model)
    plan(project, "rollout", 3, signal.SIGSTOP)
    asked = ("eval", "-k", "2", "--limit", "4")
    first = start(project, *asked, log="first.txt")
    pid = stopped(first)
    code, output = spawn(project, *asked)
    assert code == 2 and f"is in use by agentrl eval (process {pid}" in output, output
    os.kill(pid, signal.SIGKILL)
    first.end()
    spawn_well(project, *asked)
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        (run,) = store.runs.all()
        rows = store.episodes.rows(store.episodes.ids("-outcome:cancelled", run=run.id))
    assert (run.status, run.claim) == ("finished", "")
    assert len(rows) == len({(row.task_id, row.sample) for row in rows}) == 8


def test_two_that_write_one_folder(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "made"
    code = (
        "import pathlib, sys, time\nfrom agentrl_cli.models.output_lock import writing\n"
        "with writing(pathlib.Path(sys.argv[1]), 'sft', None):\n    print(flush=True)\n    time.sleep(60)\n"
    )
    first = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE)
    with first:
        assert first.stdout is not None and first.stdout.readline() == b"\n"
        said = f"is being written by agentrl sft (process {first.pid})"
        for args in (["sft", str(out), "--pack", "calc-task"], ["merge", "tiny", str(out)]):
            cli(*args, code=2, said=said)
        first.kill()
    cli("merge", "tiny", str(out))
    assert (out / "model.safetensors").is_file() and not list(tmp_path.glob(".made*"))


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_run_without_a_folder_goes_on(tmp_path: Path, model: Path, whole: dict[str, Any]) -> None:
    project = project_of(tmp_path / "project", model)
    plan(project, "rollout", 3)
    assert spawn(project, "train")[0] == -signal.SIGKILL
    db, settings = project / "runs" / "agentrl.db", project / "config.yaml"
    with Store.open(db) as store:
        run = only_run(store)
        shutil.rmtree(run.dir)
        store.runs.update(run.id, dir="")
    trap = json.dumps({**run.config, "train": {"steps": 1}})
    settings.write_text(trap)
    spawn_well(project, "train", "--resume", "last")
    assert ending(project) == whole and settings.read_text() == trap
    with Store.open(db, readonly=True) as store:
        after = only_run(store)
    folder = Path(after.dir)
    assert folder.parent == project / "runs" and (folder / "config.yaml").is_file()
    assert after.total_steps == STEPS
