"""The one Textual application: it owns the reader, shows a first screen, and paints light where the terminal is light.

The light theme is the dark one with the lightness of every colour inverted. The terminal is asked for its background
(OSC 11) before the screens start, together with a question that every terminal answers, so that nothing waits for one
that does not know the first.
"""

from __future__ import annotations

import colorsys
import gc
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.filter import LineFilter
from textual.screen import Screen

from agentrl_cli.errors import nearest, writing
from agentrl_cli.registry import names, resolve
from agentrl_cli.tui.common.agent_screen import SCREENS, picture
from agentrl_cli.tui.common.keys import keys_of, read_settings, settings_path
from agentrl_cli.tui.common.layers import use_palette
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.token_text import CONTROL

WAIT = 0.3
"""Seconds for the terminal's answer."""
DARKEST = 0.06
"""Lightness of the dark theme's background, which becomes white."""
_END = re.compile(rb"\x1b\[\?[0-9;]*c")
_REPLY = re.compile(rb"\x1b\]11;rgb:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)")


class Light(LineFilter):
    """Paints every line in light colours."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments with the lightness of their colours inverted."""
        return [
            Segment(text, _light(style) if style else style, control)
            for text, style, control in segments
        ]


@lru_cache(maxsize=4096)
def _light(style: Style) -> Style:
    fore, back = style.color, style.bgcolor
    colors = Style.from_color(invert(fore) if fore else None, invert(back) if back else None)
    return style + colors


@lru_cache(maxsize=4096)
def invert(color: RichColor) -> RichColor:
    """Return a colour of the same hue, as dark as it was light; the terminal's own default stays."""
    if color.is_default:
        return color
    red, green, blue = (part / 255 for part in color.get_truecolor())
    hue, light, strength = colorsys.rgb_to_hls(red, green, blue)
    share = min(max((light - DARKEST) / (1 - DARKEST), 0.0), 1.0)
    new = colorsys.hls_to_rgb(hue, 1 - share, strength)
    return RichColor.from_rgb(*(round(part * 255) for part in new))


def is_light(theme: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to paint light: by the setting, else by COLORFGBG, else as the terminal answers; dark if unknown."""
    if theme in ("dark", "light"):
        return theme == "light"
    last = environ.get("COLORFGBG", "").rpartition(";")[2]
    if last.isdigit():
        return int(last) in (7, 15)
    return light_background(_ask())


def light_background(answer: bytes) -> bool:
    """Whether an answer to OSC 11 names a colour of more than half the luminance."""
    found = _REPLY.search(answer)
    if found is None:
        return False
    red, green, blue = (int(part, 16) / float(16 ** len(part) - 1) for part in found.groups())
    return bool(0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5)


def _ask() -> bytes:
    """Return the terminal's answers to OSC 11 and DA1; empty without a terminal, or if it does not answer in time."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        return b""
    try:
        import termios
        import tty
    except ImportError:  # not a Unix terminal
        return b""
    source, answer = sys.stdin.fileno(), b""
    before = termios.tcgetattr(source)
    try:
        tty.setcbreak(source)
        os.write(sys.stdout.fileno(), b"\x1b]11;?\x1b\\\x1b[c")
        while not _END.search(answer) and select.select([source], [], [], WAIT)[0]:
            part = os.read(source, 256)
            if not part:
                break
            answer += part
    except (OSError, termios.error):
        return b""
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
    return answer


class Harmless(LineFilter):
    """Removes control characters from every painted line: the text of a model or a tool must not steer the terminal."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments; those that hold a control character without it (it has no width)."""
        if not any(CONTROL.search(segment.text) for segment in segments):
            return segments
        return [Segment(CONTROL.sub("", text), style, control) for text, style, control in segments]


HARMLESS, LIGHT = Harmless(), Light()


class AgentApp(App[int]):
    """`first` builds the first screen from the reader; the reader's thread ends with the application."""

    CSS_PATH = Path(__file__).with_name("agentrl.tcss")
    TITLE = "agentrl"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "quit", "quit", show=False)]

    def __init__(self, db: Path, first: Callable[[Reader], Screen[Any]]) -> None:
        super().__init__()
        self.reader = Reader(db)
        self._first = first

    steady = False
    """Whether the process belongs to this application: then the garbage collector skips the objects of the start."""

    light = False
    """Whether the screens are painted in light colours."""

    def run(self, *args: Any, **more: Any) -> int | None:
        """Runs until the user leaves."""
        self.steady = True
        self.light = is_light(read_settings(settings_path())[0].theme)
        return super().run(*args, **more)

    def on_mount(self) -> None:
        if self.steady:
            # A hundred thousand objects of libraries, which are never garbage: a collection over them takes 0.1 s,
            # during which no key is answered.
            self.call_after_refresh(gc.freeze)
        settings, problem = read_settings(settings_path())
        use_palette(settings.palette)
        if settings.keys:
            self.set_keymap(dict(settings.keys))
            problem = problem or unknown_key(settings.keys)
        if problem:
            self.notify(problem, severity="warning", timeout=8, markup=False)
        self.push_screen(self._first(self.reader))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the screen's keys, and Textual's commands but its screenshot.

        `s` asks before a picture that may show a secret.
        """
        yield SystemCommand(
            "Light or dark", "Paint the screens in light or in dark colours", self.flip
        )
        for one in super().get_system_commands(screen):
            if one.title not in ("Screenshot", "Theme"):  # the screens have their own
                yield one
        for key in keys_of(screen):
            run = partial(self.run_action, key.action, screen)
            yield SystemCommand(f"{key.description}   {key.key}   {key.id}", "", run)

    def flip(self) -> None:
        """Takes the other theme."""
        self.light = not self.light
        self.refresh(layout=True)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return the filters of every line of every widget."""
        return [*super().get_line_filters(), HARMLESS, *([LIGHT] if self.light else [])]

    def on_unmount(self) -> None:
        self.reader.close()


def unknown_key(keys: Mapping[str, str]) -> str:
    """Return the first id of a keymap that no screen has, with the nearest one, as a message; empty
    if all are known.
    """
    classes = (resolve("screens", SCREENS, name) for name in names("screens", SCREENS))
    ids = [str(key.id) for screen in classes for key in screen.BINDINGS if isinstance(key, Binding)]
    wrong = next((name for name in keys if name not in ids), "")
    near = nearest(wrong, ids) if wrong else []
    hint = f"; did you mean {near[0]}?" if near else "; ctrl+p shows them"
    return f"{settings_path()}: no key has the id {wrong!r}{hint}" if wrong else ""


def save_svg(app: AgentApp, path: Path, title: str, size: tuple[int, int] = (120, 40)) -> None:
    """Runs the application without a terminal until its first screen has painted, and writes that as SVG.

    Raises StoreError if the file cannot be written.
    """
    import asyncio

    async def draw_picture() -> str:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await app.reader.call(lambda store: None)  # by then the screen has its answers
            await app.workers.wait_for_complete()
            await pilot.pause()
            return picture(app, title)

    with writing(str(path), hint="Name another file with --svg."):
        path.write_text(asyncio.run(draw_picture()), "utf-8")


def watch(db: Path, run: str, *, follow: bool = False) -> None:
    """Shows the watch screen of a run until the user leaves, as `train --watch` does; `follow`: see WatchScreen."""
    from agentrl_cli.tui.watch.screen import WatchScreen

    AgentApp(db, lambda reader: WatchScreen(reader, run, follow=follow)).run()


def start(db: Path, run: str | None = None) -> None:
    """Shows the runs of a store, as `agentrl` without a command does; with `run`, its watch screen."""
    from agentrl_cli.tui.runs.screen import RunsScreen

    if run is not None:
        watch(db, run)
    else:
        AgentApp(db, RunsScreen).run()
