"""A run belongs to one process at a time: claims are taken before anything is touched, and only from the dead.

A training that is killed between any two commits, and resumed, leaves the store that an uninterrupted one leaves.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import StoreError, UsageError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.connection import connect
from agentrl_cli.store.holder import STALE, Holder, _start_by_ps, boot, start_of
from agentrl_cli.store.runs import _beat
from agentrl_cli.types import Episode, Outcome
from tests.helpers.cli import Cli
from tests.helpers.processes import comes
from tests.helpers.train import (
    TASK_PY,
    Started,
    episodes_of,
    spawn,
    spawn_well,
    start,
    start_code,
    write_pack,
    write_project,
)
from tests.trainer.test_resume import (
    EPISODES,
    STEPS,
    ending,
    killed,
    made_once,
    only_run,
    plan,
    project_of,
)


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
    # within the last step, one step after a checkpoint
    done = killed(project, "rollout", 3 * EPISODES + 4 + 5)
    both = [start(project, "train", "--resume", "last", log=f"{n}.txt") for n in range(2)]
    (trained, output), (refused, said) = sorted(one.end() for one in both)
    assert (trained, refused) == (0, 2) and "finished at step" in output, (output, said)
    assert "is in use by agentrl train (process " in said and "Traceback" not in said
    assert ending(project) == whole and made_once(project, done)


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
        "with writing(pathlib.Path(sys.argv[1]), 'sft', None):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    first = start_code(tmp_path, code, str(out))
    first.line("held")
    said = f"is being written by agentrl sft (process {first.process.pid})"
    for args in (["sft", str(out), "--pack", "calc-task"], ["merge", "tiny", str(out)]):
        cli(*args, code=2, said=said)
    first.process.kill()
    first.end()
    cli("merge", "tiny", str(out))
    assert (out / "model.safetensors").is_file() and not list(tmp_path.glob(".made*"))


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_run_without_a_folder_goes_on(tmp_path: Path, model: Path, whole: dict[str, Any]) -> None:
    project = project_of(tmp_path / "project", model)
    done = killed(project, "eval", 1)  # after that of the base, before it is kept as the best
    db, settings = project / "runs" / "agentrl.db", project / "config.yaml"
    with Store.open(db) as store:
        run = only_run(store)
        shutil.rmtree(run.dir)
        store.runs.update(run.id, dir="")
    trap = json.dumps({**run.config, "train": {"steps": 1}})
    settings.write_text(trap)
    spawn_well(project, "train", "--resume", "last")
    assert ending(project) == whole and settings.read_text() == trap
    assert made_once(project, done)
    with Store.open(db, readonly=True) as store:
        after = only_run(store)
    folder = Path(after.dir)
    assert folder.parent == project / "runs" and (folder / "config.yaml").is_file()
    assert after.total_steps == STEPS


# --- kills between commits, and stores that are lost ---


FEW = 3
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


def evaluated_project(folder: Path, model: Path) -> Path:
    write_pack(folder, code=TASK_PY + SLOW)
    train = {
        "steps": FEW,
        "save_every": 2,
        "eval_every": 1,
        "eval_tasks": 3,
        "eval_samples": 2,
        "lr": 3e-2,
    }
    given: dict[str, Any] = {"rollout": {"concurrency": 3, "max_new_tokens": 12}, "train": train}
    given |= {"deterministic": True, "algo": {"drop_zero_variance": False}}
    return write_project(folder, model, **given)


def whole_ending(project: Path) -> dict[str, Any]:
    """All that a kill must not change: metrics, facts, drift, evaluations, checkpoints, what was sampled."""
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        (run,) = store.runs.all()
        assert (run.status, run.step, run.error) == ("finished", FEW, "")
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
            "alerts": sorted(
                store.select("SELECT name, text FROM alerts WHERE run_id=?", (run.id,))
            ),
            "weights": (last / "model.safetensors").read_bytes(),
        }


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> tuple[dict[str, Any], int]:
    """How the uninterrupted run ends, and how many commits it made."""
    project = evaluated_project(tmp_path_factory.mktemp("whole") / "project", model)
    spawn_well(project, "train", before=partial(kill_at_commit, 0))
    found = whole_ending(project)
    assert sum(found["drift"].values()) > 20 and all(
        "drift/resegmented" in row for row in found["metrics"]
    ), "without drift in the metrics a lost one would not be seen"
    return found, int((project / "commits").read_text())


def test_killed_between_commits_again_and_again(
    tmp_path: Path, model: Path, uninterrupted: tuple[dict[str, Any], int]
) -> None:
    found, count = uninterrupted
    project, rng = evaluated_project(tmp_path / "project", model), random.Random(5)
    words = ["train"]
    for number in [rng.randint(6, count // 3), *(rng.randint(1, 12) for _ in range(4))]:
        code, output = spawn(project, *words, before=partial(kill_at_commit, number))
        if code == 0 and len(words) > 1:
            break
        assert code == -signal.SIGKILL, output
        words = ["train", "--resume", "last"]
    else:
        spawn_well(project, *words)
    after = whole_ending(project)
    assert {name for name in found if after[name] != found[name]} == set()


# --- a store that is lost, replaced or damaged under a training ---


HOOK = """\
import os
import shutil
import sqlite3
from pathlib import Path

DB = Path("runs/agentrl.db")


def replace():
    shutil.copy(DB, "other.db")
    os.replace("other.db", DB)


def delete():
    from agentrl_cli.commands import main

    assert os.system(f"'{os.sys.executable}' -m agentrl_cli runs delete last --force --yes > deleted.txt 2>&1") == 0


def damage():
    other = sqlite3.connect(DB)  # its commit makes the training read its pages again
    other.execute("INSERT INTO logs (at, level, text) VALUES (1.0, 'info', 'x')")
    other.commit()
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with DB.open("r+b") as file:
        file.seek(4096)
        file.write(bytes([0xA5]) * (DB.stat().st_size - 4096))
    other.close()


FAULTS = {
    "log": DB.with_name("agentrl.db-wal").unlink,
    "replaced": replace,
    "deleted": delete,
    "damaged": damage,
    "killed": lambda: os.kill(os.getpid(), 9),
}


class Fault:
    def on_update(self, metrics, step):
        if step == 2 and Path("fault").is_file():
            Path("fault").rename("done")
            FAULTS[Path("done").read_text()]()
"""


def training(folder: Path, model: Path, fault: str, *more: str) -> tuple[Path, int, str]:
    """A training of four steps in which something happens to the store after the second; `errors` of its output."""
    folder.mkdir()
    (folder / "hook.py").write_text(HOOK)
    (folder / "fault").write_text(fault)
    train = {"steps": 4, "save_every": 1}
    project = write_project(folder, model, hooks=["hook.py:Fault"], train=train)
    code, output = spawn(project, "train", *more)
    for never in ("Traceback", "never retrieved", "Something went wrong"):
        assert never not in output
    return project, code, output


def damage_page(path: Path) -> None:
    """One that is read late: of the tokens."""
    find = "SELECT rootpage FROM sqlite_master WHERE name='turn_tokens'"
    with closing(sqlite3.connect(path)) as conn:
        ((page,),) = conn.execute(find).fetchall()
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("log", 3, "was deleted while it was in use"),
        ("replaced", 3, "was replaced while it was in use"),
        ("deleted", 1, "was deleted while it ran"),
        ("damaged", 3, "is damaged"),
    ],
)
def test_a_training_stops_where_its_store_is_lost(
    tmp_path: Path, model: Path, cli: Cli, fault: str, code: int, said: str
) -> None:
    project, ended, output = training(tmp_path / "project", model, fault)
    (line,) = (line for line in output.splitlines() if line.startswith("Error: "))
    assert ended == code and said in line and "closed database" not in output, output
    assert "in use" not in said or (output.count("in use") == 1 and "step 3" not in output)
    cli.folder, path = project, project / "runs" / "agentrl.db"
    if fault == "log":  # what was in the log was saved, and a resume goes on
        spawn_well(project, "train", "--resume", "last")
        with Store.open(path, readonly=True) as store:
            steps = store.runs.steps(store.runs.get("last").id)
        assert [row["step"] for row in steps] == [1, 2, 3, 4]
        damage_page(path)
        cli("train", "--resume", "last", "--steps", "5", code=3, said="is damaged")
        assert "resumed" not in cli.err
    elif fault == "deleted":
        with Store.open(path, readonly=True) as store:
            assert store.runs.all() == [] and store.episodes.ids() == []
    elif fault == "damaged":
        for command in (["train", "--resume", "last"], ["rollout", "-n", "1"]):
            cli(*command, code=3, said=("is damaged", ".recover"))


def test_a_watched_training_that_dies_does_not_exit_with_0(tmp_path: Path, model: Path) -> None:
    _, code, output = training(tmp_path / "project", model, "killed", "--watch")
    assert code == 1 and "Error: bandit-grpo: interrupted at step 2" in output, output


@pytest.mark.parametrize("name", ["", "-wal", "-shm", "replaced"])
def test_the_next_commit_notices(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / "agentrl.db", tmp_path / "other.db"
    with Store.open(other) as store:
        store.runs.add(RunRow(id="r2", name="replaced"))
    store = Store.open(path)
    store.runs.add(RunRow(id="r1", name=name))
    other.replace(path) if name == "replaced" else Path(f"{path}{name}").unlink()
    wanted = f"{'replaced' if name == 'replaced' else 'deleted'} while it was in use"
    with pytest.raises(StoreError, match=wanted):
        store.episodes.finish(Episode("e", "t", outcome=Outcome.FAILED))
    with pytest.raises(StoreError, match=wanted):
        store.close()
    if name:
        shutil.copy(path, tmp_path / "copy.db")
        with closing(sqlite3.connect(tmp_path / "copy.db")) as conn:
            assert conn.execute("SELECT name FROM runs").fetchall() == [(name,)]
