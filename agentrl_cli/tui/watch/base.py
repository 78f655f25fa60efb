"""The watch screen without its actions: tabs, reading the store, painting. Actions: watch.py; ux.md 6.2 draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.common.episode_table import Browse, EpisodeTable, ListingScreen, head_text
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.panels import join
from agentrl_cli.tui.watch import panels as panes
from agentrl_cli.tui.watch.charts import Look, chart_grid
from agentrl_cli.tui.watch.data import WatchData, load
from agentrl_cli.tui.watch.keys import BINDINGS, KEYS, KEYS_SMALL, NAMES, TABS
from agentrl_cli.tui.watch.overview import curves_of, facts, small, tiny, wide
from agentrl_cli.tui.watch.pages import (
    Page,
    PageData,
    config_page,
    groups_page,
    load_page,
    log_page,
    tokens_page,
    tools_page,
)

if TYPE_CHECKING:
    from agentrl_cli.tui.common.reader import Reader

T = TypeVar("T")

POLL = 1.0
"""Seconds between looks at the store."""


class WatchBase(ListingScreen):
    """One run, live or finished."""

    BINDINGS = BINDINGS

    def __init__(self, reader: Reader, run: str) -> None:
        super().__init__()
        self.reader = reader
        self.run = run
        self.data: WatchData | None = None
        self.tab = "overview"
        self.cursor = 0
        self.frozen = False
        self.problem = ""
        self.look = Look()
        self.needle = ""
        """What lines of the log must hold."""
        self.browse = Browse(run=run)
        self.pages = PageData()
        self._line = 0
        """The chosen line of the groups."""
        self._targets: Mapping[int, str] = {}
        self._alerts: Sequence[Mapping[str, Any]] = ()
        """Lines of the page that open an episode, and which."""
        self._end = True
        """Whether the log sticks to its end."""
        self._version: int | None = None
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._rows: dict[int, int] = {}
        """Lines of the overview that a click chooses, and the cursor's place for each."""

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="tabs")
        yield Static(id="facts")
        with Horizontal(id="overview"):
            yield Static(id="curves", classes="pane")
            with Vertical(id="centre", classes="pane"):
                yield Static(id="now")
            yield Static(id="run", classes="pane")
        with Vertical(id="episodes"):
            yield Static(id="columns")
            yield EpisodeTable(id="table")
        yield Lines(id="long")
        yield Static(id="keys")

    def on_mount(self) -> None:
        self.query_one("#head", Static).update(Text(f"agentrl watch   {self.run}   reading …"))
        self.action_tab("overview")
        self.poll()
        self.set_interval(POLL, self.poll)

    def on_resize(self, event: Resize) -> None:
        width, height = event.size
        narrow = width < 100 or height < 28
        self.set_class(narrow, "-small")
        self.set_class(width >= 160 and not narrow, "-wide")
        self.set_class(width < 80 or height < 20, "-tiny")
        self.set_class(not narrow and (width < 112 or height < 34), "-mid")
        self.query_one("#columns", Static).update(head_text(event.size.width))
        self.query_one("#keys", Static).update(Text(KEYS_SMALL if narrow else KEYS, no_wrap=True))
        self.call_after_refresh(self.paint)

    @work(exclusive=True, group="poll", exit_on_error=False)
    async def poll(self) -> None:
        """Looks whether the store changed, and reads what is new."""
        if self.frozen:
            return
        try:
            version = await self.reader.call(lambda store: store.data_version())
            alive = self.data is not None and self.data.run.alive
            if version == self._version and not alive:
                return
            if version != self._version or self.data is None:
                self.data = await self.reader.call(load, self.run, self.data)
                await self._read_tab()
            self._version, self.problem = version, ""
        except AgentRLError as error:  # a locked or vanished store is shown; the next look may find it again
            self.problem = f"{error.message} {error.hint}".strip()
        self.paint()

    async def _read_tab(self) -> None:
        """What only some tabs show."""
        if self.data is None:
            return
        self.browse.run = self.data.run.id
        if self.tab in ("groups", "tokens", "tools"):
            self.pages = await self.reader.call(load_page, self.data.run.id)
        elif self.tab == "episodes":
            self.reload()

    @work(exclusive=True, group="tab", exit_on_error=False)
    async def read_tab(self) -> None:
        await self._read_tab()
        self.paint()

    def listed(self, count: int, error: str) -> None:
        self.query_one("#columns", Static).update(Text(error, "bold #ffb454") if error else head_text(self.size.width))

    # -- painting -------------------------------------------------------------------------------------------------

    def paint(self) -> None:
        """The visible tab, from what was read last."""
        if self.problem:
            self.query_one("#head", Static).update(Text(self.problem, "bold #ffb454"))
        if self.data is None:
            return
        if not self.problem:
            self.query_one("#head", Static).update(panes.head(self.data, self.size.width))
        self.query_one("#tabs", Static).update(self._tabs(self.data))
        if self.has_class("-mid"):
            self.query_one("#facts", Static).update(join(facts(self.data, self.size.width - 2)))
        if self.tab == "overview":
            self._paint_overview(self.data)
        elif self.tab != "episodes":
            data, look = self.data, (self.tab, self._line, self.needle, self.pages)
            self._paint_page(self._once("page", data, look, lambda: self._page(data)))

    def _tabs(self, data: WatchData) -> Text:
        said = "FROZEN, space goes on" if self.frozen else "attached, q detaches" if data.run.alive else ""
        return Text(f"{' '.join(self._tab_names())}   {said}", "#8a8a8a", no_wrap=True)

    def _tab_names(self) -> list[str]:
        short = self.has_class("-small")
        return [
            f"[{i + 1} {NAMES[name]}]" if name == self.tab else f" {i + 1} {NAMES[name][:3] if short else NAMES[name]}"
            for i, name in enumerate(TABS)
        ]

    def _paint_page(self, page: Page) -> None:
        long = self.query_one("#long", Lines)
        self._end = long.at_end
        if long.lines is not page.lines:
            long.show(page.lines)
        self._targets = page.targets
        if self.tab == "log" and self._end:
            self.call_after_refresh(long.scroll_end, animate=False)

    def _once(self, name: str, data: WatchData, more: Any, make: Callable[[], T]) -> T:
        """What `make` gives, made anew only where something it shows has changed: a poll a second must cost little."""
        newest = (len(data.steps), data.steps[-1:], data.evals, data.events[-1:], data.logs[-1:], data.alerts)
        key = (*newest, data.health, data.run.config, self.look, self.size, more)
        if self._kept.get(name, (None, None))[0] != key:
            self._kept[name] = key, make()
        found: T = self._kept[name][1]
        return found

    def _paint_overview(self, data: WatchData) -> None:
        curves, centre, run = (self.query_one(f"#{name}") for name in ("curves", "centre", "run"))
        if self.has_class("-small"):
            width, height = max(self.size.width - 4, 20), max(centre.size.height, 4)
            found = tiny(data, width, height) if self.has_class("-tiny") else small(data, width, height, self.cursor)
        else:
            found = wide(data, max(centre.size.width, 20), max(centre.size.height, 12), self.cursor)
            size = max(curves.size.width, 20), max(curves.size.height, 8)
            drawn = self._once("curves", data, size, lambda: curves_of(data, *size, self.look))
            self.query_one("#curves", Static).update(join(drawn))
        self._rows, self._alerts = found.rows, found.alerts
        self.query_one("#now", Static).update(join(found.lines))
        if not self.has_class("-small") and not self.has_class("-mid"):
            width = max(run.size.width, 16)
            right = [*panes.run_lines(data, width), Text(""), *panes.time_lines(data, width)]
            right += [*panes.histogram_lines(data.advantages, width), Text(""), *panes.store_lines(data, width)]
            right += [*panes.health_lines(data, width), Text(""), *panes.compare_lines(data, self.look.other, width)]
            self.query_one("#run", Static).update(join([*right, *panes.control_lines(data, width)]))

    def _page(self, data: WatchData) -> Page:
        """The tabs that scroll."""
        width = max(self.size.width - 3, 30)
        match self.tab:
            case "charts":
                return Page(chart_grid(data, width, look=self.look))
            case "groups":
                return groups_page(self.pages, self._line, width)
            case "tokens":
                return tokens_page(data, self.pages, self.look, width)
            case "tools":
                return tools_page(data, self.pages, self.look, width)
            case "config":
                return config_page(data, self.look.other, width)
            case "log":
                return log_page(data, self.needle, width)
        health = panes.health_lines(data, width, advice=True)
        return Page([*health, Text(""), *panes.alert_lines(data, width, 200)])

    def action_tab(self, name: str) -> None:
        self.tab = name
        shown = name if name in ("overview", "episodes") else "long"
        for part in ("overview", "episodes", "long"):
            self.query_one(f"#{part}").display = part == shown
        if shown == "long":
            long = self.query_one("#long", Lines)
            long.focus()
            long.scroll_home(animate=False, immediate=True)
        elif shown == "episodes":
            self.table.focus()
        self.paint()
        if name == "log":
            self.call_after_refresh(self.query_one("#long", Lines).scroll_end, animate=False)
        self.read_tab()
