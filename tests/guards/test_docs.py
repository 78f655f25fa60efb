"""Generated pages are current, and every command is in them."""

from __future__ import annotations

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
