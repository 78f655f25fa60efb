"""A window of fields with completion: what a line of settings asks for, without knowing its language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.suggester import SuggestFromList
from textual.widgets import Input, Static

from agentrl_cli.errors import AgentRLError


@dataclass(frozen=True, slots=True)
class Field:
    """One line of a form."""

    name: str
    value: str = ""
    hint: str = ""
    """Shown while it is empty."""
    choices: Sequence[str] = ()
    """Values to complete; the right arrow takes the one that is shown."""


class Form(ModalScreen[str | None]):
    """Gives the text that `text_of` makes of the fields' values; escape gives None.

    An AgentRLError of `check` is shown, and the fields can be corrected.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "cancel"),
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]

    def __init__(
        self,
        label: str,
        fields: Sequence[Field],
        text_of: Callable[[dict[str, str]], str],
        *,
        help: str = "",
        check: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__()
        self.label, self.fields, self.text_of, self.help, self.check = label, fields, text_of, help, check

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(
                Text(f"{self.label}   (enter: go, tab ↑ ↓: fields, →: complete, escape: never mind)", "#8a8a8a")
            )
            for field in self.fields:
                with Horizontal():
                    yield Static(Text(field.name), classes="label")
                    suggester = SuggestFromList(field.choices, case_sensitive=False) if field.choices else None
                    yield Input(
                        field.value, placeholder=field.hint, suggester=suggester, select_on_focus=False, name=field.name
                    )
            yield Static(Text(self.help, "#8a8a8a"), id="help")

    def on_mount(self) -> None:
        self.query_one("#help").display = bool(self.help)
        self.query(Input).first().focus()

    def on_input_submitted(self) -> None:
        text = self.text_of({str(item.name): item.value.strip() for item in self.query(Input)})
        try:
            if self.check is not None and text:
                self.check(text)
        except AgentRLError as error:
            problem = f"{error.message} {error.hint}".strip()
            self.query_one("#help", Static).update(Text(problem, "#ffb454").append(f"\n{self.help}", "#8a8a8a"))
            self.query_one("#help").display = True
            return
        self.dismiss(text)

    def action_cancel(self) -> None:
        self.dismiss(None)
