"""Draws the screens that the documentation shows, from the very screens that the snapshot tests check.

    python docs/make_screens.py            writes docs/screens/*.svg, and docs/replay.png with rsvg-convert

Over an invented run whose clock stands, so the same code gives the same pictures; a test compares them.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
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
PLACES = ((330, 127), (690, 298), (920, 689), (1226, 127), (1336, 322), (1010, 761), (1394, 835))
"""Where the README's numbers 1 to 7 stand on the picture of replay: x and y in the SVG."""


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


def annotated(svg: str) -> str:
    """The picture with the README's numbers on it."""
    style = 'font-family="arial" font-size="20" font-weight="bold" text-anchor="middle"'
    marks = "".join(
        f'<circle cx="{x}" cy="{y}" r="15" fill="#e5484d" stroke="#fff" stroke-width="2"/>'
        f'<text x="{x}" y="{y + 7}" {style} fill="#fff">{number}</text>'
        for number, (x, y) in enumerate(PLACES, 1)
    )
    return svg.replace("</svg>", f"{marks}</svg>")


def draw_all(folder: Path) -> None:
    """Every documented screen into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch) / "project" / "runs"
        runs.mkdir(parents=True)
        fill_still(runs / "agentrl.db")
        for name in DOCUMENTED:
            (folder / f"{name}.svg").write_text(
                asyncio.run(draw(runs / "agentrl.db", name)), "utf-8"
            )


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    draw_all(FOLDER)
    if shutil.which("rsvg-convert"):
        drawn = annotated((FOLDER / "replay.svg").read_text("utf-8")).encode()
        subprocess.run(
            ["rsvg-convert", "-w", "1400", "-o", str(HERE / "replay.png")], input=drawn, check=True
        )
