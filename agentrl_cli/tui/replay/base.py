"""The replay screen without its actions: three panes, loading, painting, moving the cursor. Actions: replay.py.

Group and turns | transcript with token layers | reward, token, reasons. Reads through the reader only; every load is a
worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.common import panels, related
from agentrl_cli.tui.common.dialogs import AgentScreen
from agentrl_cli.tui.common.episode_view import EpisodeView, Fork, place_of, telling_sibling, token_at
from agentrl_cli.tui.common.layers import LAYERS
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.replay.keys import BINDINGS, KEYS, KEYS_SMALL

WIDE = 160
"""From this width on a sibling is shown beside the transcript."""

if TYPE_CHECKING:
    from agentrl_cli.tui.common.episode_table import Browse
    from agentrl_cli.tui.common.reader import Reader


class ReplayBase(AgentScreen):
    """One episode. `place` is (turn, token in the turn) to start at."""

    BINDINGS = BINDINGS

    def __init__(
        self, reader: Reader, episode_id: str, browse: Browse | None = None, place: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self.reader = reader
        self.episode_id = episode_id
        self.view: EpisodeView | None = None
        self.fork: Fork | None = None
        self.needle = ""
        self._place = place
        self._browse = browse
        self._version: int | None = None
        self._block = -1
        self._other = ""
        self._steps: list[Text] = []
        self.following = False
        """Whether the newest episode is shown as it comes (`L`); any movement ends that."""
        self._lines: dict[str, int] = {}
        self._made = 0
        """How many what-ifs and chats were stored of the episode."""

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="subhead")
        yield Static(id="strip")
        with Horizontal(id="body"):
            with VerticalScroll(id="left", classes="pane", can_focus=False):
                yield Static(id="group")
                yield Static(id="failure")
                yield Static(id="turns", classes="gap")
                yield Static(id="legend", classes="gap")
            with Vertical(id="middle", classes="pane"):
                with Horizontal(id="texts"):
                    with Vertical(id="mine"):
                        yield Static(id="mine-title")
                        yield TokenView(id="tokens")
                    with Vertical(id="beside"):
                        yield Static(id="beside-title")
                        yield TokenView(id="other")
                yield Static(id="diff")
                yield Static(id="map")
                yield Static(id="steps")
            with VerticalScroll(id="right", classes="pane", can_focus=False):
                yield Static(id="reward")
                yield Static(id="token", classes="gap")
                yield Static(id="why", classes="gap")
        yield Static(
            "This terminal is too small for replay: 60x16 at least,\nor `agentrl replay --plain`.", id="enlarge"
        )
        yield Static(id="status")
        yield Static(id="keys")

    def on_mount(self) -> None:
        self.tokens.focus()
        self.tokens.moved = self._paint_cursor
        self._set("head", Text(f"reading {self.episode_id} …"))
        self.load(self.episode_id, self._place)
        self.set_interval(1.0, self._poll)

    @property
    def tokens(self) -> TokenView:
        return self.query_one("#tokens", TokenView)

    @property
    def browse(self) -> Browse:
        if self._browse is None:
            from agentrl_cli.tui.common.episode_table import Browse

            self._browse = Browse()
        return self._browse

    @property
    def _cramped(self) -> bool:
        return self.has_class("-small") or self.has_class("-mid")

    def _set(self, name: str, text: Text) -> None:
        """Shows a text; the screen is laid out again only where its height may have changed."""
        lines, before = text.plain.count("\n"), self._lines.get(name)
        self._lines[name] = lines
        self.query_one(f"#{name}", Static).update(text, layout=lines != before)

    # -- size -----------------------------------------------------------------------------------------------------

    def on_resize(self, event: Resize) -> None:
        width, height = event.size
        tiny = width < 60 or height < 16
        small = not tiny and (width < 96 or height < 28)
        mid = not tiny and not small and (width < 116 or height < 36)
        wide = width >= WIDE and not small
        for name, on in (("tiny", tiny), ("small", small), ("mid", mid), ("wide", wide)):
            self.set_class(on, f"-{name}")
        if wide and self.view is not None and self._other != self.episode_id:
            self._load_rest(self.view)
        self.tokens.compact = small
        self.query_one("#keys", Static).update(Text(KEYS_SMALL if small or tiny else KEYS, no_wrap=True))
        self._lines.clear()
        self.call_after_refresh(self._paint)

    # -- loading --------------------------------------------------------------------------------------------------

    @work(exclusive=True, group="view", exit_on_error=False)
    async def load(self, episode_id: str, place: tuple[int, int] | None = None) -> None:
        """Reads an episode and shows it at (turn, token of the turn)."""
        try:
            view = await self.reader.view(episode_id)
        except AgentRLError as error:
            self._set("head", Text(f"{error.message} {error.hint}", "bold #ffb454"))
            return
        if self.view is None and view.signals is None:
            self.tokens.lens = "logp"  # nothing was trained here: the weight would be blank
        self.episode_id, self.view, self.fork, self._block = episode_id, view, None, -1
        self._made = 0
        self.tokens.show(view, token_at(view, place))
        self._paint()
        self._load_rest(view)

    # described, because Textual else describes the call by all numbers of the view: tens of milliseconds
    @work(exclusive=True, group="rest", exit_on_error=False, description="the rest of an episode")
    async def _load_rest(self, view: EpisodeView) -> None:
        """What may come after the first paint: the fork against a sibling, the place in the list."""
        sibling = telling_sibling(view)
        if sibling is not None:
            self.fork = await self.reader.fork(view, sibling)
            await self._show_other(view, sibling)
        self._paint_diff()
        await self._load_around(view)
        try:
            if self.browse.ids is None:
                await self.reader.call(self.browse.load)
        except AgentRLError as error:
            self._set("subhead", Text(error.message, panels.BAD))
            return
        self._paint_subhead()

    async def _load_around(self, view: EpisodeView) -> None:
        """The same task at other steps, the same flag in this step."""
        failure = await self.reader.call(related.same_failure, view.episode.id)
        self._made = await self.reader.call(related.children, view.episode.id)
        kind, steps = await self.reader.call(related.by_step, view.episode.id)
        step = view.episode.step
        self._set("failure", panels.join(panels.failure_lines(failure, step, self._inner("left"))))
        self.query_one("#failure").display = failure is not None
        self._steps = panels.step_lines(kind, steps, step, self._inner("middle"))
        self._set("steps", panels.join(self._steps))
        self.query_one("#steps").display = bool(self._steps) and not self._cramped

    async def _show_other(self, view: EpisodeView, sibling: str) -> None:
        """The sibling beside the transcript, where there is room for two."""
        if not self.has_class("-wide"):
            return
        other = self.query_one("#other", TokenView)
        other.lens = self.tokens.lens
        beside = await self.reader.view(sibling)
        other.show(beside, self.fork.position if self.fork is not None else 0)
        self.call_after_refresh(other.move_to, other.cursor)  # a pane that only just came has its size by then
        self._set("beside-title", panels.side_title("BESIDE", beside))
        self._other = view.episode.id

    @work(exclusive=True, group="poll", exit_on_error=False)
    async def _poll(self) -> None:
        """A running episode is read again when the store changed; the cursor stays where it is."""
        if self.view is None or not (self.view.running or self.following):
            return
        version = await self.reader.call(lambda store: store.data_version())
        changed, self._version = self._version is not None and version != self._version, version
        if changed and self.view.running:
            view = await self.reader.view(self.episode_id)
            at_end = self.following or self.tokens.cursor >= len(self.view.tokens) - 1
            self.view, self._block = view, -1
            self.tokens.show(view, len(view.tokens) - 1 if at_end else self.tokens.cursor, keep_scroll=True)
            self._paint()
        if changed and self.following and not self.view.running:
            await self._follow()

    async def _follow(self) -> bool:
        """Goes on to the newest episode; False where that is shown already."""
        run = self.view.episode.run_id if self.view is not None else None
        newest = await self.reader.call(related.newest, run, self.browse.run)
        if newest is None or newest == self.episode_id:
            return False
        self.browse.ids = None
        self.load(newest, (1 << 30, 1 << 30))
        return True

    def stop_following(self) -> None:
        """Any movement of a person's ends it."""
        if self.following:
            self.following = False
            self._paint_subhead()

    # -- painting -------------------------------------------------------------------------------------------------

    def _inner(self, name: str) -> int:
        return max(self.query_one(f"#{name}").size.width - 1, 20)

    def _paint(self) -> None:
        """Everything but the transcript, which paints itself."""
        if self.view is None:
            return
        view = self.view
        small = self.has_class("-small")
        self._set("head", Text("" if small else "agentrl replay   ", panels.TITLE) + panels.header(view, brief=small))
        self._set("mine-title", panels.side_title("HERE", view))
        self._set("group", panels.join(panels.group_lines(view, self._inner("left"))))
        self._set("reward", panels.join(panels.reward_lines(view, self._inner("right"))))
        self._set("why", panels.join(panels.reason_lines(view, self._inner("right"))))
        self._set("legend", panels.join(panels.legend_lines(LAYERS[self.tokens.lens], self._inner("left"))))
        self._set("strip", panels.group_strip(view))
        self._block = -1
        self._paint_subhead()
        self._paint_diff()
        self._paint_cursor(self.tokens.cursor)

    def _paint_subhead(self) -> None:
        if self.view is None:
            return
        text = self.browse.describe() if self._browse else ""
        if self.browse.ids is not None:
            text += f"   {len(self.browse.ids):,} episodes in the list"
        marks = ["FOLLOWING the newest episode"] if self.following else []
        marks += [f"TAGS {', '.join(self.view.tags)}"] if self.view.tags else []
        marks += [f"NOTE {self.view.note}"] if self.view.note else []
        marks += [f"{self._made} WHAT-IFS (R 4)"] if self._made else []
        line = Text(f"{text}   link {self.link()}", panels.FAINT, no_wrap=True)
        self._set("subhead", Text().append("   ".join([*marks, ""]), panels.HERE) + line)

    def _paint_diff(self) -> None:
        if self.view is None:
            return
        self.query_one("#diff").display = len(self.view.siblings) > 1 and not self._cramped
        self.query_one("#steps").display = bool(self._steps) and not self._cramped
        self._set("diff", panels.join(panels.fork_lines(self.fork, self.view, self._inner("middle"))))

    def _paint_cursor(self, token: int) -> None:
        """What follows the token cursor: inspector, map, the mark in the list of turns."""
        if self.view is None:
            return
        view, tokens = self.view, self.tokens
        self._set("token", panels.join(panels.token_lines(view, token, self._inner("right"))))
        if self.has_class("-small"):
            self._set("status", panels.join(panels.token_status(view, token, max(self.size.width - 2, 20))))
        layer = LAYERS[tokens.lens]
        lines = panels.map_lines(view, layer, tokens.levels, token, self._inner("middle"))
        self._set("map", panels.join([lines[1], lines[3]] if self.has_class("-small") and len(lines) > 3 else lines))
        block = view.block_of(token)
        if block != self._block:
            self._block = block
            self._set("turns", panels.join(panels.turn_lines(view, block, self._inner("left"))))

    def on_token_view_moved(self, event: TokenView.Moved) -> None:
        if event.view is self.tokens:
            self._paint_cursor(event.token)

    # -- moving ---------------------------------------------------------------------------------------------------

    def link(self) -> str:
        """`agentrl:EPISODE@tTURN.TOKEN`, which `agentrl replay` opens again."""
        if self.view is None or not self.view.blocks:
            return f"agentrl:{self.episode_id}"
        turn, offset = place_of(self.view, self.tokens.cursor)
        return f"agentrl:{self.episode_id}@t{turn}.{offset}"

    def action_turn(self, step: int) -> None:
        self.stop_following()
        self.tokens.move_turn(step)

    def action_token(self, step: int) -> None:
        self.stop_following()
        self.tokens.move(step)

    def action_line(self, step: int) -> None:
        self.stop_following()
        if not self._scrolled(step):
            self.tokens.move_lines(step)

    def action_page(self, sign: int) -> None:
        self.stop_following()
        if not self._scrolled(sign * max(self.size.height - 6, 1)):
            self.tokens.move_lines(sign * max(self.tokens.size.height - 2, 1))

    def _scrolled(self, lines: int) -> bool:
        """Scrolls the pane that hides the transcript on a small terminal; False where none does."""
        name = next((pane for pane in ("left", "right") if self.has_class(f"-show-{pane}")), "")
        if name:
            self.query_one(f"#{name}", VerticalScroll).scroll_relative(y=lines, animate=False)
        return bool(name)

    def action_end(self, last: int) -> None:
        self.stop_following()
        self.tokens.move_to(len(self.view.tokens) - 1 if last and self.view else 0)

    def action_sibling(self, step: int) -> None:
        self.stop_following()
        if self.view is None or len(self.view.siblings) < 2:
            self.notify("This episode has no siblings.", timeout=2)
            return
        ids = [row.id for row in self.view.siblings]
        at = ids.index(self.episode_id) if self.episode_id in ids else 0
        self.load(ids[(at + step) % len(ids)], place_of(self.view, self.tokens.cursor))

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def action_episode(self, step: int) -> None:
        """The next or previous episode of the list (its filter, its sort)."""
        self.stop_following()
        found = await self.reader.call(self.browse.neighbour, self.episode_id, step)
        if found is None:
            self.notify("No further episode in the list.", timeout=2)
        else:
            self.load(found)

    def action_layer(self, name: str) -> None:
        self.tokens.lens = name
        self.query_one("#other", TokenView).lens = name
        self._set("legend", panels.join(panels.legend_lines(LAYERS[name], self._inner("left"))))
