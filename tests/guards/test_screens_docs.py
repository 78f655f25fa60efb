"""The pictures in docs/screens are those of the screens as they are now; pictures ask for nothing from anywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.registry import load_file
from tests.helpers.tui_shots import DOCUMENTED, fill_still

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
DATED = {"runs", "watch"}
"""Screens with times of day and bars of this machine's disk."""


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "project" / "runs"
    folder.mkdir(parents=True)
    fill_still(folder / "agentrl.db")
    return folder / "agentrl.db"


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if name not in DATED])
async def test_pictures_are_current(name: str, db: Path) -> None:
    maker: Any = load_file(DOCS / "make_screens.py")
    drawn = await maker.draw(db, name)
    assert drawn == (DOCS / "screens" / f"{name}.svg").read_text("utf-8"), "run: make screens"


def test_every_picture_is_there_and_shown_and_asks_for_nothing() -> None:
    page = (DOCS / "screens.md").read_text("utf-8")
    assert set(re.findall(r"\(screens/([\w-]+)\.svg\)", page)) == set(DOCUMENTED)
    for name in DOCUMENTED:
        text = (DOCS / "screens" / f"{name}.svg").read_text("utf-8")
        assert text.startswith("<svg") and not re.search(
            r"https?://(?!www\.w3\.org/2000/svg)|@font-face|href", text
        )
