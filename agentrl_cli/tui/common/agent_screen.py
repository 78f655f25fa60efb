"""The bases of the screens over a store: opening other screens, help, going back, pictures, errors of workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.dom import DOMNode
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import Static
from textual.worker import Worker, WorkerState

from agentrl_cli.errors import AgentRLError
from agentrl_cli.registry import resolve
from agentrl_cli.reports.legend import LEGEND, legend_lines
from agentrl_cli.reports.spans import Waterfall, waterfall_lines
from agentrl_cli.store import Store
from agentrl_cli.tui.common.dialogs import Choose, Dialog, Help, Prompt
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import FAINT, HERE, TITLE

SCREENS: dict[str, str] = {
    "chat": "agentrl_cli.tui.chat.screen:ChatScreen",
    "compare": "agentrl_cli.tui.compare.screen:CompareScreen",
    "episodes": "agentrl_cli.tui.runs.screen:EpisodesScreen",
    "replay": "agentrl_cli.tui.replay.screen:ReplayScreen",
    "reading": "agentrl_cli.tui.replay.reading:ReadingScreen",
    "runs": "agentrl_cli.tui.runs.screen:RunsScreen",
    "versus": "agentrl_cli.tui.compare.screen:VersusScreen",
    "watch": "agentrl_cli.tui.watch.screen:WatchScreen",
    "whatif": "agentrl_cli.tui.whatif.screen:WhatIfScreen",
}
"""Name to the module and class of a screen, each imported when it is first opened, so that each can open any other."""
WORDS_WIDTH = 62
"""Columns of the window that explains words: it fits 80."""
SECRET = (
    "This holds what looks like a secret. Write the picture?",
    "A picture masks nothing; JSON lines and HTML pages do.",
)
"""The question before a picture that may show a secret."""


def report_failure(node: DOMNode, event: Worker.StateChanged) -> None:
    """Shows an AgentRLError of a worker as a notification; raises anything else."""
    error = event.worker.error
    if event.state is not WorkerState.ERROR or error is None:
        return
    if not isinstance(error, AgentRLError):
        raise error
    node.app.notify(f"{error.message}\n{error.hint}".strip(), severity="error", markup=False)


class AgentScreen(Screen[None]):
    """A screen over the store.

    Its workers may fail as the store may: locked, missing, an episode deleted meanwhile. Such an error is shown and the
    screen stays; a bug still ends the application with its traceback.
    """

    HELP_TITLE = ""
    HELP_TEXT = ""
    problem = ""
    """Why the store could not be read at the last look."""
    needle = ""
    """The text that was looked for last."""
    _version: int | None = None
    _reading = False
    _at = -1
    """The line of the last match."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader

    on_worker_state_changed = report_failure

    def take_actions(self, **actions: Callable[..., object]) -> None:
        """Makes methods of other objects actions of this screen, by the names that its keys have for them."""
        for name, action in actions.items():
            setattr(self, f"action_{name}", action)

    @work(group="poll", exit_on_error=False)
    async def poll(self) -> None:
        """Reads the store if it has changed, unless the screen waits or still reads, and paints.

        An error is shown in place, not as a notification every time; the next look may find the store again.
        """
        if self.waits or self._reading:
            return
        self._reading = True
        try:
            version = await self.reader.call(lambda store: store.data_version())
            if version != self._version:
                await self.read_store()
            self.problem, self._version = "", version
        except AgentRLError as error:
            self.problem, self._version = f"{error.message} {error.hint}".strip(), None
        finally:
            self._reading = False
        self.paint()

    @property
    def waits(self) -> bool:
        """Whether `poll` does nothing now."""
        return not self.is_current

    async def read_store(self) -> None:
        """Reads everything that the screen shows, for `poll`."""

    def paint(self) -> None:
        """Paints everything for the size and the choice as they are now."""

    def on_resize(self, event: Resize) -> None:
        """Paints for the new size, when the widgets have theirs; a subclass's own handler runs before."""
        self.call_after_refresh(self.paint)

    def put(self, name: str, text: Text | str) -> None:
        """Replaces the text of a widget."""
        self.query_one(f"#{name}", Static).update(text)

    def put_head(self, text: str) -> None:
        """Replaces the first line."""
        self.put("head", Text(text, "bold", no_wrap=True))

    def open_screen(self, name: str, *args: Any, **options: Any) -> None:
        """Opens another screen over this one, by its name in SCREENS, with the same reader."""
        self.app.push_screen(resolve("screens", SCREENS, name)(self.reader, *args, **options))

    def ask(self, dialog: Dialog, use: Callable[[Any], object]) -> None:
        """Opens a window and calls `use` with its answer, unless it was cancelled."""

        def use_answer(answer: Any) -> None:
            if answer is not None:
                use(answer)

        self.app.push_screen(dialog, use_answer)

    def confirm(self, question: str, detail: str, act: Callable[[], object]) -> None:
        """Calls `act` after a yes."""
        how = Text("y yes   any other key: no", FAINT)
        lines = [Text(question, HERE), *[Text(detail)] * bool(detail), how]
        self.ask(Choose(lines, {"y": act}), lambda chosen: chosen())

    def choose(self, title: str, actions: Mapping[str, Callable[[], object]]) -> None:
        """Calls one of up to nine named actions, chosen by its number."""
        rows = [Text(f" {n}  {name}", no_wrap=True) for n, name in enumerate(actions, 1)]
        how = Text("number chooses   any other key: nothing", FAINT)
        keys = map(str, range(1, len(actions) + 1))
        window = Choose(
            [Text(title, TITLE), *rows, how], dict(zip(keys, actions.values(), strict=True))
        )
        self.ask(window, lambda chosen: chosen())

    def action_help(self) -> None:
        """Shows the keys."""
        self.app.push_screen(Help(self.HELP_TITLE, self.HELP_TEXT))

    def action_words(self) -> None:
        """Explains the words of the screens."""
        self.app.push_screen(Help("words", "\n".join(legend_lines(LEGEND, WORDS_WIDTH)), what=""))

    @work(group="time", exit_on_error=False)
    async def show_time(self, read: Callable[[Store], Waterfall]) -> None:
        """Shows where the time of an episode or a step goes."""
        lines = waterfall_lines(
            await self.reader.call(read), max(self.size.width * 9 // 10 - 10, 40)
        )
        self.app.push_screen(Help("where the time goes", "\n".join(lines), what=""))

    def action_back(self) -> None:
        """Returns to the screen below; from the first screen, leaves the application."""
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()
        else:
            self.app.exit(0)

    def action_leave(self) -> None:
        """Returns to the screen below; on the first screen it shows how to quit, so that escape never ends anything."""
        if len(self.app.screen_stack) > 2:
            self.action_back()
        else:
            self.notify("q quits", timeout=2)

    def action_find_text(self) -> None:
        """Asks for a text and goes to its first place."""

        def find(text: str) -> None:
            if text:
                self.needle, self._at = text, -1
                self.action_find_again()

        self.ask(Prompt("find on this page", self.needle), find)

    def action_find_again(self) -> None:
        """Goes to the next place of the text, after the last one to the first."""
        found = self.find_next(self.needle) or "nothing found"
        text = f"{self.needle}: {found}" if self.needle else "/ finds text first"
        self.notify(text, timeout=2, markup=False)

    def find_next(self, needle: str) -> str:
        """Go to the next line that holds a text. Returns how many there are, in words; empty if there is none."""
        for page in (page for page in self.query(Lines) if page.region.height):
            low = needle.lower()
            if hits := [n for n, line in enumerate(page.lines) if low in line.plain.lower()]:
                self._at = next((n for n in hits if n > self._at), hits[0])
                page.mark(self._at)
                return f"{hits.index(self._at) + 1} of {len(hits)}, . for the next"
        return ""

    def write_file(self, path: Path, text: str) -> None:
        """Writes a file and shows where it is, or the error."""
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.notify(f"wrote {path.absolute()}", markup=False)

    def save_picture(self, path: Path, title: str, *, secret: bool) -> None:
        """Writes the screen as SVG; `secret`: asks first, because a picture masks nothing."""

        def draw() -> None:
            self.app.clear_notifications()  # the picture is of the screen, not of the last notification
            self.call_after_refresh(lambda: self.write_file(path, picture(self.app, title)))

        if secret:
            self.confirm(*SECRET, draw)
        else:
            draw()


class LinesScreen(AgentScreen):
    """A screen of one page of lines between its title and its keys; a subclass paints it."""

    KEYS = ""

    def compose(self) -> ComposeResult:
        yield from (Static(id="head"), Lines(id="long"))
        yield Static(Text(self.KEYS, no_wrap=True), id="keys")

    @property
    def page(self) -> Lines:
        return self.query_one(Lines)

    def action_scroll_by(self, step: int) -> None:
        self.page.scroll_relative(y=step, animate=False)


def picture(app: App[Any], title: str) -> str:
    """Return the screen as a self-contained SVG: without the web fonts that rich links to.

    `xml:space` keeps leading blanks in every renderer.
    """
    svg = app.export_screenshot(title=title).replace("<svg ", '<svg xml:space="preserve" ', 1)
    return re.sub(r"@font-face \{.*?\}\s*|<!-- Generated .*? -->\s*", "", svg, flags=re.DOTALL)
