"""Watch: one run, live or finished. The trainer is its own process; this reads the store and writes only `controls`.

`q` detaches and the run never notices. Each tab is a page of its own (pages.py, overview.py); controls.py has the
commands to the run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.style import Style
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import ContentSwitcher, Static

from agentrl_cli.errors import pluralise
from agentrl_cli.reports.run_data import load, newer
from agentrl_cli.reports.spans import of_step
from agentrl_cli.tui.common.dialogs import Prompt
from agentrl_cli.tui.common.episode_list import Browse
from agentrl_cli.tui.common.keys import CLOSING, with_ids
from agentrl_cli.tui.common.plain_text import csv_text
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import ALARM, FAINT, join
from agentrl_cli.tui.watch import panels
from agentrl_cli.tui.watch.charts import Look
from agentrl_cli.tui.watch.controls import ControlScreen
from agentrl_cli.tui.watch.overview import OverviewPage, summary
from agentrl_cli.tui.watch.page import LinesPage, Page, Recent, Shown, load_recent
from agentrl_cli.tui.watch.pages import EpisodesPage, make_pages
from agentrl_cli.types.masking import mask_text

TABS = ("overview", "charts", "episodes", "groups", "tokens", "tools", "log", "config", "health")
WORKERS = "workers"
"""A tab more, on w, for runs whose episodes workers make."""
KEYS = (
    "1-9 tab  ↑/↓ choose  enter open  space freeze  f filter  y log axis  z zoom  [ ] range  r smooth  C compare run\n"
    "p pause  k checkpoint  E evaluate  + - rate  S set  X stop (ask)  x flagged  d health  ? keys  W words  q detach"
)
KEYS_SMALL = "1-9 tab ↑/↓ enter open  p pause k save E eval X stop  ? keys  q detach"
HELP = """\
1 overview  2 charts  3 episodes  4 groups  5 tokens  6 tools  7 log  8 config  9 or d health, with what to try
w            the workers, if others than the process of the run make its episodes
tab          the next tab                       l       log
↑ ↓ pgup pgdn  choose, or scroll                enter   open it in replay (q comes back); of an alert: its episodes
space        freeze or resume                   x       the flagged episodes of this run
p            pause after this step, or resume   k       checkpoint now
E            evaluate now                       X       stop after this step and save
+ -          learning rate × or ÷ 1.5           S       set lr, steps, max_grad_norm, train.eval and save
C            other trainings' curves, up to four, under these; a chosen one again: away
/ .          find text on the page, the next match; on the overview: which metrics
f            charts: which metrics; log: which lines; episodes: which ones (o sorts them)
y z [ ] r    charts: log axis, zoom to the last steps, earlier or later steps, means of 5 and 20
s e          this screen as SVG; every metric as a CSV file
W            the words of the screens, explained            T       where the time of the last step goes
q            detach: the training goes on; `agentrl watch` attaches again
ctrl+c       asks: detach, stop after this step, stop now

Everything that changes the run asks first, goes through the store and is recorded as an event;
curves carry a mark at every such change. A dot of a curve is the mean of the steps in its column
(the axis says of how many, `means of 3`); r averages further.
"""

BINDINGS: list[BindingType] = with_ids(
    "watch",
    [
        *(Binding(str(i + 1), f"tab('{name}')", name, show=False) for i, name in enumerate(TABS)),
        Binding("tab", "next_tab", "next tab", show=False),
        Binding("j,down", "choose(1)", "down", show=False),
        Binding("up", "choose(-1)", "up", show=False),
        Binding("pagedown", "choose(15)", "a page down", show=False),
        Binding("pageup", "choose(-15)", "a page up", show=False),
        Binding("g,home", "choose(-1000000)", "first", show=False),
        Binding("G,end", "choose(1000000)", "last", show=False),
        Binding("enter", "open", "open"),
        Binding("space", "freeze", "freeze"),
        Binding("p", "control('pause')", "pause"),
        Binding("k", "control('checkpoint')", "checkpoint"),
        Binding("E", "control('evaluate')", "evaluate"),
        Binding("X", "control('stop')", "stop"),
        Binding("plus", "rate(1.5)", "raise the rate", show=False),
        Binding("minus", "rate(0.6667)", "lower the rate", show=False),
        Binding("S", "set", "set a knob"),
        Binding("f", "filter", "filter"),
        Binding("slash", "find", "find"),
        Binding("full_stop", "find_again", "find again", show=False),
        Binding("o", "sort", "sort the episodes"),
        Binding("y", "log", "log axis"),
        Binding("z", "zoom", "zoom"),
        Binding("left_square_bracket", "range(-1)", "earlier steps", show=False),
        Binding("right_square_bracket", "range(1)", "later steps", show=False),
        Binding("r", "smooth", "smooth"),
        Binding("C", "compare", "curves of other runs"),
        Binding("x", "problems", "flagged episodes"),
        Binding("s", "svg", "svg"),
        Binding("e", "export", "metrics as CSV"),
        Binding("l", "tab('log')", "log", show=False),
        Binding("w", "tab('workers')", "workers", show=False),
        Binding("d", "tab('health')", "health", show=False),
        Binding("ctrl+c", "interrupt", "leave or stop", show=False, priority=True),
        Binding("question_mark", "help", "keys"),
        Binding("W", "words", "words", show=False),
        Binding("T", "time", "where the last step's time goes", show=False),
        Binding("q", "detach", "detach"),
        CLOSING[-1],
    ],
)


OTHERS = 4
"""Runs whose curves are laid under those of the watched one."""
POLL = 1.0
"""Seconds between looks at the store."""


class WatchScreen(ControlScreen):
    """The tabs of one run; reads the store every second and hands the data to the page in front."""

    BINDINGS = BINDINGS
    HELP_TITLE, HELP_TEXT = "watch", HELP
    recent = Recent()
    look = Look()
    tab = "overview"
    frozen = False

    def __init__(self, reader: Reader, run: str, *, follow: bool = False) -> None:
        """`follow`: a training that begins once this one has ended takes its place."""
        super().__init__(reader)
        self.run, self.following, self.browse = run, follow, Browse(run=run)
        self.take_actions(
            detach=self.action_back,
            range=lambda step: self._draw(
                self.look.move(step, self.data.step if self.data is not None else 0)
            ),
            smooth=lambda: self._draw(self.look.smoother()),
            log=lambda: self._draw(replace(self.look, log=not self.look.log)),
            zoom=lambda: self._draw(self.look.zoom()),
        )
        episodes = EpisodesPage(reader, self.browse, id="episodes")
        pages: list[Page] = [OverviewPage(id="overview"), episodes, *make_pages()]
        self.pages = {str(page.id): page for page in pages}

    def compose(self) -> ComposeResult:
        yield from (Static(id="head"), TabBar(id="tabs"), Static(id="summary"))
        yield ContentSwitcher(*self.pages.values(), initial=self.tab)
        yield Static(id="keys")

    def on_mount(self) -> None:
        self.put("head", Text(f"agentrl watch   {self.run}   reading …"))
        self.poll()
        self.set_interval(POLL, self.poll)

    def on_resize(self, event: Resize) -> None:
        width, height = event.size
        narrow = width < 100 or height < 28
        self.set_class(narrow, "-small")
        self.set_class(width >= 160 and not narrow, "-wide")
        self.set_class(width < 80 or height < 20, "-tiny")
        self.set_class(not narrow and (width < 112 or height < 34), "-mid")
        self.put("keys", Text(KEYS_SMALL if narrow else KEYS, no_wrap=True))

    @property
    def page(self) -> Page:
        """The page in front."""
        return self.pages[self.tab]

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        return self.frozen

    async def read_store(self) -> None:
        """Reads the new rows."""
        if self.following:
            self.run = await self.reader.call(newer, self.run)
            if self.data is not None and self.run != self.data.run.id:
                text = f"a new training began; {self.data.run.name} is in the list of runs"
                self.notify(text, timeout=6, markup=False)
        self.data = await self.reader.call(load, self.run, self.data)
        await self._read_page()

    async def _read_page(self) -> None:
        """Reads the data of the page in front alone."""
        if self.data is None:
            return
        self.browse.run = self.data.run.id
        if self.page.needs_recent:
            self.recent = await self.reader.call(load_recent, self.data.run.id)
        self.page.read_again()

    @work(exclusive=True, group="tab", exit_on_error=False)
    async def read_page(self) -> None:
        await self._read_page()
        self.paint()

    # -- painting -------------------------------------------------------------------------------------------------

    def paint(self) -> None:
        """Paints the head and the page in front, from the data of the last read."""
        data = self.data
        if self.problem:
            self.put("head", Text(self.problem, ALARM))
        elif data is not None:
            self.put("head", panels.head(data, self.size.width))
        if data is None:
            return
        state = "attached, q detaches" if data.run.alive else ""
        state = "FROZEN, space resumes" if self.frozen else state
        workers = bool(data.workers) or self.tab == WORKERS
        self.query_one(TabBar).show(self.tab, state, self.has_class("-small"), workers)
        if self.has_class("-mid"):
            self.put("summary", join(summary(data, self.size.width - 2)))
        self.page.draw(Shown(data, self.recent, self.look))

    def _draw(self, look: Look) -> None:
        self.look = look
        self.paint()

    # -- pages ----------------------------------------------------------------------------------------------------

    def action_tab(self, name: str) -> None:
        self.tab = name
        self.query_one(ContentSwitcher).current = name
        self.page.enter()
        self.paint()
        self.read_page()

    def action_next_tab(self) -> None:
        at = TABS.index(self.tab) if self.tab in TABS else -1
        self.action_tab(TABS[(at + 1) % len(TABS)])

    def action_problems(self) -> None:
        """Lists the episodes that carry a flag, or all again."""
        self.browse.filter = "" if self.browse.filter == "flag:*" else "flag:*"
        self.action_tab("episodes")

    def on_page_tab_wanted(self, event: Page.TabWanted) -> None:
        if event.filter is not None:
            self.browse.filter = event.filter
        self.action_tab(event.tab)

    def action_choose(self, step: int) -> None:
        self.page.choose(step)

    def action_open(self) -> None:
        self.page.open()

    def action_sort(self) -> None:
        self.page.sort()

    def action_filter(self) -> None:
        """Asks for the page's content, or which metrics the charts show."""

        def use(pattern: str) -> None:
            self.look = replace(self.look, pattern=pattern)
            self.action_tab(self.tab if self.page.has_charts else "charts")

        if not self.page.ask_filter() and self.data is not None:
            label = "metrics whose name holds (a regular expression)"
            names = "  ".join(self.data.names()[:24])
            self.ask(Prompt(label, self.look.pattern, help=names), use)

    def action_find(self) -> None:
        """Finds text on a page of lines; elsewhere asks for the page's filter."""
        if isinstance(self.page, LinesPage):
            self.action_find_text()
        else:
            self.action_filter()

    # -- curves ---------------------------------------------------------------------------------------------------

    @work(exclusive=True, group="compare", exit_on_error=False)
    async def action_compare(self) -> None:
        """Lays another training's curves under this one's; a training that is there already is taken away."""
        runs = await self.reader.call(lambda store: store.runs.all())
        here = self.data.run.id if self.data is not None else ""
        found = [run for run in runs if run.id != here and run.kind == "train" and run.step][:9]
        if not found:
            self.notify("No other training is in this store.", timeout=3)
            return
        shown = {other.run.id for other in self.look.others}
        ways = {
            f"{'-' if run.id in shown else '+'} {run.name}  {pluralise(run.step, 'step')}": partial(
                self._compare_with, run.id
            )
            for run in found
        }
        self.choose(f"curves of other trainings, {OTHERS} at most", ways)

    @work(exclusive=True, group="compare", exit_on_error=False)
    async def _compare_with(self, run: str) -> None:
        others = tuple(other for other in self.look.others if other.run.id != run)
        if len(others) == len(self.look.others):
            others = (*others, await self.reader.call(load, run, None))[-OTHERS:]
        self._draw(replace(self.look, others=others))

    # -- files ----------------------------------------------------------------------------------------------------

    def action_svg(self) -> None:
        """Writes the screen as a picture; asks first if it may show a secret."""
        data = self.data
        shown = () if data is None else (data.live, data.logs, data.alerts, data.events, data.run)
        texts = repr((shown, self.recent.tools))
        secret = mask_text(texts) != texts
        self.save_picture(Path(f"watch-{self.run}.svg"), f"agentrl watch {self.run}", secret=secret)

    def action_time(self) -> None:
        if self.data is not None:
            self.show_time(partial(of_step, run=self.data.run, step=self.data.step))

    def action_export(self) -> None:
        """Writes every metric of every step as CSV."""
        if self.data is None:
            return
        names = list(dict.fromkeys(name for row in self.data.steps for name in row))
        rows = ([row.get(name) for name in names] for row in self.data.steps)
        text = csv_text([names, *rows])
        self.write_file(Path(f"{self.data.run.name.replace('/', '-')}-metrics.csv"), text)

    def action_freeze(self) -> None:
        self.frozen = not self.frozen
        self.paint()


class TabBar(Static):
    """Every tab with its number in one line, and the state of the screen after them; a click shows a tab."""

    auto_links = False
    """A tab is not painted as a link."""

    def show(self, current: str, state: str, short: bool, workers: bool) -> None:
        """Marks the current tab; `short`: names of three letters, for small terminals; `workers`: the run has some."""
        line = Text(style=FAINT, no_wrap=True)
        keys = {str(number): tab for number, tab in enumerate(TABS, 1)}
        for key, tab in (keys | {"w": WORKERS} if workers else keys).items():
            name = tab.capitalize()
            label = f"[{key} {name}]" if tab == current else f" {key} {name[:3] if short else name}"
            line.append(label, Style(meta={"@click": f"screen.tab('{tab}')"}))
            line.append(" ")
        self.update(line.append(f"  {state}"), layout=False)
