"""A window that asks for settings and for a text of many lines, as editing a turn does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text
from textual.widget import Widget
from textual.widgets import Input, Static

from agentrl_cli.tui.chat.line_input import ChatLine
from agentrl_cli.tui.common.dialogs import Prompt
from agentrl_cli.tui.common.text import FAINT


class Rewrite(Prompt):
    """One line of settings and a text of many lines, which wraps and scrolls; gives both.

    Enter goes from either, tab is the way between them, ctrl+j a new line in the text.
    """

    AUTO_FOCUS = "ChatLine"
    CHECKS_EMPTY = True

    def __init__(
        self, label: str, settings: str, text: str, help: str, check: Callable[[str], object]
    ) -> None:
        super().__init__(label, settings, help=help, check=check)
        self.edited = text

    def more(self) -> Sequence[Widget]:
        how = Text("its text   (tab: between the two, ctrl+j: new line)", FAINT)
        return Static(how), ChatLine(self.edited, id="text")

    def on_chat_line_completion(self) -> None:
        self.query_one(Input).focus()

    def on_chat_line_submitted(self) -> None:
        self.on_input_submitted()

    def result(self, text: str) -> object:
        return text, self.query_one(ChatLine).text
