"""Where packs, project and store are found."""

from pathlib import Path

import pytest

from agentrl_cli import paths
from agentrl_cli.commands.common import open_project
from agentrl_cli.commands.place import find_db
from agentrl_cli.errors import ConfigError, NotFound

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_checkout_uses_its_own_folders() -> None:
    assert paths.packs_dir() == ROOT / "tasks"
    assert paths.sandbox_dir() == ROOT / "sandbox"
    assert paths.bundled_model() == ROOT / "agentrl_cli" / "models" / "tiny-agent"


def test_the_shipped_packs_have_names() -> None:
    assert {"calc-task", "code-task", "echo-task"} <= set(paths.pack_names())
    assert paths.pack_path("echo-task") == ROOT / "tasks" / "echo-task"


def test_a_pack_by_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert paths.pack_path("./mine", tmp_path) is None
    (tmp_path / "mine" / "task.yaml").touch()
    assert (
        paths.pack_path("./mine", tmp_path)
        == paths.pack_path("mine", tmp_path)
        == tmp_path / "mine"
    )
    assert paths.pack_path(".", tmp_path / "mine") == tmp_path / "mine"


def test_the_project_is_searched_upwards(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "a" / "agentrl.yaml").touch()
    assert paths.find_project(deep) == tmp_path / "a"
    assert paths.find_project(deep, override=tmp_path / "a" / "agentrl.yaml") == tmp_path / "a"
    with pytest.raises(ConfigError, match="is not a project"):
        paths.find_project(deep, override=tmp_path)


def test_the_store_is_the_projects_unless_said_otherwise(tmp_path: Path) -> None:
    project = tmp_path / "p"
    project.mkdir()
    (project / "agentrl.yaml").write_text("seed: 1\n")
    assert find_db(project, must_exist=False) == project / "runs" / "agentrl.db"
    assert open_project(project).db == project / "runs" / "agentrl.db"
    (project / "agentrl.yaml").write_text("store: {path: elsewhere/s.db}\n")
    assert (
        find_db(project, must_exist=False)
        == open_project(project).db
        == project / "elsewhere" / "s.db"
    )
    assert find_db(project, tmp_path / "x.db", must_exist=False) == tmp_path / "x.db"
    with pytest.raises(NotFound, match="No store"):
        find_db(project)


def test_a_bundled_model_has_a_name_of_its_own() -> None:
    assert paths.bundled_model("tiny-agent") == paths.bundled_model("tiny")
    assert paths.is_bundled("tiny") and paths.is_bundled("tiny-agent")
    for name in ("", ".", "..", "tiny-agent/", "../models/tiny-agent", "another", "a\0b"):
        assert not paths.is_bundled(name), name
