"""What all screens share: the base of a screen, and small windows over it (help, input, yes or no, a choice)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Static
from textual.worker import Worker, WorkerState

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.common.palette import said
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.router import screen
from agentrl_cli.tui.common.settings import read_settings, settings_path


class AgentScreen(Screen[None]):
    """A screen over the store, whose workers may fail as the store may: locked, missing, an episode deleted meanwhile.

    Such an error is shown and the screen stays; a bug still ends the application with its traceback.
    """

    reader: Reader

    def open_screen(self, name: str, *args: Any, **options: Any) -> None:
        """Opens another screen over this one, by its name in `router.SCREENS`, with the same reader."""
        self.app.push_screen(screen(name, self.reader, *args, **options))

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Shows an AgentRLError of a worker, raises anything else."""
        if event.state is not WorkerState.ERROR or event.worker.error is None:
            return
        error = event.worker.error
        if not isinstance(error, AgentRLError):
            raise error
        self.notify(f"{error.message}\n{error.hint}".strip(), severity="error", markup=False)


SCROLLS = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": 10, "space": 10, "pageup": -10}


class Help(ModalScreen[None]):
    """The keys of a screen. ↑ ↓ and pages scroll where it does not fit, any other key closes it."""

    def __init__(self, title: str, text: str, what: str = ": keys") -> None:
        super().__init__()
        self.title_, self.text, self.keys = title + what, text, bool(what)

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(Text(f"agentrl {self.title_}", "bold #8fbfff"))
            yield Static(Text("any key closes this", "#8a8a8a"), id="how")
            yield Static(Text(self.text))
            if own := self._own():
                yield Static(Text("\n".join([f"Your own keys ({settings_path()}):", *own])), id="own")

    def _own(self) -> list[str]:
        """What the person's keymap changes on the screen below."""
        keys = read_settings(settings_path()).keys if self.keys else {}
        bindings = type(self.app.screen_stack[-2]).BINDINGS
        found = {str(item.id): said(item) for item in bindings if isinstance(item, Binding)}
        return [f"{keys[name]:<12} {words}" for name, words in found.items() if name in keys]

    @property
    def body(self) -> VerticalScroll:
        return self.query_one(VerticalScroll)

    def on_mount(self) -> None:
        self.call_after_refresh(self._tell)

    def _tell(self) -> None:
        """Says that there is more, where there is."""
        if self.body.max_scroll_y > 0:
            self.query_one("#how", Static).update(Text("↓ ↑ scroll, any other key closes this", "#8a8a8a"))

    def on_key(self, event: Key) -> None:
        event.stop()
        if event.key in SCROLLS and self.body.max_scroll_y > 0:
            self.body.scroll_relative(y=SCROLLS[event.key], animate=False)
        else:
            self.dismiss()

    def on_click(self) -> None:
        self.dismiss()


class Prompt(ModalScreen[str | None]):
    """One line of input; escape gives None. What `check` refuses (by an AgentRLError) is told, and may be mended."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(
        self, label: str, value: str = "", *, help: str = "", check: Callable[[str], object] | None = None
    ) -> None:
        super().__init__()
        self.label, self.value, self.help, self.check = label, value, help, check

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog prompt"):
            yield Static(Text(f"{self.label}   (enter: go, escape: never mind)", "#8a8a8a"))
            yield Input(self.value, id="line", select_on_focus=False)
            yield Static(Text(self.help, "#8a8a8a"), id="help")

    def on_mount(self) -> None:
        self.query_one("#help").display = bool(self.help)
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        try:
            if self.check is not None and text:
                self.check(text)
        except AgentRLError as error:
            said = f"{error.message} {error.hint}".strip()
            self.query_one("#help", Static).update(Text(said, "#ffb454").append(f"\n{self.help}", "#8a8a8a"))
            self.query_one("#help").display = True
            return
        self.dismiss(text)

    def action_cancel(self) -> None:
        self.dismiss(None)


class Confirm(ModalScreen[bool]):
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


class Choose(ModalScreen[int | None]):
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


def named(screen: str, bindings: Iterable[BindingType]) -> list[BindingType]:
    """The bindings with ids as a keymap file uses them: `replay.tag`, `replay.turn.-1`, `replay.layer.logp`."""
    out: list[BindingType] = []
    for binding in bindings:
        assert isinstance(binding, Binding)
        action, _, rest = binding.action.partition("(")
        argument = rest.rstrip(")").strip("'")
        out.append(replace(binding, id=f"{screen}.{action}.{argument}" if argument else f"{screen}.{action}"))
    return out


SECRET = (
    "This holds what looks like a secret. Write the picture?",
    "A picture masks nothing; JSON lines and HTML pages do.",
)
"""What is asked before a picture that may show one."""


def picture(app: App[Any], title: str) -> str:
    """What is on the screen as SVG that asks for nothing: without the web fonts that rich links to.

    `xml:space` keeps leading blanks in every renderer.
    """
    svg = app.export_screenshot(title=title).replace("<svg ", '<svg xml:space="preserve" ', 1)
    return re.sub(r"@font-face \{.*?\}\s*|<!-- Generated .*? -->\s*", "", svg, flags=re.DOTALL)


def leave(app: App[Any]) -> None:
    """Back to the screen below; out of the application where there is none."""
    if len(app.screen_stack) > 2:
        app.pop_screen()
    else:
        app.exit(0)
