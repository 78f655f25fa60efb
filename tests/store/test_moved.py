"""A project that was moved, copied or renamed works, and a copy never touches the original's files."""

import asyncio
import contextlib
import hashlib
import io
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat_session.open import open_policy
from agentrl_cli.chat_session.whatif import run as what_if
from agentrl_cli.config import Config, inside
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.maintenance import delete_run
from agentrl_cli.store.migration import migrate
from agentrl_cli.store.schema import MIGRATIONS
from tests.helpers.cli import Cli
from tests.helpers.train import spawn_well, write_model, write_pack, write_project

RUN = "bandit-grpo"
BEFORE = next(n for n, (name, _) in enumerate(MIGRATIONS) if name.endswith("_claim"))


def files(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file with its time of change and a hash."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


def trained(folder: Path, **sections: Any) -> Path:
    project = folder / "before"
    model = write_model(project / "models" / "base")
    write_pack(project / "packs" / "bandit")
    (project / "hook.py").write_text("class Nothing:\n    def on_update(self, metrics): ...\n")
    write_project(project, model, deterministic=True, train={"steps": 1}, **sections)
    settings = json.loads((project / "agentrl.yaml").read_text())
    del settings["model"]["name"]
    settings["task"] = {"packs": ["packs/bandit"]}
    (project / "agentrl.yaml").write_text(json.dumps(settings))
    (project / "task.yaml").unlink()
    args = ("--model", str(model), "--pack", str(project / "packs" / "bandit"))
    spawn_well(project, "train", *args, "--set", f"hooks=['{project}/hook.py:Nothing']")
    return project


def texts(db: Path) -> str:
    tables = ("runs", "checkpoints", "evals", "events", "episodes", "score_sets")
    with contextlib.closing(sqlite3.connect(db)) as conn:
        rows = [row for table in tables for row in conn.execute(f"SELECT * FROM {table}")]
    return "\n".join(map(str, rows))


def test_a_project_that_was_copied_moved_and_renamed(tmp_path: Path, cli: Cli) -> None:
    before = trained(tmp_path, adapter={"enabled": True, "r": 4})
    assert str(tmp_path) not in texts(before / "runs" / "agentrl.db")
    copy, renamed, moved = (tmp_path / name for name in ("copy", "renamed", "far/away/project"))
    shutil.copytree(before, copy)
    was = files(before)
    said = spawn_well(copy, "train", "--resume", RUN, "--steps", "2")
    assert "resumed at step 1" in said and files(before) == was, "the original is as it was"
    (copy / "output.txt").unlink()
    before.rename(renamed)  # what still reads it now fails
    moved.parent.mkdir(parents=True)
    shutil.move(copy, moved)
    _works(moved, cli)
    assert files(renamed) == was
    said = spawn_well(renamed, "train", "--resume", "last", "--steps", "2")
    assert "resumed at step 1" in said
    _works(renamed, cli)
    kept, cli.folder = files(renamed / "runs" / RUN), moved
    cli("runs", "delete", RUN, "--yes")
    assert not (moved / "runs" / RUN).exists() and files(renamed / "runs" / RUN) == kept


def _works(project: Path, cli: Cli) -> None:
    """Everything that reads a run, in a project that lies elsewhere than it was trained."""
    cli.folder, db = project, project / "runs" / "agentrl.db"
    with Store.open(db, readonly=True) as store:
        run = store.runs.get(RUN)
        rows = store.runs.checkpoints(run.id)
        episode = store.episodes.rows(store.episodes.ids(run=run.id))[0].id
    assert run.step == 2 and Path(run.dir) == project / "runs" / RUN
    assert all(Path(row.path).is_dir() and Path(row.path).is_relative_to(project) for row in rows)
    for command in (
        ["merge", f"{RUN}@last", str(project / "merged")],
        ["eval", "--checkpoint", f"{RUN}@last", "--limit", "2", "-k", "1", "--json"],
        ["compare", RUN, "last"],
        ["rescore", RUN, "--advantage", "rloo", "--json"],
        ["replay", episode, "--plain"],
    ):
        cli(*command)
    merged, base = (project / name / "model.safetensors" for name in ("merged", "models/base"))
    assert merged.read_bytes() != base.read_bytes()
    with contextlib.chdir(project):
        config = Config.model_validate({**run.config})
        policy, _ = open_policy(f"{RUN}@last", config, db, base=project)
        assert policy.weights_version == f"{RUN}@2", "the step, whatever `last` means later"
        asyncio.run(policy.close())
        where = ["--db", str(db), "--episode", episode, "--turn", "1", "--samples", "1"]
        output = io.StringIO()
        status = asyncio.run(what_if([*where, "--model", f"{RUN}@last"], output))
    assert status == 0, output.getvalue()


def test_settings_that_name_places_inside_the_project(tmp_path: Path) -> None:
    given = {
        "model": {"name": f"{tmp_path}/model", "chat_template": "/elsewhere/chat.jinja"},
        "task": {"packs": [str(tmp_path), f"{tmp_path}/packs/a", "code-task", f"{tmp_path}-2/b"]},
        "hooks": [f"{tmp_path}/hook.py:Hook", "hook.py:Other"],
    }
    config = inside(Config.model_validate(given), tmp_path)
    assert (config.model.name, config.model.chat.template) == ("./model", "/elsewhere/chat.jinja")
    assert config.task.packs == [".", "./packs/a", "code-task", f"{tmp_path}-2/b"]
    assert config.hooks == ["./hook.py:Hook", "hook.py:Other"]


# --- old stores ------------------------------------------------------------------------------------------------


def old_store(project: Path, lay: Path) -> Path:
    """A store with absolute paths in the project, made where `lay` was: a run, two checkpoints, one of them outside."""
    db = project / "runs" / "agentrl.db"
    (project / "runs" / "fox" / "checkpoints" / "best").mkdir(parents=True)
    (project / "agentrl.yaml").write_text("seed: 1\n")
    packs = [f"{lay}/pack", "/other/pack"]
    config = json.dumps({"model": {"name": f"{lay}/model"}, "task": {"packs": packs}})
    best, other = f"{lay}/runs/fox/checkpoints/best", "/other/step-000001"
    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as conn:
        migrate(conn, MIGRATIONS[:BEFORE])
        for sql, values in (
            (
                "INSERT INTO runs VALUES ('r', 'fox', 'train', 'running', ?, 'p', 0, 1, 9, '', NULL, NULL, ?, 4194305,"
                " '', '', '', 1, 0, 1, ?)",
                (f"{lay}/model", f"{lay}/runs/fox", config),
            ),
            ("INSERT INTO checkpoints VALUES (NULL, 'r', 1, 'best', ?, '{}', 1)", (best,)),
            ("INSERT INTO checkpoints VALUES (NULL, 'r', 1, 'step', ?, '{}', 1)", (other,)),
            (
                "INSERT INTO evals VALUES (NULL, 'r', 1, ?, 'test', 1, 1, 1, 1, 1, '{}', 1)",
                (f"{lay}/model",),
            ),
        ):
            conn.execute(sql, values)
    return db


@pytest.mark.parametrize("case", ["in place", "moved", "copied"])
def test_stores_of_before_are_migrated(tmp_path: Path, case: str) -> None:
    project = tmp_path / "project"
    lay = project if case == "in place" else tmp_path / "before"
    if case == "copied":
        old_store(lay, lay)
    db, folder = old_store(project, lay), project / "runs" / "fox"
    before = texts(db)
    for readonly in (True, False):  # a reader sees the same
        with Store.open(db, readonly=readonly) as store:
            run = store.runs.get("fox")
            assert (run.dir, run.model) == (str(folder), "./model")
            packs = {"packs": ["./pack", "/other/pack"]}
            assert run.config == {"model": {"name": "./model"}, "task": packs}
            places = [row.path for row in store.runs.checkpoints("r")]
            assert places == [str(folder / "checkpoints" / "best"), "/other/step-000001"]
            assert [row.name for row in store.runs.evals("r")] == ["./model"]
            assert (run.claim, run.alive, run.state) == ("train", False, "interrupted")
        assert not readonly or texts(db) == before, "reading changes nothing"
    assert str(tmp_path) not in texts(db)
    with Store.open(db) as store:
        delete_run(store, run)
    assert not folder.exists() and (lay / "runs" / "fox").is_dir() is (case == "copied")


def test_a_store_that_was_moved_away_from_its_runs_still_finds_them(tmp_path: Path) -> None:
    lay, alone = tmp_path / "before", tmp_path / "alone.db"
    old_store(lay, lay).rename(alone)
    folder = lay / "runs" / "fox"
    with Store.open(alone) as store:
        run, best = store.runs.get("fox"), store.runs.checkpoints("r")[0]
        assert (run.dir, best.path) == (str(folder), str(folder / "checkpoints" / "best"))
        delete_run(store, run)
    assert folder.is_dir(), "it does not lie beside the store"


def test_a_folder_that_two_stores_use_stays(tmp_path: Path, cli: Cli) -> None:
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add_folder(store.runs.add(RunRow("", "fox", status="finished")))
    cli("db", "backup", "backup.db", "--db", "a.db")
    delete = ("runs", "delete", "fox", "--yes", "--db")
    cli(*delete, "backup.db", said=f"The folder {run.dir} is kept")
    assert Path(run.dir).is_dir()
    cli(*delete, "a.db")
    assert not Path(run.dir).exists()


def test_paths_in_a_store_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.open("runs/a.db") as store:
        run = store.runs.add_folder(store.runs.add(RunRow("", "fox")))
        assert Path(run.dir) == tmp_path / "runs" / "fox"
        assert store.runs.get("fox") == run == store.runs.add_folder(run)
        best = Path(run.dir) / "checkpoints" / "best"
        store.runs.add_checkpoint(run.id, 1, best, {}, "best")
        store.runs.add_checkpoint(run.id, 1, "/elsewhere/step-1", {})
        monkeypatch.chdir("/")
        places = [row.path for row in store.runs.checkpoints(run.id)]
        assert places == [str(best), "/elsewhere/step-1"]
        rows = store.select("SELECT dir, path FROM runs JOIN checkpoints ON run_id=runs.id")
        assert rows == [("fox", "fox/checkpoints/best"), ("fox", "/elsewhere/step-1")]
        store.runs.remove_checkpoint(run.id, best)
        assert [row.path for row in store.runs.checkpoints(run.id)] == ["/elsewhere/step-1"]
