"""An episode to read: messages instead of tokens, Markdown rendered, long JSON folded until it is chosen. No tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from rich.cells import chop_cells
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text
from textual.binding import Binding, BindingType

from agentrl_cli.tui.common.agent_screen import LinesScreen
from agentrl_cli.tui.common.keys import CLOSING, FINDING, moving, with_ids
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.picture import picture_lines
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import BAD, FAINT, TITLE, wrap
from agentrl_cli.tui.common.token_text import visible
from agentrl_cli.tui.common.tree import continues
from agentrl_cli.types import Episode, Turn
from agentrl_cli.types.content import content_text

LONG = 160
"""Characters from which on a JSON value is folded."""
MOST = 4000
"""Lines of one text that are shown; what follows is counted."""
KEYS = "↑/↓ scroll  pgup/pgdn  enter unfolds  a all  / find  . again  ? keys  q back"
HELP = """\
↑ ↓ pgup pgdn g G   scroll
enter, a click      unfold the JSON at the top of the screen, and fold it again
a                   all of it, and fold it again
/ .                 find text, the next match
q                   back
"""


class Fold:
    """Where folded values stand, and which of them are open."""

    def __init__(self, opened: frozenset[int], every: bool) -> None:
        self.opened, self.every, self.count = opened, every, 0
        self.lines: dict[int, int] = {}
        """Line to the number of the value."""


def reading_lines(episode: Episode, width: int, fold: Fold) -> list[Text]:
    """Return every turn: its role, its text, its calls and results."""
    out: list[Text] = []
    for turn in episode.turns:
        parts = (f"TURN {turn.index} {turn.role}", turn.player, continues(episode, turn.index))
        out.append(Text(visible("   ".join(filter(None, parts))), TITLE, no_wrap=True))
        for number, lines in _blocks(turn, width, fold):
            if number is not None:
                fold.lines[len(out)] = number
            out += lines
        out.append(Text(""))
    return out


def _blocks(turn: Turn, width: int, fold: Fold) -> Iterator[tuple[int | None, list[Text]]]:
    """Yield the parts of a turn: (number of the folded value, lines)."""
    show = markdown_lines if turn.role == "assistant" else plain_lines
    for message in turn.messages:
        if reasoning := str(message.get("reasoning_content") or ""):
            yield None, [Text(one.plain, FAINT) for one in plain_lines(reasoning, width)]
        text = content_text(message.get("content"))
        value = _json(text)
        if value is not None:
            yield _value_block("", value, width, fold)
        elif text.strip():
            yield None, show(text, width)
    for data in turn.shown:
        yield None, picture_lines(data, min(64, width), 16)
    for call in turn.calls:
        arguments: Any = call.raw if call.arguments is None else call.arguments
        error = f"  {visible(call.error)}" if call.error else ""
        yield None, [Text(f"▸ {visible(call.name)}{error}", "#8fbfff")]
        yield _value_block("  ", arguments, width, fold)
    yield None, [Text(f"ERROR {visible(one.error)}", BAD) for one in turn.results if one.error]


def _value_block(indent: str, value: Any, width: int, fold: Fold) -> tuple[int | None, list[Text]]:
    """Return a JSON value in one line if it is short, else folded to a line with its size."""
    short = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) or len(short) <= LONG:
        return None, plain_lines(short if isinstance(value, str) else indent + short, width)
    number, fold.count = fold.count, fold.count + 1
    opened = fold.every or number in fold.opened
    lines = [Text(f"{indent}{'v' if opened else '>'} {summary(value)}", FAINT, no_wrap=True)]
    if opened:
        rows = json.dumps(value, ensure_ascii=False, indent=2).splitlines()
        lines += plain_lines("\n".join(indent + row for row in rows), width)
    return number, lines


def summary(value: Any) -> str:
    """Return `{4 keys: name, rows, total, note}` or `[12 values]`, with the size."""
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
    for shown in map(visible, text.splitlines()):
        parts = chop_cells(shown, width) if "  " in shown else wrap(shown, width)
        out += [Text(part, no_wrap=True) for part in parts]
    more = [Text(f"… {len(out) - MOST:,} lines more", FAINT)] if len(out) > MOST else []
    return out[:MOST] + more


def markdown_lines(text: str, width: int) -> list[Text]:
    """Return a text as Markdown: headings, lists, code, tables. Links are not links: nothing here opens anything."""
    clean = "\n".join(map(visible, text.splitlines()[:MOST]))
    console = Console(
        width=max(width, 20), color_system="truecolor", legacy_windows=False, force_terminal=True
    )
    markdown = Markdown(clean, hyperlinks=False, code_theme="ansi_dark")
    rows = console.render_lines(markdown, pad=False)
    return [
        Text.assemble(*((part.text, part.style or "") for part in row), no_wrap=True)
        for row in rows
    ]


class ReadingScreen(LinesScreen):
    """One episode as messages."""

    KEYS, HELP_TITLE, HELP_TEXT = KEYS, "reading", HELP
    BINDINGS: ClassVar[list[BindingType]] = with_ids(
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

    def paint(self) -> None:
        """Makes the lines again; unfolded values stay so."""
        self.put_head(f"agentrl replay   {self.episode.id}   {self.episode.task_id}   reading")
        self.fold = Fold(self.fold.opened, self.fold.every)
        self.page.show(reading_lines(self.episode, max(self.size.width - 5, 20), self.fold))

    def action_unfold(self) -> None:
        """Unfolds the first folded value from the top of the screen on."""
        top = round(self.page.scroll_offset.y)
        self.unfold(next((line for line in sorted(self.fold.lines) if line >= top), -1))

    def unfold(self, line: int) -> None:
        """Opens or closes the value at a line."""
        number = self.fold.lines.get(line)
        if number is not None:
            self.fold.opened ^= {number}
            self.paint()

    def action_unfold_all(self) -> None:
        self.fold.every = not self.fold.every
        self.paint()

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.unfold(event.line)
