"""Generated pages are current, and every command is in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl_cli.commands import COMMANDS
from agentrl_cli.registry import load_file

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


@pytest.mark.parametrize("name", ["cli", "config", "store"])
def test_generated_pages_are_current(name: str) -> None:
    maker = DOCS / f"make_{name}.py"
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == load_file(maker).render(), (
        f"run: python docs/{maker.name}"
    )


def test_every_command_is_documented() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"\n### agentrl {name}\n" not in page] == []


def test_the_table_of_libraries_names_files_that_exist() -> None:
    page = (DOCS / "libraries.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:agentrl_cli|sandbox|tests)/[^`]*)`", page)
    assert len(named) > 20 and [name for name in named if not (DOCS.parent / name).exists()] == []
