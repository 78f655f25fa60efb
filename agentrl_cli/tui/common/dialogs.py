"""Small windows over a screen: help, a line or fields of input, yes or no, a choice by number."""

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
from textual.screen import ModalScreen, ScreenResultType
from textual.suggester import SuggestFromList
from textual.widget import Widget
from textual.widgets import Input, Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.common.keys import describe_keys
from agentrl_cli.tui.common.settings import own_keys, settings_path
from agentrl_cli.tui.common.text import BAD, FAINT, HERE, TITLE

SCROLLS = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": 10, "space": 10, "pageup": -10}


class Dialog(ModalScreen[ScreenResultType]):
    """A small window. It closes once: a key typed before it closed may reach it afterwards."""

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        return super().dismiss(result) if self.is_current else AwaitComplete()


class Help(Dialog[None]):
    """The keys of a screen. ↑ ↓ and pages scroll a text that does not fit; any other key closes the window."""

    def __init__(self, title: str, text: str, what: str = ": keys") -> None:
        super().__init__()
        self.title_, self.text, self.keys = title + what, text, bool(what)

    def compose(self) -> ComposeResult:
        own, below = own_keys() if self.keys else {}, self.app.screen_stack[-2]
        named = [(str(key.id), words) for key, words in describe_keys(below)]
        rows = [f"{own[name]:<12} {words}" for name, words in named if name in own]
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
        self.call_after_refresh(self._show_scrolling)

    def _show_scrolling(self) -> None:
        """Names the keys that scroll, if the text does not fit."""
        if self.body.max_scroll_y > 0:
            how = Text("↓ ↑ scroll, any other key closes this", FAINT)
            self.query_one("#how", Static).update(how)

    def on_key(self, event: Key) -> None:
        event.stop()
        if event.key in SCROLLS and self.body.max_scroll_y > 0:
            self.body.scroll_relative(y=SCROLLS[event.key], animate=False)
        else:
            self.dismiss()

    def on_click(self) -> None:
        self.dismiss()


class Prompt(Dialog[Any]):
    """One line of input, given as text; escape gives None.

    An AgentRLError of `check` is shown, and the text can be corrected.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "cancel")]
    AUTO_FOCUS = "Input"
    CHECKS_EMPTY = False

    def __init__(
        self,
        label: str,
        value: str = "",
        *,
        help: str = "",
        check: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__()
        self.label, self.value, self.help, self.check = label, value, help, check

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog prompt"):
            yield Static(Text(f"{self.label}   (enter: go, escape: never mind)", FAINT))
            yield Input(self.value, id="line", select_on_focus=False)
            yield Static(Text(self.help, FAINT), id="help")
            yield from self.more()

    def more(self) -> Sequence[Widget]:
        """Return the text under the line."""
        return ()

    def on_mount(self) -> None:
        self.query_one("#help").display = bool(self.help)

    def text(self) -> str:
        """Return the entered text, as `check` takes it."""
        return self.query_one(Input).value.strip()

    def result(self, text: str) -> object:
        """Return the window's result for a text."""
        return text

    def on_input_submitted(self) -> None:
        """Closes, unless `check` refuses the text."""
        text = self.text()
        try:
            if self.check is not None and (text or self.CHECKS_EMPTY):
                self.check(text)
        except AgentRLError as error:
            problem = Text(f"{error.message} {error.hint}".strip(), BAD)
            help = self.query_one("#help", Static)
            help.update(problem.append(f"\n{self.help}", FAINT))
            help.display = True
            if not isinstance(self.focused, Input):
                self.query(Input).first().focus()
            return
        self.dismiss(self.result(text))


@dataclass(frozen=True, slots=True)
class Field:
    """One line of a form."""

    name: str
    value: str = ""
    hint: str = ""
    """Shown while it is empty."""
    choices: Sequence[str] = ()
    """Values to complete; the right arrow takes the one that is shown."""


class Form(Prompt):
    """Fields with completion; gives the text that `text_of` makes of their values."""

    # With priority, because otherwise what is typed at once after these keys still goes into the field before.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,tab", "app.focus_next", show=False, priority=True),
        Binding("up,shift+tab", "app.focus_previous", show=False, priority=True),
    ]

    def __init__(
        self,
        label: str,
        fields: Sequence[Field],
        text_of: Callable[[Mapping[str, str]], str],
        *,
        help: str = "",
        check: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(label, help=help, check=check)
        self.fields, self.text_of = fields, text_of

    def compose(self) -> ComposeResult:
        how = "(enter: go, tab ↑ ↓: fields, →: complete, escape: never mind)"
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(Text(f"{self.label}   {how}", FAINT))
            for field in self.fields:
                fill = SuggestFromList(field.choices, case_sensitive=False)
                with Horizontal():
                    yield Static(Text(field.name), classes="label")
                    yield Input(
                        field.value,
                        placeholder=field.hint,
                        suggester=fill if field.choices else None,
                        select_on_focus=False,
                        name=field.name,
                    )
            yield Static(Text(self.help, FAINT), id="help")

    def text(self) -> str:
        return self.text_of({str(item.name): item.value.strip() for item in self.query(Input)})


class Choose(Dialog[int | None]):
    """Up to nine choices by number; any other key gives None."""

    HOW = "number chooses   any other key: nothing"

    def __init__(self, title: str, choices: Sequence[str]) -> None:
        super().__init__()
        self.title_, self.choices = title, choices

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text(self.title_, TITLE))
            for number, choice in enumerate(self.choices[:9], 1):
                yield Static(Text(f" {number}  {choice}", no_wrap=True, overflow="ellipsis"))
            yield Static(Text(self.HOW, FAINT))

    def on_key(self, event: Key) -> None:
        event.stop()
        number = int(event.key) if event.key.isdigit() else 0
        self.dismiss(number - 1 if 1 <= number <= min(len(self.choices), 9) else None)


class Confirm(Dialog[bool]):
    """A question; only `y` means yes."""

    def __init__(self, question: str, detail: str = "") -> None:
        super().__init__()
        self.question, self.detail = question, detail

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text(self.question, HERE))
            yield from [Static(Text(self.detail))] if self.detail else []
            yield Static(Text("y yes   any other key: no", FAINT))

    def on_key(self, event: Key) -> None:
        event.stop()
        self.dismiss(event.key == "y")
