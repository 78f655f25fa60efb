"""A training that is killed between any two commits, and resumed, leaves the store that an uninterrupted one leaves."""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import StoreError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Outcome
from tests.helpers.cli import Cli
from tests.helpers.train import TASK_PY, episodes_of, spawn, spawn_well, write_pack, write_project

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
    given |= {"deterministic": True, "algo": {"drop_zero_variance": False}}
    return write_project(folder, model, **given)


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
            "alerts": sorted(
                store.select("SELECT name, text FROM alerts WHERE run_id=?", (run.id,))
            ),
            "weights": (last / "model.safetensors").read_bytes(),
        }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[dict[str, Any], int]:
    """How the uninterrupted run ends, and how many commits it made."""
    project = project_of(tmp_path_factory.mktemp("whole") / "project", model)
    spawn_well(project, "train", before=partial(kill_at_commit, 0))
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
    words = ["train"]
    for number in [rng.randint(6, count // 3), *(rng.randint(1, 12) for _ in range(4))]:
        code, output = spawn(project, *words, before=partial(kill_at_commit, number))
        if code == 0 and len(words) > 1:
            break
        assert code == -signal.SIGKILL, output
        words = ["train", "--resume", "last"]
    else:
        spawn_well(project, *words)
    after = ending(project)
    assert {name for name in found if after[name] != found[name]} == set()


# --- a store that is lost, replaced or damaged under a training ---


HOOK = """\
import os
import shutil
import sqlite3
from pathlib import Path

DB = Path("runs/agentrl.db")


def lose(*names):
    return lambda: [Path(f"{DB}{name}").unlink() for name in names]


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
    "everything": lose("", "-wal", "-shm"),
    "log": lose("-wal"),
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


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("everything", 3, "was deleted while it was in use"),
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
    elif fault == "deleted":
        with Store.open(path, readonly=True) as store:
            assert store.runs.all() == [] and store.episodes.ids() == []
    elif fault == "damaged":
        for command in (["train", "--resume", "last"], ["rollout", "-n", "1"]):
            cli(*command, code=3, said=("is damaged", ".recover"))


def test_a_damaged_page_is_found_before_a_resume(tmp_path: Path, model: Path, cli: Cli) -> None:
    cli.folder, code, output = training(tmp_path / "project", model, "log")
    assert code == 3, output
    path = cli.folder / "runs" / "agentrl.db"
    find = "SELECT rootpage FROM sqlite_master WHERE name='turn_tokens'"
    with closing(sqlite3.connect(path)) as conn:
        ((page,),) = conn.execute(find).fetchall()
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    cli("train", "--resume", "last", code=3, said="is damaged")
    assert "resumed" not in cli.err


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
