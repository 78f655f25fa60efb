"""A store that is deleted, replaced or emptied of a run while a training writes to it: an error in one sentence."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentrl_cli.errors import StoreError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Outcome
from tests.helpers.cli import Cli
from tests.helpers.train import spawn, write_project

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
    """A training of four steps in which something happens to the store after the second."""
    folder.mkdir()
    (folder / "hook.py").write_text(HOOK)
    (folder / "fault").write_text(fault)
    project = write_project(
        folder, model, hooks=["hook.py:Fault"], train={"steps": 4, "save_every": 1}
    )
    return project, *spawn(project, "train", *more)


def errors(output: str) -> list[str]:
    assert (
        "Traceback" not in output
        and "never retrieved" not in output
        and "Something went wrong" not in output
    ), output
    return [line for line in output.splitlines() if line.startswith("Error: ")]


@pytest.mark.parametrize("fault", ["everything", "log", "replaced"])
def test_a_training_stops_where_its_store_is_lost(tmp_path: Path, model: Path, fault: str) -> None:
    project, code, output = training(tmp_path / "project", model, fault)
    assert code == 3, output
    (line,) = errors(output)
    assert f"was {'replaced' if fault == 'replaced' else 'deleted'} while it was in use" in line, (
        output
    )
    assert output.count("while it was in use") == 1 and "step 3" not in output
    if fault == "log":  # what was in the log was saved, and a resume goes on
        assert spawn(project, "train", "--resume", "last")[0] == 0
        with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
            assert [row["step"] for row in store.runs.steps(store.runs.get("last").id)] == [
                1,
                2,
                3,
                4,
            ]


def test_a_training_whose_run_is_deleted_ends_with_a_sentence(tmp_path: Path, model: Path) -> None:
    project, code, output = training(tmp_path / "project", model, "deleted")
    assert code == 1, output
    (line,) = errors(output)
    assert "was deleted while it ran" in line and "closed database" not in output
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        assert store.runs.all() == [] and store.episodes.ids() == []


def test_a_training_whose_store_is_damaged_fails_and_is_not_resumed(
    tmp_path: Path, model: Path, cli: Cli
) -> None:
    project, code, output = training(tmp_path / "project", model, "damaged")
    cli.folder = project
    (line,) = errors(output)
    assert code == 3 and "is damaged" in line, output
    for command in (["train", "--resume", "last"], ["rollout", "-n", "1"]):
        cli(*command, code=3, said=("is damaged", ".recover"))


def test_a_damaged_page_is_found_before_a_resume(tmp_path: Path, model: Path, cli: Cli) -> None:
    project, code, output = training(tmp_path / "project", model, "log")
    assert code == 3, output
    path = project / "runs" / "agentrl.db"
    with sqlite3.connect(path) as conn:
        (page,) = conn.execute(
            "SELECT rootpage FROM sqlite_master WHERE name='turn_tokens'"
        ).fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    cli.folder = project
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
