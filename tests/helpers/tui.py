"""What the screen tests share: the visible text, and waiting for what a worker brings."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from textual._compositor import Compositor
from textual._context import visible_screen_stack
from textual.app import App
from textual.pilot import Pilot
from textual.strip import Strip

T = TypeVar("T")
WIDE, SMALL = (120, 40), (80, 24)


def rendered(app: App[Any]) -> list[Strip]:
    """Return the lines on the screen, with their colours."""
    visible_screen_stack.set(app._background_screens)  # what a dialog lets through
    return app.screen._compositor.render_strips()


def visible(app: App[Any]) -> str:
    return text_of(rendered(app))


def text_of(strips: list[Strip]) -> str:
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def steady(app: App[Any]) -> None:
    """Stops blinking cursors: a picture must not depend on the time."""
    for widget in app.screen.query("Input, TextArea"):
        widget.cursor_blink = False  # type: ignore[attr-defined]


def screen_of(pilot: Pilot[Any], kind: type[T]) -> T:
    assert isinstance(pilot.app.screen, kind)
    return pilot.app.screen


async def until(pilot: Pilot[Any], check: Callable[[], bool]) -> None:
    """Let the application run until `check` holds; where the suite's limit ends the wait, print the screen."""
    try:
        while not check():
            await asyncio.sleep(0.02)
    except BaseException:
        print(visible(pilot.app))
        raise
    await pilot.pause()


# What was notified since the last wait: a notice of two seconds comes and goes unseen on a busy
# machine.
NOTICES: WeakKeyDictionary[App[Any], list[str]] = WeakKeyDictionary()
_notify = App.notify


def _note(app: App[Any], message: str, **options: Any) -> None:
    NOTICES.setdefault(app, []).append(message)
    _notify(app, message, **options)


App.notify = _note  # type: ignore[method-assign,assignment]  # else a test waits for ever for one that it missed


_paint = Compositor.render_update
# Those that have painted since `until_text` last looked.
_painted: WeakSet[Compositor] = WeakSet()


def _paint_pictures(compositor: Compositor, full: bool = False, **options: Any) -> Any:
    compositor._dirty_regions.clear()
    _painted.add(compositor)
    return _paint(compositor, full, **options) if full else None


Compositor.render_update = _paint_pictures  # type: ignore[method-assign,assignment]
# Half of the cost: without a terminal an application throws its frames away; `visible` renders what a test looks at.


async def until_text(pilot: Pilot[Any], text: str) -> str:
    """Wait until the screen shows `text`, or has shown it as a notice, and return the whole screen."""
    app, notices = pilot.app, NOTICES.setdefault(pilot.app, [])
    looks, shown = itertools.count(), ""
    seen: object = None

    def look(*, again: bool = False) -> str:
        nonlocal seen, shown
        now = app.screen._compositor
        if again or now is not seen or now in _painted:
            _painted.discard(now)
            seen, shown = now, visible(app)
        return shown

    def shows() -> bool:
        return text in look(again=next(looks) % 25 == 0)

    await until(pilot, lambda: any(text in one for one in notices) or shows())
    notices.clear()
    return look()


async def press(pilot: Pilot[Any], *keys: str, then: str | Callable[[], bool]) -> str:
    """Press keys and wait until the screen shows a text, and return all of it; or until something holds."""
    await pilot.press(*keys)
    if isinstance(then, str):
        return await until_text(pilot, then)
    await until(pilot, then)
    return ""


async def walk(pilot: Pilot[Any], *steps: Sequence[str | tuple[str, ...]]) -> str:
    """Take steps, each of them keys and the text that they bring, and return the last screen.

    A tuple is a text and others that are not on the screen then.
    """
    shown = ""
    for *keys, wanted in steps:
        text, *absent = (wanted,) if isinstance(wanted, str) else wanted
        shown = await press(pilot, *map(str, keys), then=text)
        assert [one for one in absent if one in shown] == []
    return shown


@asynccontextmanager
async def showing(app: App[Any], text: str, **options: Any) -> AsyncIterator[Pilot[Any]]:
    """Run an application for a block, which begins once it shows `text`."""
    async with app.run_test(**options) as pilot:
        await until_text(pilot, text)
        yield pilot
