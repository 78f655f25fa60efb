"""An episode to read: messages instead of tokens, Markdown rendered, long JSON folded until it is chosen. No tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import Static

from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.bindings import CLOSING, FINDING, moving, named
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.picture import picture_lines
from agentrl_cli.tui.common.text import BAD, FAINT, TITLE, wrap
from agentrl_cli.tui.common.token_text import visible
from agentrl_cli.types.content import content_text

if TYPE_CHECKING:
    from agentrl_cli.tui.common.reader import Reader
    from agentrl_cli.types import Episode, Turn

LONG = 160
"""Characters from which on a JSON value is folded."""
MOST = 4000
"""Lines of one text that are shown; what follows is counted."""
KEYS = "↑/↓ scroll  pgup/pgdn  enter unfolds JSON  a all  / find  . again  ? keys  q back"
HELP = """\
↑ ↓ pgup pgdn g G   scroll
enter, a click      unfold the JSON at the top of the screen, and fold it again
a                   all of it, and fold it again
/ .                 find text, the next match
q                   back
"""


class Fold:
    """Where a folded value stands: its number, by which it is opened."""

    def __init__(self, opened: frozenset[int], every: bool) -> None:
        self.opened, self.every, self.count = opened, every, 0
        self.lines: dict[int, int] = {}
        """Line to number."""


def reading_lines(episode: Episode, width: int, fold: Fold) -> list[Text]:
    """Return every turn: its role, its text, its calls and results."""
    out: list[Text] = []
    for turn in episode.turns:
        out.append(Text(f"TURN {turn.index} {turn.role}", TITLE))
        for line in _turn_lines(turn, width, fold, len(out)):
            out.append(line)
        out.append(Text(""))
    return out


def _turn_lines(turn: Turn, width: int, fold: Fold, start: int) -> Iterator[Text]:
    place = start
    for block in _blocks(turn, width, fold):
        number, lines = block
        for offset, line in enumerate(lines):
            if number is not None and not offset:
                fold.lines[place] = number
            yield line
            place += 1


def _blocks(turn: Turn, width: int, fold: Fold) -> Iterator[tuple[int | None, list[Text]]]:
    """(number of the folded value, lines)"""
    for message in turn.messages:
        text = content_text(message.get("content"))
        if text.strip():
            value = _json(text)
            if value is not None:
                yield from _value_block("", value, width, fold)
            else:
                yield (
                    None,
                    markdown_lines(text, width)
                    if turn.role == "assistant"
                    else plain_lines(text, width),
                )
    for data in turn.shown:
        yield None, picture_lines(data, min(64, width), 16)
    for call in turn.calls:
        arguments: Any = call.raw if call.arguments is None else call.arguments
        yield (
            None,
            [
                Text(
                    f"▸ {visible(call.name)}" + (f"  {visible(call.error)}" if call.error else ""),
                    "#8fbfff",
                )
            ],
        )
        yield from _value_block("  ", arguments, width, fold)
    for result in turn.results:
        if result.error:
            yield None, [Text(f"ERROR {visible(result.error)}", BAD)]


def _value_block(
    indent: str, value: Any, width: int, fold: Fold
) -> Iterator[tuple[int | None, list[Text]]]:
    """Yield a JSON value in one line if it is short, else folded to a line that counts what is in it."""
    if isinstance(value, str):
        yield None, plain_lines(value, width)
        return
    short = json.dumps(value, ensure_ascii=False)
    if len(short) <= LONG:
        yield None, plain_lines(indent + short, width)
        return
    number, fold.count = fold.count, fold.count + 1
    opened = fold.every or number in fold.opened
    lines = [Text(f"{indent}{'v' if opened else '>'} {summary(value)}", FAINT, no_wrap=True)]
    if opened:
        whole = json.dumps(value, ensure_ascii=False, indent=2)
        lines += plain_lines("\n".join(indent + line for line in whole.splitlines()), width)
    yield number, lines


def summary(value: Any) -> str:
    """`{4 keys: name, rows, total, note}` or `[12 values]`, with the size."""
    size = len(json.dumps(value, ensure_ascii=False))
    if isinstance(value, dict):
        names = ", ".join(visible(str(name)) for name in list(value)[:6])
        return f"{{{len(value)} keys: {names}{', …' * (len(value) > 6)}}}  {size:,} characters"
    return f"[{len(value)} values]  {size:,} characters"


def _json(text: str) -> Any:
    """Return the object or list that a text is, or None."""
    clean = text.strip()
    if clean[:1] not in ("{", "["):
        return None
    try:
        return json.loads(clean)
    except (ValueError, RecursionError):
        return None


def plain_lines(text: str, width: int) -> list[Text]:
    """Return a text as it is, long lines wrapped; control characters as pictures."""
    out: list[Text] = []
    for line in text.splitlines():
        shown = visible(line).rstrip("\n") if line else ""
        parts = (
            [shown[n : n + width] for n in range(0, len(shown), width)]
            if "  " in shown
            else wrap(shown, width)
        )
        out += [Text(part, no_wrap=True) for part in parts or [""]]
    return (
        out if len(out) <= MOST else [*out[:MOST], Text(f"… {len(out) - MOST:,} lines more", FAINT)]
    )


def markdown_lines(text: str, width: int) -> list[Text]:
    """Return a text as Markdown: headings, lists, code, tables. Links are not links: nothing here opens anything."""
    clean = "\n".join(
        visible(line).rstrip("\n") if line else "" for line in text.splitlines()[:MOST]
    )
    console = Console(
        width=max(width, 20), color_system="truecolor", legacy_windows=False, force_terminal=True
    )
    rendered = console.render_lines(
        Markdown(clean, hyperlinks=False, code_theme="ansi_dark"), pad=False
    )
    return [
        Text.assemble(*((part.text, part.style or "") for part in line), no_wrap=True)
        for line in rendered
    ]


class ReadingScreen(AgentScreen):
    """One episode as messages."""

    HELP_TITLE, HELP_TEXT = "reading", HELP
    BINDINGS: ClassVar[list[BindingType]] = named(
        "reading",
        [
            *moving("scroll_by", page=20, end=1_000_000),
            Binding("enter,space", "unfold", "unfold JSON"),
            Binding("a", "unfold_all", "unfold all JSON"),
            *FINDING,
            *CLOSING,
        ],
    )

    def __init__(self, reader: Reader, episode: Episode) -> None:
        super().__init__(reader)
        self.episode = episode
        self.fold = Fold(frozenset(), False)
        self.every = False

    def compose(self) -> ComposeResult:
        yield Static(
            Text(f"agentrl replay   {self.episode.id}   {self.episode.task_id}   reading", "bold"),
            id="head",
        )
        yield Lines(id="reading")
        yield Static(Text(KEYS, no_wrap=True), id="keys")

    def on_resize(self, event: Resize) -> None:
        self.draw()

    def draw(self) -> None:
        """Makes the lines again; what is unfolded stays so."""
        self.fold = Fold(self.fold.opened, self.every)
        self.query_one(Lines).show(
            reading_lines(self.episode, max(self.size.width - 3, 20), self.fold)
        )

    def action_scroll_by(self, step: int) -> None:
        self.query_one(Lines).scroll_relative(y=step, animate=False)

    def action_unfold(self) -> None:
        """The first folded value from the top of the screen on."""
        top = round(self.query_one(Lines).scroll_offset.y)
        line = next((line for line in sorted(self.fold.lines) if line >= top), None)
        if line is not None:
            self.unfold(line)

    def unfold(self, line: int) -> None:
        """Opens or closes the value at a line."""
        number = self.fold.lines.get(line)
        if number is not None:
            self.fold.opened ^= {number}
            self.draw()

    def action_unfold_all(self) -> None:
        self.every = not self.every
        self.draw()

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.unfold(event.line)
