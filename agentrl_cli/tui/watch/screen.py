"""Watch: a training as it goes on. The trainer is its own process; this reads the store and writes only `controls`.

`q` detaches and the run never notices. Keys: watch_keys.py; painting: watch_base.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import work
from textual.events import Click
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError, UsageError
from agentrl_cli.store.redact import mask_text
from agentrl_cli.tui.common.dialogs import SECRET, Choose, Confirm, Help, Prompt, leave, picture
from agentrl_cli.tui.common.episode_table import filter_prompt
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.watch.base import WatchBase
from agentrl_cli.tui.watch.charts import SMOOTH, ZOOMS
from agentrl_cli.tui.watch.data import load
from agentrl_cli.tui.watch.keys import HELP, TABS

if TYPE_CHECKING:
    from agentrl_cli.store import Store


class WatchScreen(WatchBase):
    """One run, live or finished."""

    # -- keys -----------------------------------------------------------------------------------------------------

    def action_next_tab(self) -> None:
        self.action_tab(TABS[(TABS.index(self.tab) + 1) % len(TABS)])

    def action_problems(self) -> None:
        """The episodes tab with those that carry a flag."""
        self.browse.filter = "" if self.browse.filter == "flag:*" else "flag:*"
        self.action_tab("episodes")

    def action_choose(self, step: int) -> None:
        long = self.query_one("#long", Lines)
        if self.tab == "episodes":
            self.table.move_to(self.table.cursor + step)
        elif self.tab == "groups":
            self._line = max(0, min(self._line + step, len(self.pages.groups) - 1))
            self.paint()
            long.scroll_to(y=max(self._line + 2 - long.size.height // 2, 0), animate=False)
        elif self.tab != "overview" or self.data is None:
            long.scroll_relative(y=step, animate=False)
        else:
            count = len(self.data.live) + len(self.data.notable) + len(self._alerts)
            self.cursor = max(0, min(self.cursor + step, count - 1))
            self.paint()

    def action_open(self) -> None:
        """Replay of the chosen episode; a running one is followed there. Of an alert the episodes that it is about."""
        from agentrl_cli.tui.watch.panels import alert_filter

        if self.tab == "episodes":
            self.table.open_current()
            return
        if self.tab == "groups" and self._line < len(self.pages.groups):
            self.open_screen("replay", self.pages.groups[self._line].best)
            return
        if self.data is None or self.tab != "overview":
            return
        chosen = [row.episode_id for row in self.data.live] + [row.id for _, row in self.data.notable]
        if self._alerts and self.cursor >= len(chosen):
            about = alert_filter(self._alerts[min(self.cursor - len(chosen), len(self._alerts) - 1)])
            self.browse.filter = about or self.browse.filter
            self.action_tab("episodes" if about else "health")
        elif chosen:
            self.open_screen("replay", chosen[min(self.cursor, len(chosen) - 1)])

    def on_click(self, event: Click) -> None:
        """A click on a tab shows it, one on an episode of the overview chooses it, a second one opens it."""
        tabs, now = self.query_one("#tabs", Static), self.query_one("#now", Static)
        if tabs.region.contains(event.screen_x, event.screen_y):
            at, end = event.screen_x - tabs.content_region.x, 0
            for tab, name in zip(TABS, self._tab_names(), strict=True):
                end += len(name) + 1
                if end - len(name) - 1 <= at < end:
                    self.action_tab(tab)
                    return
        elif self.tab == "overview" and now.region.contains(event.screen_x, event.screen_y):
            place = self._rows.get(event.screen_y - now.content_region.y)
            if place is not None:
                again, self.cursor = place == self.cursor, place
                self.action_open() if again else self.paint()

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        """A click on a group chooses it, a second one opens it."""
        if event.line in self._targets:
            line = sorted(self._targets).index(event.line)
            again, self._line = line == self._line, line
            self.action_open() if again else self.paint()

    def action_filter(self) -> None:
        """Episodes by the filter language, lines of the log by text, metrics of the charts by a regular expression."""
        tab = self.tab
        if tab == "episodes":
            prompt = filter_prompt(self.browse.filter)
        elif tab == "log":
            prompt = Prompt("lines that hold", self.needle)
        else:
            names = "  ".join(self.data.names()[:24]) if self.data is not None else ""
            prompt = Prompt("metrics whose name holds (a regular expression)", self.look.pattern, help=names)

        def done(text: str | None) -> None:
            if text is None:
                return
            if tab == "episodes":
                self.browse.filter = text
            elif tab == "log":
                self.needle = text
            else:
                self.look = replace(self.look, pattern=text)
            self.action_tab(tab if tab in ("episodes", "log", "tokens", "tools") else "charts")

        self.app.push_screen(prompt, done)

    def action_sort(self) -> None:
        if self.tab == "episodes":
            self.next_sort()
            self.notify(f"sort {self.browse.sort}", timeout=2)

    def action_range(self, step: int) -> None:
        """Earlier or later steps, where the charts are zoomed."""
        if not self.look.last:
            self.look = replace(self.look, last=ZOOMS[1])
        most = int((self.data.step - 1) // self.look.last) if self.data is not None else 0
        self.look = replace(self.look, back=max(0, min(self.look.back - step, most)))
        self.paint()

    def action_smooth(self) -> None:
        self.look = replace(self.look, smooth=SMOOTH[(SMOOTH.index(self.look.smooth) + 1) % len(SMOOTH)])
        self.paint()

    def action_svg(self) -> None:
        """Writes the screen as a picture; asks first where what it says looks like a secret."""
        said = "" if self.data is None else repr((self.data.live, self.data.logs, self.data.alerts, self.data.events))
        said += "" if self.data is None else repr((self.data.run, self.pages.tools))
        if mask_text(said) != said:
            self.app.push_screen(Confirm(*SECRET), lambda yes: self._draw() if yes else None)
        else:
            self._draw()

    def _draw(self) -> None:
        self.app.clear_notifications()  # the picture is of the screen, not of what was just said
        self.call_after_refresh(self._svg)

    def _svg(self) -> None:
        self._write(Path(f"watch-{self.run}.svg"), picture(self.app, f"agentrl watch {self.run}"))

    def action_export(self) -> None:
        """Every metric of every step as CSV."""
        if self.data is None:
            return
        names = list(dict.fromkeys(name for row in self.data.steps for name in row))
        lines = [",".join(names)]
        lines += [",".join("" if row.get(n) is None else str(row[n]) for n in names) for row in self.data.steps]
        self._write(Path(f"{self.data.run.name}-metrics.csv"), "\n".join(lines) + "\n")

    def _write(self, path: Path, text: str) -> None:
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.notify(f"wrote {path.absolute()}", markup=False)

    def action_log(self) -> None:
        self.look = replace(self.look, log=not self.look.log)
        self.paint()

    def action_zoom(self) -> None:
        """All steps, the last 100, 30, 10."""
        self.look = replace(self.look, back=0, last=ZOOMS[(ZOOMS.index(self.look.last) + 1) % len(ZOOMS)])
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
        if action == "pause" and self.data is not None and self.data.paused:
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

    def action_set(self) -> None:
        """Any setting that may change while a run goes on."""

        def done(text: str | None) -> None:
            if text:
                values = read_knob(text)
                self._ask("set", values, f"{values['key']} becomes {values['value']:g} from the next step on.")

        help = f"one of {', '.join(KNOBS)}"
        self.app.push_screen(Prompt("set a knob", "eval_every=20", help=help, check=read_knob), done)

    def _ask(self, action: str, values: dict[str, Any], detail: str) -> None:
        if self.data is None or not self.data.run.alive:
            name = f" `agentrl train --resume {self.data.run.name}` goes on." if self.data is not None else ""
            self.notify(f"This run has ended.{name}", severity="warning", markup=False)
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


KNOBS = {"lr": float, "max_grad_norm": float, "steps": int, "eval_every": int, "save_every": int}
"""What may change while a run goes on, as `steering.CHANGEABLE` has it, and of which kind it is."""


def read_knob(text: str) -> dict[str, Any]:
    """`eval_every=20` as the values of a control: {"key": "train.eval_every", "value": 20}. Raises UsageError."""
    name, equals, value = text.partition("=")
    name = name.strip().removeprefix("train.")
    if name not in KNOBS or not equals:
        raise UsageError(f"There is nothing to set in {text!r}.", hint=f"For example {' or '.join(KNOBS)}=20.")
    try:
        return {"key": f"train.{name}", "value": KNOBS[name](value)}
    except ValueError:
        raise UsageError(f"{name} needs a number, not {value.strip()!r}.") from None


def _add_control(store: Store, run_id: str, action: str, values: dict[str, Any]) -> int:
    return store.add_control(run_id, action, values)
