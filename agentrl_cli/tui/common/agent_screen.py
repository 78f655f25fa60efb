"""The base of every screen over a store: opening other screens, help, going back, pictures, errors of workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from textual.app import App
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Static
from textual.worker import Worker, WorkerState

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.common.dialogs import Confirm, Help, Prompt
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.router import screen


class AgentScreen(Screen[None]):
    """A screen over the store.

    Its workers may fail as the store may: locked, missing, an episode deleted meanwhile. Such an error is shown and the
    screen stays; a bug still ends the application with its traceback.
    """

    HELP_TITLE = ""
    HELP_TEXT = ""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader

    def open_screen(self, name: str, *args: Any, **options: Any) -> None:
        """Opens another screen over this one, by its name in `router.SCREENS`, with the same reader."""
        self.app.push_screen(screen(name, self.reader, *args, **options))

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Shows a store's error."""
        report_failure(self, event)

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

    needle = ""
    """The text that was looked for last."""
    _at = -1
    """The line of the last match."""

    def action_find_text(self) -> None:
        """Asks for a text and goes to its first line."""

        def find(text: str | None) -> None:
            if text:
                self.needle, self._at = text, -1
                self.action_find_again()

        self.app.push_screen(Prompt("find on this page", self.needle), find)

    def action_find_again(self) -> None:
        """Goes to the next line that holds the text, after the last one to the first."""
        found = next((page for page in self.query(Lines) if page.region.height), None)
        page = self.query("#page")
        if not self.needle or (found is None and not page):
            self.notify("/ finds text first", timeout=2)
            return
        lines = (
            [line.plain for line in found.lines]
            if found
            else str(page.first(Static).content).splitlines()
        )
        hits = [n for n, line in enumerate(lines) if self.needle.lower() in line.lower()]
        if not hits:
            self.notify(f"{self.needle}: nothing found", timeout=2, markup=False)
            return
        self._at = next((n for n in hits if n > self._at), hits[0])
        if found is not None:
            found.mark(self._at)
        else:
            self.query_one("#long").scroll_to(y=self._at, animate=False)
        text = f"{self.needle}: {hits.index(self._at) + 1} of {len(hits)}, . for the next"
        self.notify(text, timeout=2, markup=False)

    def write_file(self, path: Path, text: str) -> None:
        """Writes a file and shows where it is, or what went wrong."""
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.notify(f"wrote {path.absolute()}", markup=False)

    def save_picture(self, path: Path, title: str, *, secret: bool) -> None:
        """Writes the screen as SVG; `secret`: asks first, because a picture masks nothing."""

        def write() -> None:
            self.write_file(path, picture(self.app, title))

        def draw(yes: bool | None) -> None:
            if yes:
                self.app.clear_notifications()  # the picture is of the screen, not of the last notification
                self.call_after_refresh(write)

        if secret:
            self.app.push_screen(Confirm(*SECRET), draw)
        else:
            draw(True)


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


def picture(app: App[Any], title: str) -> str:
    """Return the screen as a self-contained SVG: without the web fonts that rich links to.

    `xml:space` keeps leading blanks in every renderer.
    """
    svg = app.export_screenshot(title=title).replace("<svg ", '<svg xml:space="preserve" ', 1)
    return re.sub(r"@font-face \{.*?\}\s*|<!-- Generated .*? -->\s*", "", svg, flags=re.DOTALL)
