"""One episode in its panes: reads it, paints it, follows the newest one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Static
from textual.worker import Worker

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.common.agent_screen import report_failure
from agentrl_cli.tui.common.episode_list import Browse
from agentrl_cli.tui.common.episode_view import EpisodeView, contrasting_sibling, place_of, token_at
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import ALARM, BAD, FAINT, HERE
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.replay import legend, menus, panels, related
from agentrl_cli.tui.replay.panes import GroupPane, InspectorPane, Panel, SiblingChosen, TokenChosen
from agentrl_cli.tui.replay.transcript import Transcript

Place = tuple[int, int]
"""(turn, token in the turn)"""
LAST: Place = (1 << 30, 1 << 30)
STALE = "-stale"
"""Class of a dimmed pane."""
TOO_SMALL = "This terminal is too small for replay: 60x16 at least,\nor `agentrl replay --plain`."


class EpisodePanes(Vertical):
    """Group and turns | transcript with token layers | reward, token, reasons. Reads through the reader only."""

    def __init__(
        self, reader: Reader, episode_id: str, browse: Browse | None, place: Place | None
    ) -> None:
        super().__init__(id="panes")
        self.reader = reader
        self.episode_id = episode_id
        self.view: EpisodeView | None = None
        self.browse = browse or Browse()
        self.following = False
        """Whether the newest episode is shown as it arrives; any movement ends that."""
        self.left = GroupPane(id="left", classes="pane")
        self.transcript = Transcript(id="middle", classes="pane")
        self.right = InspectorPane(id="right", classes="pane")
        self._place = place
        self._listed = browse is not None
        self._version: int | None = None
        self._children = 0
        """What-ifs and chats that were stored from the episode."""

    def compose(self) -> ComposeResult:
        yield Panel(id="head")
        yield Panel(id="subhead")
        yield Panel(id="strip")
        yield Horizontal(self.left, self.transcript, self.right, id="body")
        yield Static(TOO_SMALL, id="enlarge", markup=False)
        yield Panel(id="status")

    def start(self) -> None:
        """Reads the first episode; for the screen to call when it is mounted, so that the panes have their sizes."""
        self.tokens.focus()
        self.tokens.moved = self._show_cursor
        self._show("head", Text(f"reading {self.episode_id} …"))
        self.load(self.episode_id, self._place)
        self.set_interval(1.0, self._poll)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        report_failure(self, event)

    @property
    def tokens(self) -> TokenView:
        return self.transcript.tokens

    @property
    def cursor(self) -> int:
        """The token under the cursor."""
        return self.tokens.cursor

    @property
    def place(self) -> Place | None:
        """Where the cursor is; None before anything was read."""
        return place_of(self.view, self.cursor) if self.view is not None else None

    @property
    def small(self) -> bool:
        """Whether only one of the panes has room."""
        return self.screen.has_class("-small")

    def resized(self) -> None:
        """Paints everything for the screen's new size, whose classes are set."""
        self.transcript.compact = self.small or self.screen.has_class("-mid")
        self.tokens.compact = self.small
        if (
            self.screen.has_class("-wide")
            and self.view is not None
            and self.transcript.beside != self.episode_id
        ):
            self._load_rest(self.view)
        self.call_after_refresh(self.paint)

    # -- loading --------------------------------------------------------------------------------------------------

    @work(exclusive=True, group="view", exit_on_error=False)
    async def load(self, episode_id: str, place: Place | None = None) -> None:
        """Reads an episode and shows it at a place."""
        try:
            view = await self.reader.view(episode_id)
        except AgentRLError as error:
            self._show("head", Text(f"{error.message} {error.hint}", ALARM))
            return
        self.episode_id, self.view, self._children = episode_id, view, 0
        self.transcript.show(view, token_at(view, place))
        self._show("head", panels.head(view, brief=self.small))
        dim(next_frame(self), later(self))
        self.call_after_refresh(
            self.paint
        )  # the panes beside the tokens cost as much again: in the next frame
        self._load_rest(view)

    # described, because Textual else describes the call by all numbers of the view: tens of milliseconds
    @work(exclusive=True, group="rest", exit_on_error=False, description="the rest of an episode")
    async def _load_rest(self, view: EpisodeView) -> None:
        """Reads what may come after the first paint: the fork against a sibling, the place in the list."""
        sibling = contrasting_sibling(view)
        if sibling is not None:
            self.transcript.fork = await self.reader.fork(view, sibling)
            if self.screen.has_class("-wide"):
                self.transcript.show_beside(await self.reader.view(sibling))
        self.transcript.paint_fork()  # last, because it takes rows from the tokens
        found = await self.reader.call(related.around, view.episode.id)
        self._children = found.children
        self.left.show_failure(found.failure, view.episode.step)
        steps = panels.step_lines(found.kind, found.steps, view.episode.step, self.transcript.inner)
        self.transcript.show_steps(steps)
        undim(
            panel
            for panel in later(self)
            if panel.id != "beside" or self.transcript.beside == view.episode.id
        )
        try:
            if self.browse.ids is None:
                await self.reader.call(self.browse.load)
        except AgentRLError as error:
            self._show("subhead", Text(error.message, BAD))
            return
        self._listed = True
        self._paint_subhead()

    @work(exclusive=True, group="poll", exit_on_error=False)
    async def _poll(self) -> None:
        """Reads a running episode again if the store changed; the cursor stays where it is."""
        if self.view is None or not (self.view.running or self.following):
            return
        version = await self.reader.call(lambda store: store.data_version())
        changed, self._version = self._version is not None and version != self._version, version
        if changed and self.view.running:
            view = await self.reader.view(self.episode_id)
            at_end = self.following or self.tokens.cursor >= len(self.view.tokens) - 1
            self.view = view
            self.transcript.show(
                view, len(view.tokens) - 1 if at_end else self.tokens.cursor, keep_scroll=True
            )
            self.paint()
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

    def stop_following(self) -> None:
        """Stays at the episode that is shown: something was moved."""
        if self.following:
            self.following = False
            self._paint_subhead()

    # -- painting -------------------------------------------------------------------------------------------------

    def _show(self, name: str, *lines: Text) -> None:
        self.query_one(f"#{name}", Panel).show(lines)

    def paint(self) -> None:
        """Paints everything but the tokens, which paint themselves."""
        view = self.view
        if view is None:
            return
        self._show("head", panels.head(view, brief=self.small))
        key = legend.legend_strip(self.transcript.lens, max(self.screen.size.width - 2, 20))
        self._show("strip", panels.group_strip(view), key)
        self.left.show(view, self.transcript.lens)
        self.right.show(view)
        self.transcript.paint()
        self._paint_subhead()
        self._show_cursor(self.tokens.cursor)
        undim(next_frame(self))

    def _paint_subhead(self) -> None:
        if self.view is None:
            return
        text = self.browse.describe() if self._listed else ""
        if self.browse.ids is not None:
            text += f"   {len(self.browse.ids):,} episodes in the list"
        marks = panels.marks(self.view, self.following, self.transcript.branch, self._children)
        text += f"   link {menus.link(self.episode_id, self.view, self.tokens.cursor)}"
        self._show(
            "subhead",
            Text().append("   ".join([*marks, ""]), HERE) + Text(text, FAINT, no_wrap=True),
        )

    def _show_cursor(self, token: int) -> None:
        """Paints what follows the token cursor: inspector, map, the mark in the list of turns."""
        if self.view is None:
            return
        self.right.show_cursor(token)
        if self.small:
            self._show(
                "status",
                *panels.token_status(self.view, token, max(self.screen.size.width - 2, 20)),
            )
        self.transcript.show_cursor(token)
        self.left.show_cursor(token)

    def on_token_view_moved(self, event: TokenView.Moved) -> None:
        if event.view is self.tokens:
            self._show_cursor(event.token)

    def on_token_chosen(self, event: TokenChosen) -> None:
        self.stop_following()
        self.tokens.move_to(event.token)

    def on_sibling_chosen(self, event: SiblingChosen) -> None:
        self.stop_following()
        self.load(event.episode_id, self.place)

    # -- for the keys ---------------------------------------------------------------------------------------------

    def use_layer(self, name: str) -> None:
        """Shows the tokens under another layer."""
        self.transcript.use_layer(name)
        self.left.show_layer(self.transcript.lens)
        self.paint()

    def show_marks(self, tags: tuple[str, ...], note: str) -> None:
        """Shows the tags and the note as they are now."""
        if self.view is not None:
            self.view = replace(self.view, tags=tags, note=note)
            self.paint()

    def list_again(self) -> None:
        """Reads the list in another order; the episode stays."""
        if self.view is not None:
            self._load_rest(self.view)

    def next_branch(self) -> bool:
        """Folds the turns outside the next branch, after the last branch none; False if there is one branch."""
        hidden = self.transcript.next_branch()
        if hidden is None:
            return False
        self.left.show_branch(hidden)
        self._show_cursor(self.cursor)
        self._paint_subhead()
        return True

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def follow(self) -> None:
        """Shows the newest episode of the run as it arrives, until something is moved."""
        if self.following or self.view is None:
            self.stop_following()
            return
        self.following = True
        self._paint_subhead()
        if not await self._follow():
            self.tokens.move_to(len(self.view.tokens) - 1)

    def scroll_pane(self, lines: int) -> bool:
        """Scrolls the pane that hides the transcript on a small terminal; False if none does."""
        name = next(
            (pane for pane in ("left", "right") if self.screen.has_class(f"-show-{pane}")), ""
        )
        if name:
            self.query_one(f"#{name}", VerticalScroll).scroll_relative(y=lines, animate=False)
        return bool(name)

    def next_pane(self) -> None:
        """On a small terminal shows the next of transcript, inspector, group; else pages the inspector."""
        if not self.small:
            self.right.page()
            return
        order = ["", "-show-right", "-show-left"]
        here = next((name for name in order[1:] if self.screen.has_class(name)), "")
        after = order[(order.index(here) + 1) % 3]
        for name in order[1:]:
            self.screen.set_class(name == after, name)
        self.call_after_refresh(self.paint)


def next_frame(panes: EpisodePanes) -> tuple[Widget, ...]:
    """What `paint` paints, a frame after the tokens of another episode."""
    return (
        *panes.left.panels,
        *panes.right.panels,
        panes.query_one("#strip"),
        panes.transcript.map,
    )


def later(panes: EpisodePanes) -> tuple[Widget, ...]:
    """What needs more reading, and comes after that."""
    return (
        panes.left.failure,
        panes.transcript.diff,
        panes.transcript.by_step,
        panes.query_one("#beside"),
    )


def dim(*panels: Iterable[Widget]) -> None:
    """Dim panes that still show another episode than the transcript."""
    for panel in chain(*panels):
        panel.add_class(STALE)


def undim(panels: Iterable[Widget]) -> None:
    """Show panes as they are: they are current."""
    for panel in panels:
        panel.remove_class(STALE)
