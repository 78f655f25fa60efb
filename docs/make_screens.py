"""Draws the screens that the documentation shows, from the very screens that the snapshot tests check.

    python docs/make_screens.py            writes docs/screens/*.svg

Over an invented run whose clock stands, so the same code gives the same pictures; a test compares them.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from agentrl_cli.tui.app import AgentApp  # noqa: E402
from agentrl_cli.tui.common.agent_screen import picture  # noqa: E402
from tests.helpers.tui import steady, visible  # noqa: E402
from tests.helpers.tui_shots import DOCUMENTED, fill_still  # noqa: E402

FOLDER = HERE / "screens"


async def draw(db: Path, name: str, size: tuple[int, int] = (120, 40)) -> str:
    """One screen as SVG, what changes from machine to machine (disk space) struck out."""
    make, keys, marker = DOCUMENTED[name]
    app = AgentApp(db, make)
    async with app.run_test(size=size) as pilot:
        for _ in range(3):
            await app.reader.call(lambda store: None)
            await pilot.pause(0.05)
        for key in keys:
            await pilot.press(key)
        end = time.monotonic() + 15
        while marker not in visible(app):
            if time.monotonic() > end:
                raise RuntimeError(f"{name} never showed {marker!r}:\n{visible(app)}")
            await pilot.pause(0.05)
        steady(app)
        for _ in range(3):
            await app.reader.call(lambda store: None)
            await pilot.pause(0.05)
        return still(picture(app, f"agentrl {name}"))


def still(svg: str) -> str:
    """Without what depends on the machine, and with ids of its own: rich makes them from the text."""
    svg = re.sub(r"[\d.,]+(&#160;| )(GiB|MiB)", r"n\1\2", svg)
    return re.sub(r"terminal-\d+", "terminal", svg)


def draw_all(folder: Path) -> None:
    """Every documented screen into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch) / "project" / "runs"
        runs.mkdir(parents=True)
        fill_still(runs / "agentrl.db")
        for name in DOCUMENTED:
            (folder / f"{name}.svg").write_text(asyncio.run(draw(runs / "agentrl.db", name)), "utf-8")


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    draw_all(FOLDER)
