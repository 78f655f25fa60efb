"""Small windows over a screen: help, one line of input, yes or no, a choice by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen, ScreenResultType
from textual.widgets import Input, Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.common.bindings import describe
from agentrl_cli.tui.common.settings import read_settings, settings_path

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
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(Text(f"agentrl {self.title_}", "bold #8fbfff"))
            yield Static(Text("any key closes this", "#8a8a8a"), id="how")
            if own := self._own():
                yield Static(
                    Text("\n".join([f"Your own keys ({settings_path()}):", *own])), id="own"
                )
            yield Static(Text(self.text))

    def _own(self) -> list[str]:
        """Return the changes of the user's keymap to the screen below."""
        keys = read_settings(settings_path()).keys if self.keys else {}
        bindings = type(self.app.screen_stack[-2]).BINDINGS
        found = {str(item.id): describe(item) for item in bindings if isinstance(item, Binding)}
        return [f"{keys[name]:<12} {words}" for name, words in found.items() if name in keys]

    @property
    def body(self) -> VerticalScroll:
        return self.query_one(VerticalScroll)

    def on_mount(self) -> None:
        self.call_after_refresh(self._show_scrolling)

    def _show_scrolling(self) -> None:
        """Names the keys that scroll, if the text does not fit."""
        if self.body.max_scroll_y > 0:
            self.query_one("#how", Static).update(
                Text("↓ ↑ scroll, any other key closes this", "#8a8a8a")
            )

    def on_key(self, event: Key) -> None:
        event.stop()
        if event.key in SCROLLS and self.body.max_scroll_y > 0:
            self.body.scroll_relative(y=SCROLLS[event.key], animate=False)
        else:
            self.dismiss()

    def on_click(self) -> None:
        self.dismiss()


class Asking(Dialog[str | None]):
    """A window with inputs; escape gives None. An AgentRLError of `check` is shown, and the text can be corrected."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, label: str, help: str, check: Callable[[str], object] | None) -> None:
        super().__init__()
        self.label, self.help, self.check = label, help, check

    def on_mount(self) -> None:
        self.query_one("#help").display = bool(self.help)
        self.query(Input).first().focus()

    def answer(self, text: str) -> None:
        """Close with a text, unless `check` refuses it."""
        try:
            if self.check is not None and text:
                self.check(text)
        except AgentRLError as error:
            problem = f"{error.message} {error.hint}".strip()
            self.query_one("#help", Static).update(
                Text(problem, "#ffb454").append(f"\n{self.help}", "#8a8a8a")
            )
            self.query_one("#help").display = True
            return
        self.dismiss(text)

    def action_cancel(self) -> None:
        self.dismiss(None)


class Prompt(Asking):
    """One line of input."""

    def __init__(
        self,
        label: str,
        value: str = "",
        *,
        help: str = "",
        check: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(label, help, check)
        self.value = value

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog prompt"):
            yield Static(Text(f"{self.label}   (enter: go, escape: never mind)", "#8a8a8a"))
            yield Input(self.value, id="line", select_on_focus=False)
            yield Static(Text(self.help, "#8a8a8a"), id="help")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.answer(event.value.strip())


class Confirm(Dialog[bool]):
    """A question; only `y` means yes."""

    def __init__(self, question: str, detail: str = "") -> None:
        super().__init__()
        self.question, self.detail = question, detail

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text(self.question, "bold #ffd75f"))
            if self.detail:
                yield Static(Text(self.detail))
            yield Static(Text("y yes   any other key: no", "#8a8a8a"))

    def on_key(self, event: Key) -> None:
        event.stop()
        self.dismiss(event.key == "y")


class Choose(Dialog[int | None]):
    """Up to nine choices by number; escape gives None."""

    def __init__(self, title: str, choices: Sequence[str]) -> None:
        super().__init__()
        self.title_, self.choices = title, choices

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text(self.title_, "bold #8fbfff"))
            for number, choice in enumerate(self.choices[:9], 1):
                yield Static(Text(f" {number}  {choice}", no_wrap=True, overflow="ellipsis"))
            yield Static(Text("number chooses   any other key: nothing", "#8a8a8a"))

    def on_key(self, event: Key) -> None:
        event.stop()
        number = int(event.key) if event.key.isdigit() else 0
        self.dismiss(number - 1 if 1 <= number <= min(len(self.choices), 9) else None)
