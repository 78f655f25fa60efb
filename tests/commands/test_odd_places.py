"""Project folders whose names are not UTF-8, and terminals that can print ASCII alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.store import Store
from agentrl_cli.types import Episode, Outcome, Task
from tests.helpers.cli import Cli

SETS = (
    "rollout.group_size=2",
    "rollout.prompts_per_step=2",
    "rollout.max_new_tokens=16",
    "train.eval=0",
)
SMALL = [word for one in SETS for word in ("--set", one)]


def test_a_project_whose_folders_name_is_not_utf8(cli: Cli) -> None:
    cli.folder /= os.fsdecode(b"caf\xe9")
    try:
        cli.folder.mkdir()
    except (OSError, UnicodeError):
        pytest.skip("this file system takes no such names")
    cli("init", "calc-task", ".")
    for path in cli.folder.glob("data/*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    for command in (
        ["check"],
        ["train", *SMALL, "--set", "train.steps=1"],
        ["train", "--resume", "last", *SMALL, "--set", "train.steps=2"],
        ["eval", "--limit", "1", "-k", "1", "--set", "rollout.max_new_tokens=8"],
        ["ls", "--json"],
        ["show", "last"],
        ["db", "status", "--json"],
    ):
        cli(*command)
    assert "caf" in cli("doctor")


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    prompt = ({"role": "user", "content": "Grüße, 日本, 🙂"},)
    with Store.open(db) as store:
        store.tasks.add([Task("t", "p", "", "train", prompt, {})])
        store.episodes.add([Episode("e" * 26, "t", outcome=Outcome.FAILED, error="für nichts")])

    def said(encoding: str, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "agentrl_cli", *command, "--db", str(db)],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.decode(encoding)

    assert r"f\u00fcr nichts" in said("ascii", "show", "last")
    assert "für nichts" in said("utf-8", "show", "last")
    found: Any = json.loads(said("ascii", "ls", "--json"))
    assert "für nichts" in json.dumps(found, ensure_ascii=False)
