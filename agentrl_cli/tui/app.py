"""The one Textual application: it owns the reader and shows a first screen."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.segment import Segment
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.filter import LineFilter
from textual.screen import Screen

from agentrl_cli.errors import nearest
from agentrl_cli.registry import names, resolve
from agentrl_cli.tui.common.agent_screen import SCREENS, picture
from agentrl_cli.tui.common.keys import KeyCommands
from agentrl_cli.tui.common.layers import use_palette
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.settings import read_settings, settings_path
from agentrl_cli.tui.common.theme import Light, is_light
from agentrl_cli.tui.common.token_text import CONTROL


class Harmless(LineFilter):
    """Removes control characters from every painted line: the text of a model or a tool must not steer the terminal."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments; those that hold a control character without it (it has no width)."""
        if not any(CONTROL.search(segment.text) for segment in segments):
            return segments
        return [Segment(CONTROL.sub("", text), style, control) for text, style, control in segments]


HARMLESS, LIGHT = Harmless(), Light()
TEXTUAL = ("Screenshot", "Theme")
"""Its commands that are not offered: the screens have their own."""


class AgentApp(App[int]):
    """`first` builds the first screen from the reader; the reader's thread ends with the application."""

    CSS_PATH = Path(__file__).with_name("agentrl.tcss")
    TITLE = "agentrl"
    COMMANDS = App.COMMANDS | {KeyCommands}
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
        """Return Textual's commands but its screenshot: `s` asks before a picture that may show a secret."""
        flip = "Light or dark", "Paint the screens in light or in dark colours", self.flip
        commands = super().get_system_commands(screen)
        return SystemCommand(*flip), *(one for one in commands if one.title not in TEXTUAL)

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

    Raises OSError if the file cannot be written.
    """
    import asyncio

    async def draw_picture() -> str:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await app.reader.call(lambda store: None)  # by then the screen has its answers
            await app.workers.wait_for_complete()
            await pilot.pause()
            return picture(app, title)

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
