"""Replay: one episode in three panes, group and turns | transcript with token layers | reward, token, reasons.

Reads through the reader only; every load is a worker. Keys: replay_keys.py; ux.md 6.1 draws the screen.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui import panels
from agentrl_cli.tui.data import EpisodeView, Fork, next_flagged, place_of, telling_sibling, token_at
from agentrl_cli.tui.dialogs import AgentScreen, Choose, Help, Prompt, leave
from agentrl_cli.tui.layers import LAYERS
from agentrl_cli.tui.replay_keys import BINDINGS, HELP, KEYS, KEYS_SMALL
from agentrl_cli.tui.text import visible
from agentrl_cli.tui.tokenview import TokenView

if TYPE_CHECKING:
    from agentrl_cli.store import Store
    from agentrl_cli.tui.episodes import Browse
    from agentrl_cli.tui.reader import Reader


class ReplayScreen(AgentScreen):
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
        self._lines: dict[str, int] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="subhead")
        yield Static(id="strip")
        with Horizontal(id="body"):
            with VerticalScroll(id="left", classes="pane", can_focus=False):
                yield Static(id="group")
                yield Static(id="turns", classes="gap")
                yield Static(id="legend", classes="gap")
            with Vertical(id="middle", classes="pane"):
                yield TokenView(id="tokens")
                yield Static(id="diff")
                yield Static(id="map")
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
        self._set("head", Text(f"reading {self.episode_id} …"))
        self.load(self.episode_id, self._place)
        self.set_interval(1.0, self._poll)

    @property
    def tokens(self) -> TokenView:
        return self.query_one("#tokens", TokenView)

    @property
    def browse(self) -> Browse:
        if self._browse is None:
            from agentrl_cli.tui.episodes import Browse

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
        for name, on in (("tiny", tiny), ("small", small), ("mid", mid)):
            self.set_class(on, f"-{name}")
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
        self.tokens.show(view, token_at(view, place))
        self._paint()
        self._load_rest(view)

    @work(exclusive=True, group="rest", exit_on_error=False)
    async def _load_rest(self, view: EpisodeView) -> None:
        """What may come after the first paint: the fork against a sibling, the place in the list."""
        sibling = telling_sibling(view)
        if sibling is not None:
            self.fork = await self.reader.fork(view, sibling)
        self._paint_diff()
        try:
            if self.browse.ids is None:
                await self.reader.call(self.browse.load)
        except AgentRLError as error:
            self._set("subhead", Text(error.message, panels.BAD))
            return
        self._paint_subhead()

    @work(exclusive=True, group="poll", exit_on_error=False)
    async def _poll(self) -> None:
        """A running episode is read again when the store changed; the cursor stays where it is."""
        if self.view is None or not self.view.running:
            return
        version = await self.reader.call(lambda store: store.data_version())
        if self._version is not None and version != self._version:
            view = await self.reader.view(self.episode_id)
            at_end = self.tokens.cursor >= len(self.view.tokens) - 1
            self.view, self._block = view, -1
            self.tokens.show(view, len(view.tokens) - 1 if at_end else self.tokens.cursor, keep_scroll=True)
            self._paint()
        self._version = version

    # -- painting -------------------------------------------------------------------------------------------------

    def _inner(self, name: str) -> int:
        return max(self.query_one(f"#{name}").size.width - 1, 20)

    def _paint(self) -> None:
        """Everything but the transcript, which paints itself."""
        if self.view is None:
            return
        view = self.view
        self._set(
            "head", Text("" if self.has_class("-small") else "agentrl replay   ", panels.TITLE) + panels.header(view)
        )
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
        self._set("subhead", Text(f"{text}   link {self.link()}", panels.FAINT))

    def _paint_diff(self) -> None:
        if self.view is None:
            return
        self.query_one("#diff").display = len(self.view.siblings) > 1 and not self._cramped
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
        self._paint_cursor(event.token)

    # -- moving ---------------------------------------------------------------------------------------------------

    def link(self) -> str:
        """`agentrl:EPISODE@tTURN.TOKEN`, which `agentrl replay` opens again."""
        if self.view is None or not self.view.blocks:
            return f"agentrl:{self.episode_id}"
        turn, offset = place_of(self.view, self.tokens.cursor)
        return f"agentrl:{self.episode_id}@t{turn}.{offset}"

    def action_turn(self, step: int) -> None:
        self.tokens.move_turn(step)

    def action_token(self, step: int) -> None:
        self.tokens.move(step)

    def action_line(self, step: int) -> None:
        self.tokens.move_lines(step)

    def action_page(self, sign: int) -> None:
        self.tokens.move_lines(sign * max(self.tokens.size.height - 2, 1))

    def action_end(self, last: int) -> None:
        self.tokens.move_to(len(self.view.tokens) - 1 if last and self.view else 0)

    def action_sibling(self, step: int) -> None:
        if self.view is None or len(self.view.siblings) < 2:
            self.notify("This episode has no siblings.", timeout=2)
            return
        ids = [row.id for row in self.view.siblings]
        at = ids.index(self.episode_id) if self.episode_id in ids else 0
        self.load(ids[(at + step) % len(ids)], place_of(self.view, self.tokens.cursor))

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def action_episode(self, step: int) -> None:
        """The next or previous episode of the list (its filter, its sort)."""
        found = await self.reader.call(self.browse.neighbour, self.episode_id, step)
        if found is None:
            self.notify("No further episode in the list.", timeout=2)
        else:
            self.load(found)

    def action_layer(self, name: str) -> None:
        self.tokens.lens = name
        self._set("legend", panels.join(panels.legend_lines(LAYERS[name], self._inner("left"))))

    def action_next_flagged(self) -> None:
        if self.view is not None:
            token = next_flagged(self.view, self.tokens.cursor)
            if token is None:
                self.notify("No token stands out.", timeout=2)
            else:
                self.tokens.move_to(token)

    def action_find(self) -> None:
        def done(text: str | None) -> None:
            if text:
                self.needle = text
                self.action_find_again()

        self.app.push_screen(Prompt("find in this episode", self.needle), done)

    def action_find_again(self) -> None:
        count = self.tokens.find(self.needle)
        found = f"{count} matches, . for the next" if count else "nothing found"
        self.notify(f"{self.needle}: {found}" if self.needle else "/ finds text first", timeout=2, markup=False)

    # -- the list -------------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        def done(text: str | None) -> None:
            if text is not None:
                self.browse.filter, self.browse.ids = text, None
                self.open_first()

        self.app.push_screen(Prompt("filter", self.browse.filter), done)

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def open_first(self) -> None:
        """Opens the first episode that the filter lets through."""
        try:
            ids = await self.reader.call(self.browse.load)
        except AgentRLError as error:
            self.notify(f"{error.message} {error.hint}", severity="error", markup=False)
            return
        if not ids:
            self.notify("No episode matches.", severity="warning")
            return
        rows = await self.reader.call(lambda store: store.episode_rows(ids[:1]))
        self.load(rows[0].id)

    def action_sort(self) -> None:
        from agentrl_cli.tui.episodes import SORTS

        at = SORTS.index(self.browse.sort) if self.browse.sort in SORTS else -1
        self.browse.sort, self.browse.ids = SORTS[(at + 1) % len(SORTS)], None
        if self.view is not None:
            self._load_rest(self.view)

    def action_list(self) -> None:
        from agentrl_cli.tui.episodes import EpisodesScreen

        self.app.push_screen(EpisodesScreen(self.reader, self.browse))

    # -- the rest -------------------------------------------------------------------------------------------------

    def action_fold(self) -> None:
        self.tokens.fold()

    def action_pane(self) -> None:
        """Group, transcript, inspector in turn, where only one of them has room."""
        if not self.has_class("-small"):
            self.query_one("#right", VerticalScroll).scroll_page_down(animate=False)
            return
        order = ["", "-show-right", "-show-left"]
        here = next((name for name in order[1:] if self.has_class(name)), "")
        after = order[(order.index(here) + 1) % 3]
        for name in order[1:]:
            self.set_class(name == after, name)
        self.call_after_refresh(self._paint)

    def action_diff(self) -> None:
        if self.view is None or self.fork is None:
            self.notify("No sibling differs.", timeout=2)
            return
        self.tokens.move_to(min(self.fork.position, len(self.view.tokens) - 1))
        if self._cramped:
            lines = panels.fork_lines(self.fork, self.view, max(self.size.width - 12, 20))
            self.app.push_screen(Help("diff", "\n".join(line.plain for line in lines)))

    @work(exclusive=True, group="export", exit_on_error=False)
    async def action_export(self) -> None:
        path = Path(f"{self.episode_id}.jsonl").absolute()
        try:
            await self.reader.call(_export, self.episode_id, path)
        except (AgentRLError, OSError) as error:
            self.notify(str(error), severity="error", markup=False)
            return
        self.notify(f"wrote {path}", markup=False)

    def action_svg(self) -> None:
        path = Path(f"replay-{self.episode_id}.svg").absolute()
        try:
            path.write_text(self.app.export_screenshot(title=f"agentrl replay {self.episode_id}"), "utf-8")
        except OSError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        self.notify(f"wrote {path}", markup=False)

    def action_copy(self) -> None:
        targets = self.copy_targets()

        def done(choice: int | None) -> None:
            if choice is not None:
                self.app.copy_to_clipboard(targets[choice][1])
                self.notify(f"copied {targets[choice][0]}", timeout=2, markup=False)

        self.app.push_screen(Choose("copy", [f"{name:<12} {visible(text)[:60]}" for name, text in targets]), done)

    def copy_targets(self) -> list[tuple[str, str]]:
        """(name, text) of what `y` offers."""
        if self.view is None or not self.view.blocks:
            return [("episode id", self.episode_id)]
        block = self.view.blocks[self.view.block_of(self.tokens.cursor)]
        return [
            ("token", self.view.texts[self.tokens.cursor] if self.view.texts else ""),
            ("turn", "".join(self.view.texts[block.start : block.end])),
            ("transcript", "".join(self.view.texts)),
            ("episode id", self.episode_id),
            ("link", self.link()),
            ("token ids", " ".join(str(i) for i in self.view.tokens.ids[block.start : block.end].tolist())),
        ]

    def action_help(self) -> None:
        self.app.push_screen(Help("replay", HELP))

    def action_back(self) -> None:
        leave(self.app)


def _export(store: Store, episode_id: str, path: Path) -> None:
    from agentrl_cli.store.export import export_jsonl

    export_jsonl(store, [episode_id], path)
