"""A window of fields with completion: what a line of settings asks for, without knowing its language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.suggester import SuggestFromList
from textual.widgets import Input, Static

from agentrl_cli.tui.common.dialogs import Asking


@dataclass(frozen=True, slots=True)
class Field:
    """One line of a form."""

    name: str
    value: str = ""
    hint: str = ""
    """Shown while it is empty."""
    choices: Sequence[str] = ()
    """Values to complete; the right arrow takes the one that is shown."""


class Form(Asking):
    """Gives the text that `text_of` makes of the fields' values."""

    # With priority, because otherwise what is typed at once after these keys still goes into the field before.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,tab", "app.focus_next", show=False, priority=True),
        Binding("up,shift+tab", "app.focus_previous", show=False, priority=True),
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
        super().__init__(label, help, check)
        self.fields, self.text_of = fields, text_of

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(
                Text(
                    f"{self.label}   (enter: go, tab ↑ ↓: fields, →: complete, escape: never mind)",
                    "#8a8a8a",
                )
            )
            for field in self.fields:
                with Horizontal():
                    yield Static(Text(field.name), classes="label")
                    suggester = (
                        SuggestFromList(field.choices, case_sensitive=False)
                        if field.choices
                        else None
                    )
                    yield Input(
                        field.value,
                        placeholder=field.hint,
                        suggester=suggester,
                        select_on_focus=False,
                        name=field.name,
                    )
            yield Static(Text(self.help, "#8a8a8a"), id="help")

    def on_input_submitted(self) -> None:
        self.answer(
            self.text_of({str(item.name): item.value.strip() for item in self.query(Input)})
        )
