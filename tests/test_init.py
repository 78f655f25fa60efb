"""`agentrl init`: a pack becomes a project, and nothing that was there is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.commands.common import open_project
from agentrl_cli.config import load_config
from agentrl_cli.doctor import sandbox_level
from agentrl_cli.paths import pack_names, packs_dir


def init(*args: str) -> int:
    return main(["init", "--min-level", "ns", *args])


@pytest.mark.parametrize("pack", pack_names())
def test_every_pack_becomes_a_valid_project(pack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert init(pack, str(folder)) == 0
    out = capsys.readouterr().out.split("\n")
    assert [line.strip() for line in out[:3]] == [f"cd {folder}", "agentrl check", "agentrl train --watch"]
    for path in (packs_dir() / pack).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert (folder / path.relative_to(packs_dir() / pack)).read_bytes() == path.read_bytes()
    project = open_project(folder)
    expected, _ = load_config(sets=[f"task.packs=[{pack}]"])
    own = Path(expected.model.name)  # the pack's adapter, or the bundled model
    assert project.config.task.packs == ["."] and project.config.model.name == own.name
    assert own.name == "tiny" or (folder / own.name / "adapter_config.json").is_file()
    assert project.config.rollout == expected.rollout and project.config.train == expected.train
    assert "#" in (folder / "agentrl.yaml").read_text().splitlines()[0]


def test_another_model_gets_an_adapter(tmp_path: Path) -> None:
    assert init("echo-task", str(tmp_path / "p"), "--model", "Qwen/Qwen2.5-0.5B-Instruct") == 0
    config = open_project(tmp_path / "p").config
    assert config.model.name == "Qwen/Qwen2.5-0.5B-Instruct" and config.adapter.enabled
    assert config.rollout.max_new_tokens == 256


def test_a_weaker_sandbox_is_written_down(tmp_path: Path) -> None:
    assert main(["init", "echo-task", str(tmp_path / "p"), "--min-level", "bare"]) == 0
    sandbox = open_project(tmp_path / "p").config.sandbox
    pinned = "bare" if sandbox_level()[0] == "bare" else "auto"
    assert (sandbox.backend, sandbox.min_level) == (pinned, "bare")
    assert pinned == "bare" or "backend" not in (tmp_path / "p" / "agentrl.yaml").read_text()
    assert main(["init", "echo-task", str(tmp_path / "q"), "--min-level", "nns"]) == 2


def test_files_that_differ_are_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "p"
    assert init("echo-task", str(folder)) == 0
    assert init("echo-task", str(folder)) == 0  # the same again changes nothing
    (folder / "task.py").write_text("mine = 1\n")
    (folder / "task.yaml").unlink()
    assert init("echo-task", str(folder)) == 2
    assert "task.py" in capsys.readouterr().err
    assert (folder / "task.py").read_text() == "mine = 1\n" and not (folder / "task.yaml").exists()
    assert init("echo-task", str(folder), "--force") == 0
    assert (folder / "task.py").read_text() != "mine = 1\n"


def test_a_file_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p").touch()
    assert init("echo-task", str(tmp_path / "p")) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_project_is_a_pack_that_can_be_copied_again(tmp_path: Path) -> None:
    assert init("echo-task", str(tmp_path / "a")) == 0
    (tmp_path / "a" / "runs").mkdir()
    (tmp_path / "a" / "runs" / "agentrl.db").touch()
    assert init(str(tmp_path / "a"), str(tmp_path / "b")) == 0
    assert (tmp_path / "b" / "task.py").exists() and not (tmp_path / "b" / "runs").exists()


def test_list_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == pack_names()
    assert init("echo-task", str(tmp_path / "p"), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["project"] == str(tmp_path / "p") and "agentrl.yaml" in told["files"]
