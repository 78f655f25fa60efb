"""Help, completion and tables: what a terminal of 80 columns shows."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.commands import commands, completion, load_command
from agentrl_cli.commands.help import all_examples
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tui.common.plain_text import fit_columns
from agentrl_cli.types import Episode, Outcome
from tests.helpers.cli import Cli


def leaves() -> Iterator[tuple[str, Any]]:
    for name in commands():
        command = load_command(name)
        yield name, command
        yield from (
            (f"{name} {inner}", child) for inner, child in getattr(command, "commands", {}).items()
        )


def test_every_help_has_two_examples_and_describes_every_option(cli: Cli) -> None:
    for path, command in leaves():
        page = cli(*path.split(), "--help")
        examples = re.findall(r"^ +agentrl ", page.partition("Examples:")[2], re.MULTILINE)
        assert len(examples) >= 2 and "<bool>" not in page and "install-completion" not in page
        assert (command.help or "").strip(), f"{path} has no docstring"
        for parameter in command.params:
            assert parameter.help or parameter.name == "help", f"{path} {parameter.name}"


def test_examples_use_options_that_exist() -> None:
    found = dict(leaves())
    assert {path for path, command in found.items() if not getattr(command, "commands", {})} == set(
        all_examples()
    )
    for path, examples in all_examples().items():
        known = {option for parameter in found[path].params for option in parameter.opts}
        for example in examples:
            words = shlex.split(example.partition(" > ")[0].partition(" | ")[0])
            given = [word for word in words[1 + len(path.split()) :] if word.startswith("-")]
            assert example.startswith(f"agentrl {path}") and set(given) <= known, example


def test_a_narrow_terminal_loses_columns_and_no_id() -> None:
    names, rows = ["id", "run", "task", "tags"], [["1m82d1n8xp7zet", "x" * 30, "t" * 40, None]]
    assert fit_columns(names, rows, ("tags", "run"), 80) == ([0, 2], ["tags", "run"])
    assert fit_columns(names, rows, ("tags", "run"), 10) == ([0], ["tags", "run", "task"])
    assert fit_columns(names, rows, ("tags",), None) == ([0, 1, 2, 3], [])


def test_completion_of_runs_episodes_checkpoints_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert completion.runs("") == [] and ("last", "an episode") in completion.episodes("")
    (tmp_path / "agentrl.yaml").write_text("train: {}\n")
    with Store.open(tmp_path / "runs" / "agentrl.db") as store:
        run = store.runs.add(RunRow(id="", name="first", kind="train"))
        store.episodes.add(
            [Episode("1m82d1n8xp7zet", "t/1", run_id=run.id, outcome=Outcome.SOLVED)]
        )
    assert completion.runs("f") == ["first"] and completion.checkpoints("first@b") == ["first@best"]
    assert completion.episodes("1m") == [("1m82d1n8xp7zet", "t/1 solved")]
    assert dict(completion.settings("train.l"))["train.lr="] and not completion.settings("train.zz")
    assert completion.packs("code") == ["code-task"] and completion.episodes_and_runs("f") == [
        "first"
    ]
    assert completion.filters("flag:LOOP -rew") == ["flag:LOOP -reward:"]
    (tmp_path / "agentrl.yaml").write_text("store: [")
    assert completion.runs("") == []


def test_a_page_of_help_needs_no_arrays_settings_or_store() -> None:
    code = """
import sys
from agentrl_cli.commands import commands, load_command
for name in commands().keys() - {"ls", "import"}:
    load_command(name)
print({"torch", "numpy", "jinja2", "agentrl_cli.config.models", "agentrl_cli.store.connection"} & set(sys.modules))
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        == "set()\n"
    )
