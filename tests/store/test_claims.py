"""A run belongs to one process at a time: claims are taken before anything is touched, and only from the dead."""

import contextlib
import json
import os
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

from agentrl_cli.commands import main
from agentrl_cli.errors import UsageError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.connection import connect
from agentrl_cli.store.holder import STALE, Holder, _start_by_ps, boot, start_of
from agentrl_cli.store.runs import _beat
from tests.helpers.processes import comes
from tests.helpers.train import Started, spawn, start
from tests.trainer.test_resume import EPISODES, STEPS, ending, only_run, plan, project_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    project = project_of(tmp_path_factory.mktemp("whole") / "project", model)
    code, output = spawn(project, "train")
    assert code == 0, output
    return ending(project)


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
    living = Holder.of(other.pid)
    elsewhere = replace(living, host="elsewhere")
    cases = [
        (living, 0.0, False),  # slow, but there
        (replace(living, pid_started="1"), now, True),  # the number was given to another process
        (replace(living, pid=2**22 + 1), now, True),
        (elsewhere, now, False),
        (elsewhere, now - 2 * STALE, True),
        (
            replace(living, boot="another"),
            now,
            False,
        ),  # another container: its numbers mean nothing here
        (replace(living, boot="another"), now - 2 * STALE, True),
        (replace(living, boot="", pid_started=""), now, False),  # an old row
        (replace(living, boot="", pid_started=""), now - 2 * STALE, True),
        (replace(living, pid=2**22 + 1, boot="", pid_started=""), now, True),
    ]
    with Store.open(db) as store:
        for holder, heartbeat, free in cases:
            run = store.runs.add(RunRow("", "fox"))
            set_holder(db, run.id, holder, heartbeat)
            assert store.runs.get(run.id).held is not free, holder
            assert store.runs.get(run.id).state == ("interrupted" if free else "running")
            if free:
                store.claims.take(run.id, "train")
                assert store.runs.get(run.id).holder == Holder.of() and not store.claims.why_lost(
                    run.id
                )
            else:
                with pytest.raises(
                    UsageError,
                    match=rf"{run.name} is in use by agentrl train \(process {other.pid}",
                ):
                    store.claims.take(run.id, "eval")
                assert store.runs.get(run.id).holder == holder
                assert f"taken over by agentrl train (process {other.pid}" in store.claims.why_lost(
                    run.id
                )


def test_a_zombie_counts_as_dead(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    assert start_of(process.pid) and _start_by_ps(process.pid)
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add(RunRow("", "fox", pid=process.pid))
        assert store.runs.get(run.id).alive and store.runs.get(run.id).holder == Holder.of(
            process.pid
        )
        process.kill()
        while store.runs.get(run.id).alive:  # it stays a zombie all the while
            time.sleep(0.01)
        assert start_of(process.pid) is None and _start_by_ps(process.pid) is None
        store.claims.take(run.id, "train")
    process.wait()
    assert start_of(process.pid) is None and _start_by_ps(process.pid) is None


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
            held = store.runs.get(run.id)
            assert (held.held, held.claim, held.alive, held.state) == (
                True,
                "merge",
                False,
                "stopped",
            )
            me = Holder.of()
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
    first = start(project, "train", "--resume", "last", log="first.txt")
    second = start(project, "train", "--resume", "last", log="second.txt")
    ends = [first.end(), second.end()]
    trained = [output for code, output in ends if code == 0 and "finished at step" in output]
    refused = [output for code, output in ends if code == 2]
    assert len(trained) == len(refused) == 1, ends
    assert "is in use by agentrl train (process " in refused[0] and "Traceback" not in refused[0]
    assert ending(project) == whole


def test_a_frozen_trainer_is_not_robbed_and_a_killed_one_is(
    tmp_path: Path, model: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    project = project_of(tmp_path / "project", model)
    db = project / "runs" / "agentrl.db"
    plan(project, "rollout", EPISODES + 3, signal.SIGSTOP)
    trainer = start(project, "train", log="frozen.txt")
    pid = stopped(trainer)
    try:
        with Store.open(db) as store:
            run = only_run(store)
        set_holder(db, run.id, run.holder, heartbeat=1.0)
        out = Path(run.dir) / "merged"
        for args in (
            ("train", "--resume", "last"),
            ("train", "--resume", "last", "--detach"),
            ("merge", f"{run.name}@base", str(out)),
            ("sft", str(out)),
        ):
            assert main([*args, "--project", str(project)]) == 2
            output = capsys.readouterr().err
            assert (
                f"{run.name} is in use by agentrl train (process {pid} on {run.host})." in output
            ), output
        assert main(["runs", "delete", run.name, "--yes", "--db", str(db)]) == 2
        with Store.open(db, readonly=True) as store:
            assert only_run(store).holder == run.holder and not out.exists()
    finally:
        os.kill(pid, signal.SIGKILL)
        trainer.end()
    code, output = spawn(project, "train", "--resume", "last")
    assert code == 0, output
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
        assert (
            code == 1
            and f"taken over by agentrl train (process {other.pid}" in output
            and "Traceback" not in output
        )
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
    code, output = spawn(project, *asked)
    assert code == 0, output
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        (run,) = store.runs.all()
        rows = [
            row
            for row in store.episodes.rows(store.episodes.ids(run=run.id))
            if row.outcome != "cancelled"
        ]
        assert (run.status, run.claim) == ("finished", "")
        assert len(rows) == len({(row.task_id, row.sample) for row in rows}) == 8


def test_two_that_write_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made"
    code = (
        "import pathlib, sys, time\nfrom agentrl_cli.models.output_lock import writing\n"
        "with writing(pathlib.Path(sys.argv[1]), 'sft', None):\n    print(flush=True)\n    time.sleep(60)\n"
    )
    first = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE)
    assert first.stdout is not None and first.stdout.readline() == b"\n"
    try:
        for args in (["sft", str(out), "--pack", "calc-task"], ["merge", "tiny", str(out)]):
            assert main([*args, "--db", str(tmp_path / "a.db")]) == 2
            assert (
                f"is being written by agentrl sft (process {first.pid})" in capsys.readouterr().err
            )
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    assert main(["merge", "tiny", str(out), "--db", str(tmp_path / "a.db")]) == 0
    assert (out / "model.safetensors").is_file() and not list(tmp_path.glob(".made*"))


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_run_without_a_folder_goes_on(tmp_path: Path, model: Path, whole: dict[str, Any]) -> None:
    project = project_of(tmp_path / "project", model)
    plan(project, "rollout", 3)
    assert spawn(project, "train")[0] == -signal.SIGKILL
    db = project / "runs" / "agentrl.db"
    with Store.open(db) as store:
        run = only_run(store)
        shutil.rmtree(run.dir)
        store.runs.update(run.id, dir="")
    trap = json.dumps({**run.config, "train": {"steps": 1}})
    (project / "config.yaml").write_text(trap)
    code, output = spawn(project, "train", "--resume", "last")
    assert code == 0, output
    assert ending(project) == whole and (project / "config.yaml").read_text() == trap
    with Store.open(db, readonly=True) as store:
        after = only_run(store)
    assert (
        Path(after.dir).parent == project / "runs" and (Path(after.dir) / "config.yaml").is_file()
    )
    assert after.total_steps == STEPS
