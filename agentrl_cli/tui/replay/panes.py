"""One episode, read, painted and followed: group and turns | tokens, sibling, map | reward, token, reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError, pluralise
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.episode_list import Browse
from agentrl_cli.tui.common.episode_view import (
    EpisodeView,
    Fork,
    contrasting_sibling,
    place_of,
    token_at,
)
from agentrl_cli.tui.common.layers import LAYERS, Layer, default_layer
from agentrl_cli.tui.common.lines import Rows
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import ALARM, BAD, FAINT, HERE, TITLE, wrap
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.replay import inspector, menus, panels, related

Place = tuple[int, int]
"""(turn, token in the turn)"""
LAST: Place = (1 << 30, 1 << 30)
STALE = "-stale"
"""Class of a dimmed pane: it still shows another episode than the transcript."""
TOO_SMALL = "This terminal is too small for replay: 60x16 at least,\nor `agentrl replay --plain`."


class EpisodeScreen(AgentScreen):
    """One episode, its tokens and everything around them. Reads through the reader only."""

    view: EpisodeView | None = None
    fork: Fork | None = None
    """Where a sibling differs; None until it was read, and if it is identical."""
    around = related.Around()
    """The episodes that the store has beside this one."""
    following = False
    """Whether the newest episode is shown as it arrives; any movement ends that."""
    room = 0
    """Lines of the inspector so far."""

    def __init__(
        self, reader: Reader, episode_id: str, browse: Browse | None, place: Place | None
    ) -> None:
        super().__init__(reader)
        self.episode_id, self._place = episode_id, place
        self.browse, self.listed = browse or Browse(), browse is not None
        self.tokens, self.other = TokenView(id="tokens"), TokenView(id="other")

    def compose(self) -> ComposeResult:
        with Vertical(id="panes"):
            yield from (Rows(id="head"), Rows(id="subhead"), Rows(id="strip"))
            with Horizontal(id="body"):
                with VerticalScroll(id="left", classes="pane", can_focus=False):
                    yield from (Rows(id="group"), Rows(id="failure", classes="-empty"))
                    yield from (Rows(id="turns", classes="gap"), Rows(id="legend", classes="gap"))
                with Vertical(id="middle", classes="pane"):
                    with Horizontal(id="texts"):
                        yield Vertical(Rows(id="mine-title"), self.tokens, id="mine")
                        yield Vertical(Rows(id="beside-title"), self.other, id="beside")
                    yield from (Rows(id="diff"), Rows(id="map"), Rows(id="steps", classes="-empty"))
                with VerticalScroll(id="right", classes="pane", can_focus=False):
                    yield Rows(id="reward")
                    yield from (Rows(id="token", classes="gap"), Rows(id="why", classes="gap"))
            yield Static(TOO_SMALL, id="enlarge", markup=False)
            yield Rows(id="status")
        yield Static(id="keys")

    def on_mount(self) -> None:
        self.tokens.focus()
        self.tokens.moved = self.show_cursor
        self.panel("head").show([Text(f"reading {self.episode_id} …")])
        self.load(self.episode_id, self._place)
        self.set_interval(1.0, self._poll)

    @property
    def small(self) -> bool:
        """Whether there is room for one pane only."""
        return self.has_class("-small")

    @property
    def lens(self) -> Layer:
        """The layer under which the tokens are shown (`layer` means something else to Textual)."""
        return LAYERS[self.tokens.lens]

    # -- painting -------------------------------------------------------------------------------------------------

    def panel(self, name: str) -> Rows:
        return self.query_one(f"#{name}", Rows)

    def repaint(self, *names: str) -> None:
        """Paints panels, each by its function in PANELS; those that wait for their data stay as they are."""
        for name in names if self.view is not None else ():
            panel = self.panel(name)
            if self.view is not None and not panel.has_class(STALE):
                lines = PANELS[name](self, self.view, panel.inner)
                panel.show(lines)
                if name in LATER:
                    panel.set_class(not lines, "-empty")

    def dim(self, stale: bool, *names: str) -> None:
        """Dims panes that still show another episode than the transcript."""
        for name in names:
            self.query_one(f"#{name}").set_class(stale, STALE)

    def paint(self) -> None:
        """Paints everything but the tokens, which paint themselves."""
        if self.view is not None:
            self.dim(False, *NEXT)
            self.repaint(*PANELS)

    def show_cursor(self, token: int) -> None:
        """Paints all that follows the token cursor: inspector, map, the mark in the list of turns."""
        self.repaint("subhead", "token", "map", "turns", *["status"] * self.small)
        if self.view is not None and token < len(self.view.tokens) - 1:
            self.stop_following()

    # -- loading --------------------------------------------------------------------------------------------------

    @work(exclusive=True, group="view", exit_on_error=False)
    async def load(self, episode_id: str, place: Place | None = None) -> None:
        """Reads an episode and shows it at a place."""
        try:
            view = await self.reader.view(episode_id)
        except AgentRLError as error:
            self.panel("head").show([Text(f"{error.message} {error.hint}", ALARM)])
            return
        if self.view is None:
            self.tokens.lens = default_layer(view.tokens, view.signals)
        self.episode_id, self.around, self.fork, self.room = episode_id, related.Around(), None, 0
        self.dim(True, *NEXT, *LATER, "beside")
        self.view = view
        self.tokens.show(view, token_at(view, place))
        self.repaint("head")
        self.call_after_refresh(self.paint)  # what is beside the tokens costs as much again
        self._load_rest(view)

    # described, because Textual else describes the call by all numbers of the view: tens of milliseconds
    @work(exclusive=True, group="rest", exit_on_error=False, description="the rest of an episode")
    async def _load_rest(self, view: EpisodeView) -> None:
        """Reads the parts that may come after the first paint: the fork against a sibling, the place in the list."""
        sibling = contrasting_sibling(view)
        if sibling is not None:
            self.fork = await self.reader.fork(view, sibling)
            if self.has_class("-wide"):
                other = await self.reader.view(sibling)
                self.other.lens = self.tokens.lens
                self.other.show(other, self.fork.position if self.fork is not None else 0)
                # a pane that was hidden has its size by then
                self.call_after_refresh(self.other.move_to, self.other.cursor)
                self.panel("beside-title").show([panels.side_title("BESIDE", other)])
                self.dim(False, "beside")
        self.around = await self.reader.call(related.around, view.episode.id)
        self.dim(False, *LATER)
        self.repaint(*LATER)
        try:
            if self.browse.ids is None:
                await self.reader.call(self.browse.load)
        except AgentRLError as error:
            self.panel("subhead").show([Text(error.message, BAD)])
            return
        self.listed = True
        self.repaint("subhead")

    @work(exclusive=True, group="poll", exit_on_error=False)
    async def _poll(self) -> None:
        """Reads a running episode again if the store changed; the cursor stays where it is."""
        if self.view is None or not (self.view.running or self.following):
            return
        version, before = await self.reader.call(lambda store: store.data_version()), self.view
        changed, self._version = version != self._version, version
        if changed and before.running:
            view = await self.reader.view(self.episode_id)
            if self.view is not before:  # another episode was opened meanwhile
                return
            at_end = self.following or self.tokens.cursor >= len(before.tokens) - 1
            token = len(view.tokens) - 1 if at_end else self.tokens.cursor
            self.view = view
            self.tokens.show(view, token, keep_scroll=True)
            self.paint()
            if not view.running or len(view.tokens) > len(before.tokens):
                self._load_rest(view)
        if changed and self.following and not self.view.running:
            await self._follow()

    async def _follow(self) -> bool:
        """Loads the newest episode; False if it is shown already."""
        run = self.view.episode.run_id if self.view is not None else None
        newest = await self.reader.call(related.newest, run, self.browse.run)
        if newest is None or newest == self.episode_id:
            return False
        self.browse.ids = None
        self.load(newest, LAST)
        return True

    @on(Rows.Chosen)
    def choose_row(self, event: Rows.Chosen) -> None:
        """Goes to the sibling, the turn or the place on the map that was clicked."""
        token = event.meta.get("token")
        if self.view is not None and event.rows.id == "map":
            token = panels.token_on_map(self.view, event.column, event.rows.inner)
        if token is not None:
            self.tokens.move_to(token)
        elif self.view is not None and "episode" in event.meta:
            self.stop_following()
            self.load(event.meta["episode"], place_of(self.view, self.tokens.cursor))

    # -- for the keys ---------------------------------------------------------------------------------------------

    def action_layer(self, name: str) -> None:
        """Shows the tokens of both sides under another layer."""
        self.tokens.lens = self.other.lens = name
        self.paint()

    def action_line(self, lines: int) -> None:
        """Moves by lines, or scrolls the pane that hides the transcript on a small terminal."""
        shown = [name for name in ("left", "right") if self.has_class(f"-show-{name}")]
        for name in shown:
            self.query_one(f"#{name}").scroll_relative(y=lines, animate=False)
        if not shown:
            self.tokens.action_line(lines)

    def action_page(self, sign: int) -> None:
        """Moves by a page."""
        height = self.tokens.size.height or self.query_one("#body").size.height
        self.action_line(sign * max(height - 2, 1))

    def action_pane(self) -> None:
        """Shows the next of transcript, inspector, group on a small terminal; else pages the inspector."""
        right, order = self.query_one("#right"), ["", "-show-right", "-show-left"]
        if self.small:
            here = next((name for name in order[1:] if self.has_class(name)), "")
            for name in order[1:]:
                self.set_class(name == order[(order.index(here) + 1) % 3], name)
            self.call_after_refresh(self.paint)
        elif right.scroll_offset.y >= right.max_scroll_y:
            right.scroll_home(animate=False)
        else:
            right.scroll_page_down(animate=False)

    def stop_following(self) -> None:
        """Stays at the episode that is shown: something was moved."""
        if self.following:
            self.following = False
            self.repaint("subhead")

    def action_sort(self) -> None:
        """Reads the list in the next order; the episode stays."""
        self.browse.next_sort()
        if self.view is not None:
            self._load_rest(self.view)

    @work(exclusive=True, group="follow", exit_on_error=False)
    async def action_follow(self) -> None:
        """Shows the newest episode of the run as it arrives, until something is moved."""
        if self.following or self.view is None:
            self.stop_following()
            return
        self.following = True
        self.repaint("subhead")
        if not await self._follow():
            self.tokens.move_to(len(self.view.tokens) - 1)


def subhead(screen: EpisodeScreen, view: EpisodeView, width: int) -> list[Text]:
    """Return the second line: marks of the episode, the list, the link."""
    text = screen.browse.describe() if screen.listed else ""
    if screen.browse.ids is not None:
        text += f"   {pluralise(len(screen.browse.ids), 'episode')} in the list"
    marks = panels.marks(view, screen.following, screen.tokens.branch, screen.around.children)
    text += f"   link {menus.link(screen.episode_id, view, screen.tokens.cursor)}"
    return [Text().append("   ".join([*marks, ""]), HERE) + Text(text, FAINT, no_wrap=True)]


def token_lines(screen: EpisodeScreen, view: EpisodeView, width: int) -> list[Text]:
    """Return the inspector, as long as for any token before, so that the lines below keep their place."""
    lines = inspector.token_lines(view, screen.tokens.cursor, width)
    screen.room = max(screen.room, len(lines))
    return lines + [Text("")] * (screen.room - len(lines))


def map_lines(screen: EpisodeScreen, view: EpisodeView, width: int) -> list[Text]:
    """Return the map; two of its lines on a small terminal."""
    tokens = screen.tokens
    lines = panels.map_lines(view, screen.lens, tokens.levels, tokens.cursor, width)
    return [lines[1], lines[3]] if screen.small and len(lines) > 3 else lines


PANELS: Mapping[str, Callable[[EpisodeScreen, EpisodeView, int], list[Text]]] = {
    "head": lambda screen, view, width: [
        Text("" if screen.small else "agentrl replay   ", TITLE)
        + panels.header(view, brief=screen.small)
    ],
    "subhead": subhead,
    "strip": lambda screen, view, width: [
        panels.group_strip(view),
        panels.legend_strip(screen.lens, width),
    ],
    "group": lambda screen, view, width: panels.group_lines(view, width),
    "failure": lambda screen, view, width: [
        Text(f" {part}", FAINT)
        for flag, count, total in screen.around.failures
        for part in wrap(f"{flag}: {count} of {total} in step {view.episode.step}, x", width - 1)
    ],
    "turns": lambda screen, view, width: panels.turn_lines(
        view, view.block_of(screen.tokens.cursor), width, hidden=screen.tokens.hidden
    ),
    "legend": lambda screen, view, width: panels.legend_lines(screen.lens, width),
    "mine-title": lambda screen, view, width: [panels.side_title("HERE", view)],
    "diff": lambda screen, view, width: (
        panels.fork_lines(screen.fork, view, width) if len(view.siblings) > 1 else []
    ),
    "map": map_lines,
    "steps": lambda screen, view, width: panels.step_lines(
        screen.around.kind, screen.around.steps, view.episode.step, width
    ),
    "reward": lambda screen, view, width: inspector.reward_lines(view, width),
    "token": token_lines,
    "why": lambda screen, view, width: inspector.reason_lines(view, width),
    "status": lambda screen, view, width: inspector.token_status(view, screen.tokens.cursor, width),
}
"""The lines of each panel at a width."""
NEXT = ("group", "turns", "legend", "reward", "token", "why", "strip", "map", "status")
"""Painted a frame after the tokens of another episode."""
LATER = ("failure", "diff", "steps")
"""These need more reading, come after that, and take no room without lines."""
