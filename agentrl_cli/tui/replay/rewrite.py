"""A window that asks for settings and for a text of many lines, as editing a turn does."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Input, Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.chat.line_input import ChatLine
from agentrl_cli.tui.common.dialogs import Dialog


class Rewrite(Dialog[tuple[str, str] | None]):
    """One line of settings and a text of many lines, which wraps and scrolls; gives both. Escape gives None.

    Enter goes from either, tab is the way between them, ctrl+j a new line in the text.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(
        self, label: str, settings: str, text: str, help: str, check: Callable[[str], object]
    ) -> None:
        """`check` raises AgentRLError for wrong settings, which is shown, and they can be corrected."""
        super().__init__()
        self.label, self.settings, self.text, self.help, self.check = (
            label,
            settings,
            text,
            help,
            check,
        )

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog prompt"):
            yield Static(Text(f"{self.label}   (enter: go, escape: never mind)", "#8a8a8a"))
            yield Input(self.settings, id="line", select_on_focus=False)
            yield Static(Text(self.help, "#8a8a8a"), id="help")
            yield Static(Text("its text   (tab: between the two, ctrl+j: new line)", "#8a8a8a"))
            yield ChatLine(id="text")

    def on_mount(self) -> None:
        line = self.query_one(ChatLine)
        line.load_text(self.text)
        line.focus()

    def on_chat_line_completion(self) -> None:
        self.query_one(Input).focus()

    def on_input_submitted(self) -> None:
        self._go()

    def on_chat_line_submitted(self) -> None:
        self._go()

    def _go(self) -> None:
        settings = self.query_one(Input).value.strip()
        try:
            self.check(settings)
        except AgentRLError as error:
            problem = f"{error.message} {error.hint}".strip()
            self.query_one("#help", Static).update(
                Text(problem, "#ffb454").append(f"\n{self.help}", "#8a8a8a")
            )
            self.query_one(Input).focus()
            return
        self.dismiss((settings, self.query_one(ChatLine).text))

    def action_cancel(self) -> None:
        self.dismiss(None)
