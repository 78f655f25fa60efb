"""The line that a person writes in: several lines by ctrl+j, history by ↑ ↓ at its edges, completion by tab."""

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
    """What was typed into earlier chats, oldest first; a file that is not there or not ours is no history."""
    try:
        rows = [json.loads(row) for row in path.read_text("utf-8").splitlines()[-KEPT:]]
    except (OSError, ValueError):
        return []
    return [row for row in rows if isinstance(row, str)]


def add_history(path: Path, line: str) -> None:
    """One more line, for its owner's eyes; where nothing can be written the history lasts for this chat alone."""
    try:
        with open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(json.dumps(line) + "\n")
    except OSError:
        return


class ChatLine(TextArea):
    """Enter sends; the screen says what history and completion are."""

    class Submitted(Message):
        """Enter was pressed on this text."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class History(Message):
        """Further back (−1) or forth (+1), at the first or last line."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    class Completion(Message):
        """Tab was pressed."""

    async def _on_key(self, event: events.Key) -> None:
        row = self.cursor_location[0]
        if event.key == "enter":
            self._take(event, self.Submitted(self.text))
        elif event.key in ("ctrl+j", "shift+enter", "alt+enter"):
            event.stop()
            event.prevent_default()
            self.insert("\n")
        elif event.key == "tab":
            self._take(event, self.Completion())
        elif event.key == "up" and row == 0:
            self._take(event, self.History(-1))
        elif event.key == "down" and row == self.document.line_count - 1:
            self._take(event, self.History(1))
        else:
            await super()._on_key(event)

    def _take(self, event: events.Key, message: Message) -> None:
        event.stop()
        event.prevent_default()
        self.post_message(message)

    def put(self, text: str) -> None:
        """Replaces the text, the cursor at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)
