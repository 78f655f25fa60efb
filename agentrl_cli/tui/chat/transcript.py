"""The widgets of a chat: its turns and notes in order, the exact ids beside them, and the line to type into."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import Static, TextArea

from agentrl_cli.tui.chat.view import context_lines, event_lines
from agentrl_cli.tui.common.text import join
from agentrl_cli.tui.common.token_text import TokenTexts

Event = dict[str, Any]


class Paged(VerticalScroll, can_focus=False):
    """A column that is scrolled by pages."""

    def page(self, sign: int) -> None:
        """Scrolls by a page."""
        self.scroll_relative(y=sign * max(self.size.height - 2, 1), animate=False)


class ChatTranscript(Paged):
    """One widget per event, and one for the text that is being generated."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.decoder = TokenTexts()
        self.mode = ""
        """Empty for text, else `tokens`, `mask` or `logprobs`."""
        self._events: list[tuple[Event, Static]] = []
        self._stream = ""

    def compose(self) -> ComposeResult:
        yield Static(id="stream")

    @property
    def turns(self) -> list[Event]:
        """The turns, oldest first."""
        return [event for event, _ in self._events if event["ev"] == "turn"]

    def add(self, event: Event) -> None:
        """Appends an event, if it shows anything."""
        lines = self._lines(event)
        if lines:
            widget = Static(join(lines), classes=f"event {event['ev']}")
            self._events.append((event, widget))
            self.mount(widget, before=self.query_one("#stream"))
            self.to_end()

    def add_token(self, text: str) -> None:
        """Appends to the text that is being generated."""
        self._stream += text
        self.query_one("#stream", Static).update(Text(self._stream, "italic #c8c8c8"))
        self.to_end()

    def clear_stream(self) -> None:
        """Removes the text that was being generated."""
        self._stream = ""
        self.query_one("#stream", Static).update("")

    def drop(self, keep: int) -> None:
        """Removes the turns from `keep` on, with the notes after them."""
        events = list(enumerate(event for event, _ in self._events))
        taken = (n for n, event in events if event["ev"] == "turn" and event["index"] >= keep)
        first = next(taken, len(events))
        for _, widget in self._events[first:]:
            widget.remove()
        del self._events[first:]

    def redraw(self) -> None:
        """Draws every event for the mode and the width as they are now."""
        for event, widget in self._events:
            widget.update(join(self._lines(event)))
        self.to_end()

    def to_end(self) -> None:
        """Scrolls to the end."""
        self.scroll_end(animate=False)
        self.call_after_refresh(
            self.scroll_end, animate=False
        )  # what was mounted just now has its height only then

    def _lines(self, event: Event) -> list[Text]:
        width = self.screen.size.width
        width = width * 3 // 5 if self.screen.has_class("-side") else width
        return event_lines(event, self.decoder, self.mode, max(width - 4, 20))


class ContextPane(Paged):
    """The exact ids that were sent and sampled, and the template that renders them."""

    def compose(self) -> ComposeResult:
        yield Static(id="exact")

    def show(self, turns: list[Event], decoder: TokenTexts, template: str) -> None:
        """Replaces the shown texts."""
        self.query_one("#exact", Static).update(join(context_lines(turns, decoder, template)))


KEPT = 500
"""Lines of history that a later chat starts with."""


def read_history(path: Path) -> list[str]:
    """Return the lines typed into earlier chats, oldest first; empty if the file is missing or unreadable."""
    try:
        rows = [json.loads(row) for row in path.read_text("utf-8").splitlines()[-KEPT:]]
    except (OSError, ValueError):
        return []
    return [row for row in rows if isinstance(row, str)]


class History:
    """The lines that were typed, and which of them is shown; kept in a file that only its owner can read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = read_history(path)
        self._at = len(self.lines)

    def add(self, line: str) -> None:
        """Appends a line; if the file cannot be written, the history lasts for this chat alone."""
        self.lines.append(line)
        self._at = len(self.lines)
        private = partial(os.open, mode=0o600)
        with suppress(OSError), open(self.path, "a", encoding="utf-8", opener=private) as file:
            file.write(json.dumps(line) + "\n")

    def step(self, step: int) -> str:
        """Return the line further back (−1) or forth (+1); empty after the last one."""
        self._at = max(0, min(self._at + step, len(self.lines)))
        return self.lines[self._at] if self._at < len(self.lines) else ""


class ChatLine(TextArea):
    """Enter posts `Submitted`, tab posts `Completion`; ↑ and ↓ at the edges go through `typed`, if it is set."""

    typed: History | None = None
    """The lines that were typed before (`history` is the edits that can be undone)."""

    @dataclass
    class Submitted(Message):
        """Enter was pressed on this text."""

        text: str

    class Completion(Message):
        """Tab was pressed."""

    async def _on_key(self, event: events.Key) -> None:
        row = self.cursor_location[0]
        actions: dict[str, Callable[[], object]] = {
            "enter": lambda: self.post_message(self.Submitted(self.text)),
            **dict.fromkeys(("ctrl+j", "shift+enter", "alt+enter"), lambda: self.insert("\n")),
            "tab": lambda: self.post_message(self.Completion()),
        }
        if row == 0:
            actions["up"] = lambda: self._recall(-1)
        if row == self.document.line_count - 1:
            actions["down"] = lambda: self._recall(1)
        if event.key in actions:
            event.stop()
            event.prevent_default()
            actions[event.key]()
        else:
            await super()._on_key(event)

    def _recall(self, step: int) -> None:
        if self.typed is not None and self.typed.lines:
            self.put(self.typed.step(step))

    def put(self, text: str) -> None:
        """Replaces the text, the cursor at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)
