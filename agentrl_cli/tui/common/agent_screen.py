"""The base of every screen over a store: opening other screens, help, going back, pictures, errors of workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.text import Text
from textual.app import App
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Static
from textual.worker import Worker, WorkerState

from agentrl_cli.errors import AgentRLError
from agentrl_cli.registry import resolve
from agentrl_cli.tui.common.dialogs import Confirm, Dialog, Help, Prompt
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.reader import Reader

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
    _at = -1
    """The line of the last match."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader

    on_worker_state_changed = report_failure

    async def has_changed(self) -> bool:
        """Return whether the store changed since it was last asked."""
        before = self._version
        self._version = await self.reader.call(lambda store: store.data_version())
        return self._version != before

    def put(self, name: str, text: Text | str) -> None:
        """Replaces the text of a widget."""
        self.query_one(f"#{name}", Static).update(text)

    def put_head(self, text: str) -> None:
        """Replaces the first line."""
        self.put("head", Text(text, "bold", no_wrap=True))

    def open_screen(self, name: str, *args: Any, **options: Any) -> None:
        """Opens another screen over this one, by its name in SCREENS, with the same reader."""
        self.app.push_screen(resolve("screens", SCREENS, name)(self.reader, *args, **options))

    def ask(self, dialog: Dialog[Any], use: Callable[[Any], object]) -> None:
        """Opens a window and calls `use` with its answer, unless it was cancelled."""

        def use_answer(answer: Any) -> None:
            if answer is not None:
                use(answer)

        self.app.push_screen(dialog, use_answer)

    def confirm(self, question: str, detail: str, act: Callable[[], object]) -> None:
        """Calls `act` after a yes."""
        self.ask(Confirm(question, detail), lambda yes: yes and act())

    def action_help(self) -> None:
        """Shows the keys."""
        self.app.push_screen(Help(self.HELP_TITLE, self.HELP_TEXT))

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
        """Asks for a text and goes to its first line."""

        def find(text: str) -> None:
            if text:
                self.needle, self._at = text, -1
                self.action_find_again()

        self.ask(Prompt("find on this page", self.needle), find)

    def action_find_again(self) -> None:
        """Goes to the next line that holds the text, after the last one to the first."""
        page = next((page for page in self.query(Lines) if page.region.height), None)
        if not self.needle or page is None:
            self.notify("/ finds text first", timeout=2)
            return
        low = self.needle.lower()
        hits = [n for n, line in enumerate(page.lines) if low in line.plain.lower()]
        if not hits:
            self.notify(f"{self.needle}: nothing found", timeout=2, markup=False)
            return
        self._at = next((n for n in hits if n > self._at), hits[0])
        page.mark(self._at)
        text = f"{self.needle}: {hits.index(self._at) + 1} of {len(hits)}, . for the next"
        self.notify(text, timeout=2, markup=False)

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


def picture(app: App[Any], title: str) -> str:
    """Return the screen as a self-contained SVG: without the web fonts that rich links to.

    `xml:space` keeps leading blanks in every renderer.
    """
    svg = app.export_screenshot(title=title).replace("<svg ", '<svg xml:space="preserve" ', 1)
    return re.sub(r"@font-face \{.*?\}\s*|<!-- Generated .*? -->\s*", "", svg, flags=re.DOTALL)
