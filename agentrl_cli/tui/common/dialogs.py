"""Small windows over a screen: help, fields of input, yes or no, a choice by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen
from textual.suggester import SuggestFromList
from textual.widget import Widget
from textual.widgets import Input, Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.common.keys import keys_of, read_settings, settings_path
from agentrl_cli.tui.common.text import BAD, FAINT, TITLE

SCROLLS = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": 10, "space": 10, "pageup": -10}


class Dialog(ModalScreen[Any]):
    """A small window. It closes once: a key typed before it closed may reach it afterwards."""

    def dismiss(self, result: Any = None) -> AwaitComplete:
        return super().dismiss(result) if self.is_current else AwaitComplete()


class Help(Dialog):
    """The keys of a screen. ↑ ↓ and pages scroll a text that does not fit; any other key closes the window."""

    def __init__(self, title: str, text: str, what: str = ": keys") -> None:
        super().__init__()
        self.title_, self.text, self.keys = title + what, text, bool(what)

    def compose(self) -> ComposeResult:
        own, below = read_settings(settings_path())[0].keys, self.app.screen_stack[-2]
        found = keys_of(below) if self.keys else []
        rows = [f"{key.key:<12} {key.description}" for key in found if key.id in own]
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(Text(f"agentrl {self.title_}", TITLE))
            yield Static(Text("any key closes this", FAINT), id="how")
            if rows:
                yield Static(Text("\n".join([f"Your own keys ({settings_path()}):", *rows])))
            yield Static(Text(self.text))

    @property
    def body(self) -> VerticalScroll:
        return self.query_one(VerticalScroll)

    def on_mount(self) -> None:
        def show_scrolling() -> None:
            if self.body.max_scroll_y > 0:
                how = Text("↓ ↑ scroll, any other key closes this", FAINT)
                self.query_one("#how", Static).update(how)

        self.call_after_refresh(show_scrolling)

    def on_key(self, event: Key) -> None:
        event.stop()
        if event.key in SCROLLS and self.body.max_scroll_y > 0:
            self.body.scroll_relative(y=SCROLLS[event.key], animate=False)
        else:
            self.dismiss()

    def on_click(self) -> None:
        self.dismiss()


@dataclass(frozen=True, slots=True)
class Field:
    """One line of a form."""

    name: str
    value: str = ""
    hint: str = ""
    """Shown while it is empty."""
    choices: Sequence[str] = ()
    """Values to complete; the right arrow takes the one that is shown."""


class Form(Dialog):
    """Fields with completion; gives the text that `text_of` makes of their values, escape gives None.

    An AgentRLError of `check` is shown, and the text can be corrected.
    """

    # With priority, because otherwise what is typed at once after these keys still goes into the field before.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "cancel"),
        Binding("down,tab", "app.focus_next", show=False, priority=True),
        Binding("up,shift+tab", "app.focus_previous", show=False, priority=True),
    ]
    AUTO_FOCUS = "Input"
    HOW = "enter: go, tab ↑ ↓: fields, →: complete, escape: never mind"
    more: Sequence[Widget] = ()
    """What a subclass has under the fields."""

    def __init__(
        self,
        label: str,
        fields: Sequence[Field],
        text_of: Callable[[Mapping[str, str]], str],
        *,
        help: str = "",
        check: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__()
        self.label, self.fields, self.text_of = label, fields, text_of
        self.help, self.check = help, check

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(Text(f"{self.label}   ({self.HOW})", FAINT))
            for field in self.fields:
                fill = SuggestFromList(field.choices, case_sensitive=False)
                with Horizontal():
                    if field.name:
                        yield Static(Text(field.name), classes="label")
                    yield Input(
                        field.value,
                        placeholder=field.hint,
                        suggester=fill if field.choices else None,
                        select_on_focus=False,
                        name=field.name,
                    )
            yield Static(Text(self.help, FAINT), id="help")
            yield from self.more

    def result(self, text: str) -> object:
        """Return the window's result for a text."""
        return text

    def on_input_submitted(self) -> None:
        """Closes, unless `check` refuses the text."""
        text = self.text_of({str(item.name): item.value.strip() for item in self.query(Input)})
        try:
            if self.check is not None:
                self.check(text)
        except AgentRLError as error:
            problem = Text(f"{error.message} {error.hint}".strip(), BAD)
            self.query_one("#help", Static).update(problem.append(f"\n{self.help}", FAINT))
            if not isinstance(self.focused, Input):
                self.query(Input).first().focus()
            return
        self.dismiss(self.result(text))


class Prompt(Form):
    """One line of input."""

    HOW = "enter: go, escape: never mind"

    def __init__(
        self,
        label: str,
        value: str = "",
        *,
        help: str = "",
        check: Callable[[str], object] | None = None,
    ) -> None:
        field = Field("", value)
        super().__init__(label, [field], lambda values: values[""], help=help, check=check)


class Choose(Dialog):
    """Lines of text and keys with their actions, one of which it gives; any other key gives None."""

    def __init__(self, lines: Sequence[Text], actions: Mapping[str, Callable[[], object]]) -> None:
        super().__init__()
        self.lines, self.actions = lines, actions

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            for line in self.lines:
                yield Static(line, classes="choice" * bool(line.no_wrap))

    def on_key(self, event: Key) -> None:
        event.stop()
        self.dismiss(self.actions.get(event.key))
