"""What the screen tests share: the visible text, and waiting for what a worker brings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.pilot import Pilot


def visible(app: App[Any]) -> str:
    """The text on the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def steady(app: App[Any]) -> None:
    """Stops blinking cursors: a picture must not depend on the time."""
    for widget in app.screen.query("Input, TextArea"):
        widget.cursor_blink = False  # type: ignore[attr-defined]


async def until(pilot: Pilot[Any], check: Callable[[], bool]) -> None:
    """Let the application run until `check` holds; where the suite's limit ends the wait, print the screen."""
    try:
        while not check():
            await asyncio.sleep(0.005)
    except BaseException:
        print(visible(pilot.app))
        raise
    await pilot.pause()


async def until_text(pilot: Pilot[Any], text: str) -> str:
    """Waits until the screen shows `text`, and returns the whole screen."""
    await until(pilot, lambda: text in visible(pilot.app))
    return visible(pilot.app)
