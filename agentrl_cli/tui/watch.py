"""Watch: a training as it goes on. The trainer is its own process; this reads the store and writes only `controls`.

`q` detaches and the run never notices. Keys: `HELP`; ux.md 6.2 draws the screen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui import watch_panels as panes
from agentrl_cli.tui.dialogs import AgentScreen, Choose, Confirm, Help, Prompt, leave, named
from agentrl_cli.tui.panels import join
from agentrl_cli.tui.watch_charts import ZOOMS, Look, chart_grid
from agentrl_cli.tui.watch_data import WatchData, load

if TYPE_CHECKING:
    from agentrl_cli.store import Store
    from agentrl_cli.tui.reader import Reader

TABS = ("overview", "charts", "episodes", "log", "health")
KEYS = (
    "1 overview  2 charts  3 episodes  4 log  5 health   ↑/↓ choose  enter open  space freeze  C compare  f y z\n"
    "p pause  k checkpoint  E evaluate  + - rate  X stop (all ask first)   ctrl+p palette  ? keys  q detach"
)
KEYS_SMALL = "1-5 tab ↑/↓ enter open  p pause k save E eval X stop  ? keys  q detach"
HELP = """\
1 overview   2 charts (every metric)   3 episodes   4 log   5 health, with what to try
↑ ↓          choose a running or notable episode     enter   open it in replay; q comes back
space        freeze, and go on
p            pause after this step, or go on         k       checkpoint now
E            evaluate now                            X       stop after this step and save
C            another training's curves, dim, under these; again: away
f y z        charts: filter metrics, log axis, zoom to the last steps
+ -          learning rate times or divided by 1.5
q            detach: the training goes on; `agentrl watch` attaches again

Everything that changes the run asks first, goes through the store and is recorded as an event;
curves carry a mark where somebody changed something.
"""
POLL = 1.0
"""Seconds between looks at the store."""


class WatchScreen(AgentScreen):
    """One run, live or finished."""

    BINDINGS: ClassVar[list[BindingType]] = named(
        "watch",
        [
            *(Binding(str(i + 1), f"tab('{name}')", name, show=False) for i, name in enumerate(TABS)),
            Binding("tab", "next_tab", "next tab", show=False),
            Binding("j,down", "choose(1)", show=False),
            Binding("up", "choose(-1)", show=False),
            Binding("enter", "open", "open"),
            Binding("space", "freeze", "freeze"),
            Binding("p", "control('pause')", "pause"),
            Binding("k", "control('checkpoint')", "checkpoint"),
            Binding("E", "control('evaluate')", "evaluate"),
            Binding("X", "control('stop')", "stop"),
            Binding("plus", "rate(1.5)", show=False),
            Binding("minus", "rate(0.6667)", show=False),
            Binding("f", "filter", "filter metrics"),
            Binding("y", "log", "log axis"),
            Binding("z", "zoom", "zoom"),
            Binding("C", "compare", "compare with an earlier run"),
            Binding("l", "tab('log')", show=False),
            Binding("d", "tab('health')", show=False),
            Binding("ctrl+c", "interrupt", "leave or stop", show=False, priority=True),
            Binding("question_mark", "help", "keys"),
            Binding("q,escape", "detach", "detach"),
        ],
    )

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
        self._version: int | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="tabs")
        with Horizontal(id="overview"):
            yield Static(id="curves", classes="pane")
            with Vertical(id="centre", classes="pane"):
                yield Static(id="now")
            yield Static(id="run", classes="pane")
        with VerticalScroll(id="long", can_focus=True):
            yield Static(id="page")
        yield Static(id="keys")

    def on_mount(self) -> None:
        self.query_one("#head", Static).update(Text(f"agentrl watch   {self.run}   reading …"))
        self.action_tab("overview")
        self.poll()
        self.set_interval(POLL, self.poll)

    def on_resize(self, event: Resize) -> None:
        small = event.size.width < 100 or event.size.height < 28
        self.set_class(small, "-small")
        self.query_one("#keys", Static).update(Text(KEYS_SMALL if small else KEYS, no_wrap=True))
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
            self._version, self.problem = version, ""
        except AgentRLError as error:  # a locked or vanished store is shown; the next look may find it again
            self.problem = f"{error.message} {error.hint}".strip()
        self.paint()

    # -- painting -------------------------------------------------------------------------------------------------

    def paint(self) -> None:
        """The visible tab, from what was read last."""
        if self.problem:
            self.query_one("#head", Static).update(Text(self.problem, "bold #ffb454"))
        if self.data is None:
            return
        if not self.problem:
            self.query_one("#head", Static).update(panes.head(self.data))
        names = [f"[{i + 1} {name}]" if name == self.tab else f" {i + 1} {name} " for i, name in enumerate(TABS)]
        attached = (
            "FROZEN, space goes on" if self.frozen else "attached: q leaves it running" if self.data.run.alive else ""
        )
        self.query_one("#tabs", Static).update(Text(f"{' '.join(names)}    {attached}", "#8a8a8a", no_wrap=True))
        if self.tab == "overview":
            self._paint_overview(self.data)
        else:
            self.query_one("#page", Static).update(join(self._page(self.data)))

    def _paint_overview(self, data: WatchData) -> None:
        curves, centre, run = (self.query_one(f"#{name}") for name in ("curves", "centre", "run"))
        if self.has_class("-small"):
            width = max(self.size.width - 4, 20)
            lines = panes.small_lines(data, width)
            lines += panes.now_lines(data, width, 4, self.cursor)
            lines += panes.notable_lines(data, width, self.cursor - len(data.live))
            lines += panes.log_lines(data.alerts, "ALERTS", width, 2)
            self.query_one("#now", Static).update(join(lines))
            return
        self.query_one("#curves", Static).update(
            join(panes.curve_lines(data, max(curves.size.width, 20), max(curves.size.height, 8), self.look.other))
        )
        width, height = max(centre.size.width, 20), max(centre.size.height, 12)
        live = max(min(len(data.live), height - 24), 4)
        lines = panes.now_lines(data, width, live, self.cursor)
        lines += [Text(""), *panes.notable_lines(data, width, self.cursor - len(data.live)), Text("")]
        lines += [*panes.log_lines(data.alerts, "ALERTS", width, 4), Text("")]
        lines += panes.log_lines(data.logs, "LOG (4)", width, max(height - len(lines) - 1, 3))
        self.query_one("#now", Static).update(join(lines))
        width = max(run.size.width, 16)
        right = [*panes.run_lines(data, width), Text(""), *panes.histogram_lines(data.advantages, width), Text("")]
        right += [*panes.health_lines(data, width), Text(""), *panes.compare_lines(data, self.look.other, width)]
        self.query_one("#run", Static).update(join([*right, *panes.control_lines(data, width)]))

    def _page(self, data: WatchData) -> list[Text]:
        """The tabs that scroll."""
        width = max(self.size.width - 3, 30)
        if self.tab == "charts":
            return chart_grid(data, width, look=self.look)
        if self.tab == "health":
            return [
                *panes.health_lines(data, width, advice=True),
                Text(""),
                *panes.log_lines(data.alerts, "ALERTS", width, 200),
            ]
        events = [{"at": row["at"], "level": "event", "text": f"{row['kind']} {row['data']}"} for row in data.events]
        rows = sorted([*data.logs, *events], key=lambda row: float(row["at"]))
        return panes.log_lines(rows, "LOG", width, 400)

    # -- keys -----------------------------------------------------------------------------------------------------

    def action_tab(self, name: str) -> None:
        if name == "episodes":
            self._episodes()
            return
        self.tab = name
        self.query_one("#overview").display = name == "overview"
        self.query_one("#long").display = name != "overview"
        if name != "overview":
            self.query_one("#long").focus()
        self.paint()

    def action_next_tab(self) -> None:
        order = [name for name in TABS if name != "episodes"]
        self.action_tab(order[(order.index(self.tab) + 1) % len(order)])

    def _episodes(self) -> None:
        from agentrl_cli.tui.episodes import Browse, EpisodesScreen

        run = self.data.run.id if self.data is not None else None
        self.app.push_screen(EpisodesScreen(self.reader, Browse(run=run)))

    def action_choose(self, step: int) -> None:
        if self.data is None or self.tab != "overview":
            self.query_one("#long", VerticalScroll).scroll_relative(y=step, animate=False)
            return
        count = len(self.data.live) + len(self.data.notable)
        self.cursor = max(0, min(self.cursor + step, count - 1))
        self.paint()

    def action_open(self) -> None:
        """Replay of the chosen episode; a running one is followed there."""
        from agentrl_cli.tui.replay import ReplayScreen

        if self.data is None:
            return
        chosen = [row.episode_id for row in self.data.live] + [row.id for _, row in self.data.notable]
        if chosen:
            self.app.push_screen(ReplayScreen(self.reader, chosen[min(self.cursor, len(chosen) - 1)]))

    def action_filter(self) -> None:
        """Which metrics the charts show."""

        def done(text: str | None) -> None:
            if text is not None:
                self.look = replace(self.look, pattern=text)
                self.action_tab("charts")

        self.app.push_screen(Prompt("metrics whose name holds (a regular expression)", self.look.pattern), done)

    def action_log(self) -> None:
        self.look = replace(self.look, log=not self.look.log)
        self.paint()

    def action_zoom(self) -> None:
        """All steps, the last 100, 30, 10."""
        self.look = replace(self.look, last=ZOOMS[(ZOOMS.index(self.look.last) + 1) % len(ZOOMS)])
        self.paint()

    @work(exclusive=True, group="compare", exit_on_error=False)
    async def action_compare(self) -> None:
        """Draws another training's curves under this one's; again takes them away."""
        if self.look.other is not None:
            self.look = replace(self.look, other=None)
            self.paint()
            return
        runs = await self.reader.call(lambda store: store.runs())
        here = self.data.run.id if self.data is not None else ""
        others = [run for run in runs if run.id != here and run.kind == "train" and run.step][:9]
        if not others:
            self.notify("There is no other training in this store.", timeout=3)
            return

        def done(choice: int | None) -> None:
            if choice is not None:
                self._compare_with(others[choice].id)

        self.app.push_screen(Choose("compare with", [f"{run.name}  {run.step} steps" for run in others]), done)

    @work(exclusive=True, group="compare", exit_on_error=False)
    async def _compare_with(self, run: str) -> None:
        self.look = replace(self.look, other=await self.reader.call(load, run, None))
        self.paint()

    def action_freeze(self) -> None:
        self.frozen = not self.frozen
        self.paint()

    def action_control(self, action: str) -> None:
        if action == "pause" and self.data is not None and paused(self.data):
            action = "resume"
        detail = {
            "pause": "The trainer stops after this step and waits; p goes on.",
            "resume": "The trainer goes on with the next step.",
            "checkpoint": "A checkpoint is written after this step.",
            "evaluate": "An evaluation runs after this step.",
            "stop": "The step is finished, a checkpoint is written, the process ends. `train --resume` goes on.",
        }[action]
        self._ask(action, {}, detail)

    def action_rate(self, factor: float) -> None:
        rate = self.data.last("lr") if self.data is not None else None
        if rate is None and self.data is not None:
            train = self.data.run.config.get("train")
            rate = float(train["lr"]) if isinstance(train, dict) and "lr" in train else None
        if rate is None:
            self.notify("The learning rate of this run is not known.", severity="warning")
            return
        new = float(f"{rate * factor:.3g}")
        self._ask("set", {"key": "train.lr", "value": new}, f"Learning rate {rate:g} → {new:g} from the next step on.")

    def _ask(self, action: str, values: dict[str, Any], detail: str) -> None:
        if self.data is None or not self.data.run.alive:
            self.notify("This run has ended.", severity="warning")
            return

        def done(yes: bool | None) -> None:
            if yes:
                self._send(action, values)

        self.app.push_screen(Confirm(f"{action} {self.data.run.name}?", detail), done)

    @work(group="control", exit_on_error=False)
    async def _send(self, action: str, values: dict[str, Any]) -> None:
        if self.data is None:
            return
        try:
            await self.reader.write(_add_control, self.data.run.id, action, values)
        except AgentRLError as error:
            self.notify(f"{error.message} {error.hint}", severity="error", markup=False)
            return
        self._version = None
        self.notify(f"{action}: asked the trainer", markup=False)

    def action_interrupt(self) -> None:
        """Ctrl-C asks: detach, or stop after this step."""
        if self.data is None or not self.data.run.alive:
            leave(self.app)
            return

        def done(choice: int | None) -> None:
            if choice == 0:
                leave(self.app)
            elif choice == 1:
                self._send("stop", {})
            elif choice == 2:
                self._send("stop", {"now": True})

        choices = ["detach: the training goes on", "stop after this step, save", "stop now: --resume repeats the step"]
        self.app.push_screen(Choose(f"{self.data.run.name} is running", choices), done)

    def action_help(self) -> None:
        self.app.push_screen(Help("watch", HELP))

    def action_detach(self) -> None:
        leave(self.app)


def paused(data: WatchData) -> bool:
    """True where the newest pause or resume that was taken is a pause."""
    kinds = [str(event["kind"]) for event in data.events if str(event["kind"]) in ("control:pause", "control:resume")]
    return bool(kinds) and kinds[-1] == "control:pause"


def _add_control(store: Store, run_id: str, action: str, values: dict[str, Any]) -> int:
    return store.add_control(run_id, action, values)
