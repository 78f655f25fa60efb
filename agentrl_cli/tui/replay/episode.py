"""One episode in its panes: reads it, paints it, follows the newest one."""

from __future__ import annotations

from dataclasses import replace

from rich.text import Text
from textual import on, work

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.common.agent_screen import report_failure
from agentrl_cli.tui.common.episode_list import Browse
from agentrl_cli.tui.common.episode_view import (
    EpisodeView,
    contrasting_sibling,
    next_flagged,
    off_branch,
    own_token,
    place_of,
    token_at,
)
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import ALARM, BAD
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.replay import panels, related
from agentrl_cli.tui.replay.panes import LATER, NEXT, Panel, Panes

Place = tuple[int, int]
"""(turn, token in the turn)"""
LAST: Place = (1 << 30, 1 << 30)


class EpisodePanes(Panes):
    """Group and turns | transcript with token layers | reward, token, reasons. Reads through the reader only."""

    _version: int | None = None

    def __init__(
        self, reader: Reader, episode_id: str, browse: Browse | None, place: Place | None
    ) -> None:
        super().__init__(episode_id, browse or Browse())
        self.reader, self._place, self.listed = reader, place, browse is not None

    on_worker_state_changed = report_failure

    def start(self) -> None:
        """Reads the first episode; for the screen to call when it is mounted, so that the panes have their sizes."""
        self.tokens.focus()
        self.tokens.moved = self.show_cursor
        self.panel("head").show([Text(f"reading {self.episode_id} …")])
        self.load(self.episode_id, self._place)
        self.set_interval(1.0, self._poll)

    @property
    def place(self) -> Place | None:
        """Where the cursor is; None before anything was read."""
        return place_of(self.view, self.cursor) if self.view is not None else None

    def fit_screen(self) -> None:
        """Paints everything for the screen's new size, whose classes are set."""
        self.small = self.tokens.compact = self.screen.has_class("-small")
        self.compact = self.small or self.screen.has_class("-mid")
        wide = self.screen.has_class("-wide") and self.beside != self.episode_id
        if wide and self.view is not None:
            self._load_rest(self.view)
        self.call_after_refresh(self.paint)

    # -- loading --------------------------------------------------------------------------------------------------

    @work(exclusive=True, group="view", exit_on_error=False)
    async def load(self, episode_id: str, place: Place | None = None) -> None:
        """Reads an episode and shows it at a place."""
        try:
            view = await self.reader.view(episode_id)
        except AgentRLError as error:
            self.panel("head").show([Text(f"{error.message} {error.hint}", ALARM)])
            return
        if self.view is None and view.signals is None:
            self.tokens.lens = "logp"  # nothing was trained here: the push would be blank
        self.episode_id, self.around, self.fork = episode_id, related.Around(), None
        self._show(view, token_at(view, place))
        self.repaint("head")
        self.dim(True, *NEXT, *LATER)
        self.call_after_refresh(self.paint)  # what is beside the tokens costs as much again
        self._load_rest(view)

    def _show(self, view: EpisodeView, token: int, *, keep_scroll: bool = False) -> None:
        self.view, self.branch, self.hidden = view, None, frozenset()
        self.tokens.show(view, token, keep_scroll=keep_scroll)

    # described, because Textual else describes the call by all numbers of the view: tens of milliseconds
    @work(exclusive=True, group="rest", exit_on_error=False, description="the rest of an episode")
    async def _load_rest(self, view: EpisodeView) -> None:
        """Reads the parts that may come after the first paint: the fork against a sibling, the place in the list."""
        sibling = contrasting_sibling(view)
        if sibling is not None:
            self.fork = await self.reader.fork(view, sibling)
            if self.screen.has_class("-wide"):
                self._show_beside(await self.reader.view(sibling))
        self.repaint("diff")  # last, because it takes rows from the tokens
        self.around = await self.reader.call(related.around, view.episode.id)
        self.repaint("failure", "steps")
        self.dim(False, *(name for name in LATER if name != "beside" or self._has_beside))
        try:
            if self.browse.ids is None:
                await self.reader.call(self.browse.load)
        except AgentRLError as error:
            self.panel("subhead").show([Text(error.message, BAD)])
            return
        self.listed = True
        self.repaint("subhead")

    @property
    def _has_beside(self) -> bool:
        return self.view is not None and self.beside == self.view.episode.id

    def _show_beside(self, sibling: EpisodeView) -> None:
        if self.view is None:
            return
        self.other.lens = self.tokens.lens
        self.other.show(sibling, self.fork.position if self.fork is not None else 0)
        # a pane that was hidden has its size by then
        self.call_after_refresh(self.other.move_to, self.other.cursor)
        self.panel("beside-title").show([panels.side_title("BESIDE", sibling)])
        self.beside = self.view.episode.id

    @work(exclusive=True, group="poll", exit_on_error=False)
    async def _poll(self) -> None:
        """Reads a running episode again if the store changed; the cursor stays where it is."""
        if self.view is None or not (self.view.running or self.following):
            return
        version = await self.reader.call(lambda store: store.data_version())
        changed, self._version = self._version is not None and version != self._version, version
        if changed and self.view.running:
            view = await self.reader.view(self.episode_id)
            at_end = self.following or self.cursor >= len(self.view.tokens) - 1
            self._show(view, len(view.tokens) - 1 if at_end else self.cursor, keep_scroll=True)
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

    def on_token_view_moved(self, event: TokenView.Moved) -> None:
        if event.view is self.tokens:
            self.show_cursor(event.token)

    # -- clicks ---------------------------------------------------------------------------------------------------

    @on(Panel.Chosen)
    def choose(self, event: Panel.Chosen) -> None:
        """Goes to the sibling, the turn or the place on the map that was clicked."""
        if self.view is None:
            return
        token, sibling, name = None, None, event.rows.id
        if name == "group":
            sibling = panels.sibling_at(self.view, event.row)
        elif name == "turns":
            token = panels.turn_at(self.view, self.block, event.row)
        elif name == "map":
            token = panels.token_on_map(self.view, event.column, self.panel("map").inner)
        if token is not None:
            self.stop_following()
            self.tokens.move_to(token)
        elif sibling is not None:
            self.stop_following()
            self.load(sibling, self.place)

    # -- for the keys ---------------------------------------------------------------------------------------------

    def stop_following(self) -> None:
        """Stays at the episode that is shown: something was moved."""
        if self.following:
            self.following = False
            self.repaint("subhead")

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
        if self.view is None or self.view.episode.linear:
            return False
        number = 0 if self.branch is None else self.branch + 1
        self.branch = number if number < len(self.view.episode.branches) else None
        alone = self.branch is not None
        self.hidden = off_branch(self.view, number) if alone else frozenset()
        self.tokens.unfold_but(self.hidden)
        self.block = -1
        self.tokens.move_to(own_token(self.view, number) if alone else self.cursor)
        self.repaint("subhead")
        return True

    def to_fork(self) -> bool:
        """Moves to where a sibling differs; False if none does."""
        if self.view is None or self.fork is None:
            return False
        self.tokens.move_to(min(self.fork.position, len(self.view.tokens) - 1))
        return True

    def to_flagged(self) -> bool:
        """Moves to the next token that stands out; False if none does."""
        token = next_flagged(self.view, self.cursor) if self.view is not None else None
        if token is not None:
            self.tokens.move_to(token)
        return token is not None

    def find(self) -> str:
        """Moves to the next match of `needle`; returns a message for the user."""
        if not self.needle:
            return "/ finds text first"
        count = self.tokens.find(self.needle)
        found = f"{count} matches, . for the next" if count else "nothing found"
        return f"{self.needle}: {found}"

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def follow(self) -> None:
        """Shows the newest episode of the run as it arrives, until something is moved."""
        if self.following or self.view is None:
            self.stop_following()
            return
        self.following = True
        self.repaint("subhead")
        if not await self._follow():
            self.tokens.move_to(len(self.view.tokens) - 1)
