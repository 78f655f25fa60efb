"""The input line of a chat: several lines by ctrl+j, history by ↑ ↓ at its edges, completion by tab."""

from __future__ import annotations

import json
import os
from pathlib import Path

from textual import events
from textual.message import Message
from textual.widgets import TextArea

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
        try:
            with open(
                self.path,
                "a",
                encoding="utf-8",
                opener=lambda name, flags: os.open(name, flags, 0o600),
            ) as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            return

    def step(self, step: int) -> str:
        """Return the line further back (−1) or forth (+1); empty after the last one."""
        self._at = max(0, min(self._at + step, len(self.lines)))
        return self.lines[self._at] if self._at < len(self.lines) else ""


class ChatLine(TextArea):
    """Enter posts `Submitted`, tab posts `Completion`; ↑ and ↓ at the edges go through `typed`, if it is set."""

    typed: History | None = None
    """The lines that were typed before (`history` is the edits that can be undone)."""

    class Submitted(Message):
        """Enter was pressed on this text."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Completion(Message):
        """Tab was pressed."""

    async def _on_key(self, event: events.Key) -> None:
        row = self.cursor_location[0]
        if event.key == "enter":
            self._take(event)
            self.post_message(self.Submitted(self.text))
        elif event.key in ("ctrl+j", "shift+enter", "alt+enter"):
            self._take(event)
            self.insert("\n")
        elif event.key == "tab":
            self._take(event)
            self.post_message(self.Completion())
        elif event.key == "up" and row == 0:
            self._take(event)
            self._recall(-1)
        elif event.key == "down" and row == self.document.line_count - 1:
            self._take(event)
            self._recall(1)
        else:
            await super()._on_key(event)

    def _take(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()

    def _recall(self, step: int) -> None:
        if self.typed is not None and self.typed.lines:
            self.put(self.typed.step(step))

    def put(self, text: str) -> None:
        """Replaces the text, the cursor at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)
