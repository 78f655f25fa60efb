"""The widgets of a chat: its turns and notes in order, and the exact ids beside them."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

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
