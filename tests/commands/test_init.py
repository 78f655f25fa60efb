"""`agentrl init`: a pack becomes a project, and nothing that was there is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.commands import main
from agentrl_cli.commands.common import open_project
from agentrl_cli.config import load_config
from agentrl_cli.doctor.sandbox import sandbox_level
from agentrl_cli.paths import find_pack, pack_names, packs_dir


def init(*args: str) -> int:
    return main(["init", "--min-level", "ns", *args])


@pytest.mark.parametrize("pack", pack_names())
def test_every_pack_becomes_a_valid_project(
    pack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert init(pack, str(folder)) == 0
    out = capsys.readouterr().out.split("\n")
    assert [line.strip() for line in out[:3]] == [
        f"cd {folder}",
        "agentrl check",
        "agentrl train --watch",
    ]
    for path in find_pack(pack).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert (folder / path.relative_to(find_pack(pack))).read_bytes() == path.read_bytes()
    project = open_project(folder)
    expected, _ = load_config(sets=[f"task.packs=[{pack}]"])
    own = Path(expected.model.name)  # the pack's adapter, or the bundled model
    assert project.config.task.packs == ["."] and project.config.model.name == own.name
    assert own.name in ("tiny", "tiny-tools") or any(
        (folder / own.name / name).is_file() for name in ("adapter_config.json", "config.json")
    )
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


def test_files_that_differ_are_kept_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    reported = json.loads(capsys.readouterr().out)
    assert reported["project"] == str(tmp_path / "p") and "agentrl.yaml" in reported["files"]


WITHOUT_NAMESPACES = """
echo 0 > /proc/sys/user/max_user_namespaces
exec setpriv --inh-caps=-all --ambient-caps=-all --bounding-set=-all "$@"
"""
"""As in a container that forbids user namespaces: an ordinary user, and no namespace can be made below."""


def test_where_only_weaker_isolation_is_to_be_had(tmp_path: Path) -> None:
    jail = [
        "unshare",
        "-U",
        "--map-user=1000",
        "--map-group=1000",
        "--keep-caps",
        "sh",
        "-c",
        WITHOUT_NAMESPACES,
        "sh",
    ]
    if (
        not shutil.which("unshare")
        or subprocess.run([*jail, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no user namespace can be made here, so none can be forbidden in one")
    around = {
        **os.environ,
        "DOCKER_HOST": f"unix://{tmp_path}/none.sock",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }

    def agentrl(*command: str) -> subprocess.CompletedProcess[str]:
        line = [*jail, sys.executable, "-m", "agentrl_cli", *command]
        return subprocess.run(
            line, capture_output=True, text=True, env=around, cwd=tmp_path, check=False
        )

    asked = agentrl("init", "echo-task", "p")
    if "isolation than namespaces: landlock" not in asked.stderr:
        pytest.skip(f"neither is Landlock to be had here: {asked.stderr}")
    assert (
        asked.returncode == 2
        and "To get a stronger one: " in asked.stderr
        and "--yes" in asked.stderr
    )
    assert (
        "max_user_namespaces" if shutil.which("bwrap") else "Install bubblewrap"
    ) in asked.stderr
    assert not (tmp_path / "p").exists()
    demo = agentrl("demo")
    assert demo.returncode == 2 and "make demo WEAK=1" in demo.stderr and "WEAK" not in asked.stderr
    assert agentrl("init", "echo-task", "p", "--yes").returncode == 0
    assert open_project(tmp_path / "p").config.sandbox.min_level == "landlock"
    content = shutil.copytree(packs_dir() / "echo-task", tmp_path / "own") / "task.yaml"
    content.write_text(content.read_text() + "  sandbox: {min_level: landlock}\n")
    assert agentrl("init", "own", "q").returncode == 0, "strong enough for this pack"
    assert open_project(tmp_path / "q").config.sandbox.min_level == "landlock"
    # A minimum that is not met is an error wherever code would run, and never a fallback.
    (tmp_path / "hello.py").write_text("print('hello')")
    refused = agentrl("sandbox", "run", "hello.py", "--set", "sandbox.min_level=ns")
    assert (
        refused.returncode == 3
        and "hello" not in refused.stdout
        and "ns or stronger" in refused.stderr
    )
    accepted = agentrl("sandbox", "run", "hello.py", "--project", "p")
    assert (
        accepted.returncode == 0
        and accepted.stdout == "hello\n"
        and "level landlock" in accepted.stderr
    )


def test_the_demo_is_one_command_and_continues_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["demo", "full"]) == 2 and "is not a project" in capsys.readouterr().err
    assert init("echo-task", "small") == 0
    small = {"rollout": {"prompts_per_step": 1, "group_size": 2}, "eval": {"limit": 1, "k": 1}}
    small["train"] = {"eval_every": 1}
    with (tmp_path / "small" / "agentrl.yaml").open("w") as file:
        json.dump({"task": {"packs": ["."]}, **small, "task.limit": 4}, file)
    assert main(["demo", "small", "--steps", "1"]) == 0
    out, err = capsys.readouterr()
    assert (
        "agentrl replay best" in out and "step 1/1" in err and "small is a project already" in err
    )


FAILING = """
from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.load import local_policy


def failing(source):
    policy = local_policy(source)
    sample = policy.generate

    async def generate(*args, **given):
        if policy.weights_version.endswith("@1"):
            raise PolicyError("broken on purpose")
        return await sample(*args, **given)

    policy.generate = generate
    return policy
"""


def test_a_demo_that_was_cut_short_names_what_continues_it_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure that has nothing to do with isolation; the line that is printed runs, and so does the demo again."""
    monkeypatch.chdir(tmp_path)
    assert init("echo-task", "my demo") == 0
    project = tmp_path / "my demo"
    small: dict[str, Any] = {
        "rollout": {"prompts_per_step": 1, "group_size": 2},
        "eval": {"limit": 1, "k": 1},
    }
    small |= {
        "train": {"eval_every": 3, "save_every": 1, "steps": 3},
        "remote": {"backend": "fails.py:failing"},
    }
    (project / "agentrl.yaml").write_text(json.dumps({"task": {"packs": ["."]}, **small}))
    (project / "fails.py").write_text(FAILING)
    assert main(["demo", "my demo"]) == 1
    said = capsys.readouterr().err
    assert "WEAK" not in said and "broken on purpose" in said
    line = said.partition("It continues with: ")[2].splitlines()[0]
    (project / "fails.py").write_text(FAILING.replace("@1", "@2"))
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False, cwd="/")
    assert (
        done.returncode == 1 and "resumed at step 1" in done.stderr and "step 2/3" in done.stderr
    ), done.stderr
    (project / "fails.py").write_text(FAILING.replace("@1", "@none"))
    assert main(["demo", "my demo"]) == 0
    said = capsys.readouterr().err
    assert "resumed at step 2" in said and "step 3/3" in said and "step 2/3" not in said
