"""The panes of replay: group and turns | tokens, sibling, map | reward, token, reasons; each by one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from agentrl_cli.tui.common.episode_list import Browse
from agentrl_cli.tui.common.episode_view import EpisodeView, Fork
from agentrl_cli.tui.common.layers import LAYERS, Layer
from agentrl_cli.tui.common.lines import Rows
from agentrl_cli.tui.common.text import FAINT, HERE, join
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.replay import inspector, menus, panels, related

STALE = "-stale"
"""Class of a dimmed pane."""
TOO_SMALL = "This terminal is too small for replay: 60x16 at least,\nor `agentrl replay --plain`."


class Panel(Rows):
    """Lines that are laid out again only if their number or the width changed: a layout costs more than the text."""

    _count = -1

    def show(self, lines: Sequence[Text]) -> None:
        """Replaces the lines."""
        text = join(lines)
        count = text.plain.count("\n")
        self.update(text, layout=count != self._count)
        self._count = count

    def on_resize(self) -> None:
        self._count = -1

    @property
    def inner(self) -> int:
        """The width of a line in cells: that of the pane around it, without its edge."""
        pane = cast(Widget, self.parent)
        return max(pane.size.width - (2 if isinstance(pane, Panes) else 1), 20)


class Panes(Vertical):
    """Everything around the tokens of one episode; a subclass reads the episode."""

    view: EpisodeView | None = None
    fork: Fork | None = None
    """Where a sibling differs; None until it was read, and if it is identical."""
    around = related.Around()
    """The episodes that the store has beside this one."""
    branch: int | None = None
    """The branch that is shown alone; None: all."""
    hidden: frozenset[int] = frozenset()
    """Blocks outside that branch."""
    beside = ""
    """The episode beside which a sibling is shown."""
    following = False
    """Whether the newest episode is shown as it arrives; any movement ends that."""
    small = compact = False
    """Room for one pane only; no room for what lies under the map."""
    needle = ""
    """The text that was looked for last."""
    listed = False
    """Whether the list of episodes was read."""
    block = -1
    """The turn under the cursor, once it is painted."""

    def __init__(self, episode_id: str, browse: Browse) -> None:
        super().__init__(id="panes")
        self.episode_id, self.browse = episode_id, browse
        self.tokens, self.other = TokenView(id="tokens"), TokenView(id="other")

    def compose(self) -> ComposeResult:
        yield from (Panel(id="head"), Panel(id="subhead"), Panel(id="strip"))
        with Horizontal(id="body"):
            with VerticalScroll(id="left", classes="pane", can_focus=False):
                yield from (Panel(id="group"), Panel(id="failure"))
                yield from (Panel(id="turns", classes="gap"), Panel(id="legend", classes="gap"))
            with Vertical(id="middle", classes="pane"):
                with Horizontal(id="texts"):
                    yield Vertical(Panel(id="mine-title"), self.tokens, id="mine")
                    yield Vertical(Panel(id="beside-title"), self.other, id="beside")
                yield from (Panel(id="diff"), Panel(id="map"), Panel(id="steps"))
            with VerticalScroll(id="right", classes="pane", can_focus=False):
                yield Panel(id="reward")
                yield from (Panel(id="token", classes="gap"), Panel(id="why", classes="gap"))
        yield Static(TOO_SMALL, id="enlarge", markup=False)
        yield Panel(id="status")

    @property
    def cursor(self) -> int:
        """The token under the cursor."""
        return self.tokens.cursor

    @property
    def lens(self) -> Layer:
        """The layer under which the tokens are shown (`layer` means something else to Textual)."""
        return LAYERS[self.tokens.lens]

    def panel(self, name: str) -> Panel:
        return self.query_one(f"#{name}", Panel)

    def repaint(self, *names: str) -> None:
        """Paints panels, each by its function in PANELS."""
        if self.view is None:
            return
        for name in names:
            panel = self.panel(name)
            lines = PANELS[name](self, self.view, panel.inner)
            panel.show(lines)
            if name in FOLDING:
                panel.display = bool(lines)

    def dim(self, stale: bool, *names: str) -> None:
        """Dims panes that still show another episode than the transcript."""
        for name in names:
            self.query_one(f"#{name}").set_class(stale, STALE)

    def paint(self) -> None:
        """Paints everything but the tokens, which paint themselves."""
        if self.view is not None:
            self.block = -1
            self.repaint("head", "strip", "group", "legend", "reward", "why", "mine-title", "diff")
            self.repaint("subhead")
            if self.around.steps:
                self.repaint("steps")
            self.show_cursor(self.cursor)
            self.dim(False, *NEXT)

    def show_cursor(self, token: int) -> None:
        """Paints all that follows the token cursor: inspector, map, the mark in the list of turns."""
        if self.view is not None:
            self.repaint("token", "map", *["status"] * self.small)
            if self.view.block_of(token) != self.block:
                self.block = self.view.block_of(token)
                self.repaint("turns")

    def use_layer(self, name: str) -> None:
        """Shows the tokens of both sides under another layer."""
        self.tokens.lens = self.other.lens = name
        self.paint()

    def scroll_pane(self, lines: int) -> bool:
        """Scrolls the pane that hides the transcript on a small terminal; False if none does."""
        shown = [name for name in ("left", "right") if self.screen.has_class(f"-show-{name}")]
        for name in shown:
            self.query_one(f"#{name}").scroll_relative(y=lines, animate=False)
        return bool(shown)

    def next_pane(self) -> None:
        """Shows the next of transcript, inspector, group on a small terminal; else pages the inspector."""
        right, order = self.query_one("#right"), ["", "-show-right", "-show-left"]
        if self.small:
            here = next((name for name in order[1:] if self.screen.has_class(name)), "")
            for name in order[1:]:
                self.screen.set_class(name == order[(order.index(here) + 1) % 3], name)
            self.call_after_refresh(self.paint)
        elif right.scroll_offset.y >= right.max_scroll_y:
            right.scroll_home(animate=False)
        else:
            right.scroll_page_down(animate=False)


def subhead(panes: Panes, view: EpisodeView, width: int) -> list[Text]:
    """Return the second line: marks of the episode, the list, the link."""
    text = panes.browse.describe() if panes.listed else ""
    if panes.browse.ids is not None:
        text += f"   {len(panes.browse.ids):,} episodes in the list"
    marks = panels.marks(view, panes.following, panes.branch, panes.around.children)
    text += f"   link {menus.link(panes.episode_id, view, panes.cursor)}"
    return [Text().append("   ".join([*marks, ""]), HERE) + Text(text, FAINT, no_wrap=True)]


def map_lines(panes: Panes, view: EpisodeView, width: int) -> list[Text]:
    """Return the map; two of its lines on a small terminal."""
    lines = panels.map_lines(view, panes.lens, panes.tokens.levels, panes.cursor, width)
    return [lines[1], lines[3]] if panes.small and len(lines) > 3 else lines


def fork_lines(panes: Panes, view: EpisodeView, width: int) -> list[Text]:
    """Return where a sibling differs, if there is one and room."""
    shown = len(view.siblings) > 1 and not panes.compact
    return panels.fork_lines(panes.fork, view, width) if shown else []


def step_lines(panes: Panes, view: EpisodeView, width: int) -> list[Text]:
    """Return the task's mean reward by step, if there is room."""
    around, step = panes.around, view.episode.step
    return [] if panes.compact else panels.step_lines(around.kind, around.steps, step, width)


PANELS: Mapping[str, Callable[[Panes, EpisodeView, int], list[Text]]] = {
    "head": lambda panes, view, width: [panels.head(view, brief=panes.small)],
    "subhead": subhead,
    "strip": lambda panes, view, width: [
        panels.group_strip(view),
        panels.legend_strip(panes.lens, width),
    ],
    "group": lambda panes, view, width: panels.group_lines(view, width),
    "failure": lambda panes, view, width: panels.failure_lines(
        panes.around.failure, view.episode.step, width
    ),
    "turns": lambda panes, view, width: panels.turn_lines(
        view, panes.block, width, hidden=panes.hidden
    ),
    "legend": lambda panes, view, width: panels.legend_lines(panes.lens, width),
    "mine-title": lambda panes, view, width: [panels.side_title("HERE", view)],
    "diff": fork_lines,
    "map": map_lines,
    "steps": step_lines,
    "reward": lambda panes, view, width: inspector.reward_lines(view, width),
    "token": lambda panes, view, width: inspector.token_lines(view, panes.cursor, width),
    "why": lambda panes, view, width: inspector.reason_lines(view, width),
    "status": lambda panes, view, width: inspector.token_status(view, panes.cursor, width),
}
"""The lines of each panel at a width."""
FOLDING = ("failure", "diff", "steps")
"""Panels that take no room without lines."""
NEXT = ("group", "turns", "legend", "reward", "token", "why", "strip", "map")
"""Painted a frame after the tokens of another episode."""
LATER = ("failure", "diff", "steps", "beside")
"""These need more reading, and come after that."""
