"""The tabs of the watch screen but the overview: episodes, groups, and pages of lines, most of them one function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.widgets import Static

from agentrl_cli.hooks.loggers import flat
from agentrl_cli.reports.run_data import GroupRow, RunData
from agentrl_cli.store.journal import HEALED
from agentrl_cli.tui.common.charts import bar, counts_line, span
from agentrl_cli.tui.common.dialogs import Prompt
from agentrl_cli.tui.common.episode_list import EpisodeList
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.text import (
    ALARM,
    BAD,
    FAINT,
    GOOD,
    HERE,
    TITLE,
    clip,
    keep_end,
    line,
    num,
    pad,
    wrap,
)
from agentrl_cli.tui.watch.charts import chart_grid
from agentrl_cli.tui.watch.page import Fold, LinesPage, Page, Recent, Shown, fold_groups
from agentrl_cli.tui.watch.panels import health_lines, log_lines

GROUP_HEAD = 2
"""Lines above the first group."""


class EpisodesPage(EpisodeList, Page):
    """The run's episodes by a filter and an order."""

    def choose(self, step: int) -> None:
        self.table.move_by(step)

    def open(self) -> None:
        self.table.open_current()

    def sort(self) -> None:
        self.next_sort()
        self.notify(f"sort {self.browse.sort}", timeout=2)

    def on_episode_list_listed(self, event: EpisodeList.Listed) -> None:
        """Shows the error in the filter in place of the column titles."""
        if event.error:
            self.query_one("#columns", Static).update(Text(event.error, ALARM))
        else:
            self.show_columns()


class GroupsPage(LinesPage):
    """The groups of the newest steps, those without signal folded into a line a step.

    Enter opens the best attempt of the chosen group, or unfolds the line.
    """

    cursor = 0
    open_steps: frozenset[int] = frozenset()

    @property
    def rows(self) -> Sequence[GroupRow | Fold]:
        return (
            fold_groups(self.shown.recent.groups, self.open_steps) if self.shown is not None else ()
        )

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        return group_lines(shown.recent, self.cursor, width, self.open_steps)

    def choose(self, step: int) -> None:
        self.cursor = max(0, min(self.cursor + step, len(self.rows) - 1))
        self.draw_again()
        self.scroll_to(y=max(self.cursor + GROUP_HEAD - self.size.height // 2, 0), animate=False)

    def open(self) -> None:
        for row in self.rows[self.cursor : self.cursor + 1]:
            if isinstance(row, Fold):
                self.open_steps ^= {row.step}
                self.draw_again()
            else:
                self.host.open_screen("replay", row.best)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        """Chooses a row on a click, opens it on a second one."""
        row = event.line - GROUP_HEAD
        if row == self.cursor:
            self.open()
        elif 0 <= row < len(self.rows):
            self.cursor = row
            self.draw_again()


class LogPage(LinesPage):
    """Log and events by time; the end stays in sight until it is scrolled away."""

    needle = ""
    """The text that a line must contain."""

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        return event_lines(shown.data, self.needle, width)

    def draw(self, shown: Shown) -> None:
        at_end = self.at_end
        super().draw(shown)
        if at_end:
            self.enter()

    def enter(self) -> None:
        self.call_after_refresh(self.scroll_end, animate=False)

    def ask_filter(self) -> bool:
        def use(text: str) -> None:
            self.needle = text
            self.draw_again()
            self.enter()

        self.host.ask(Prompt("lines that hold", self.needle), use)
        return True


def make_pages() -> list[Page]:
    """Return the tabs of lines by their ids."""
    return [
        LinesPage("charts", lambda s, width: chart_grid(s.data, width, look=s.look), charts=True),
        GroupsPage("groups", recent=True),
        LinesPage("tokens", token_lines, recent=True, charts=True),
        LinesPage("tools", tool_lines, recent=True, charts=True),
        LogPage("log"),
        LinesPage("config", config_lines),
        LinesPage("health", check_lines),
        LinesPage("workers", lambda shown, width: worker_lines(shown.data, width)),
    ]


def check_lines(shown: Shown, width: int) -> list[Text]:
    """Return the things that the run waits for, every check with its advice, and the alerts."""
    alerts = log_lines(shown.data.alerts, "ALERTS", width, 200)
    waits = [line(f"waits for {text}", width, BAD) for text in shown.data.waits]
    return [*waits, *health_lines(shown.data, width, advice=True), Text(""), *alerts]


def group_lines(
    found: Recent, cursor: int, width: int, open_steps: Collection[int] = ()
) -> list[Text]:
    """Return every group of the newest steps: its rewards, their spread, and whether it was trained."""
    if not found.groups:
        return [Text("GROUPS", TITLE), Text("  no finished attempt yet", FAINT)]
    flat = sum(bool(group.kind) for group in found.groups)
    title = f"GROUPS {len(found.groups)}, {flat} of them without spread: nothing to learn there"
    head = f"  {'step':>5} {'task':<22} {'solved':>7} {'mean':>6} {'sd':>5}  rewards by sample"
    lines = [line(title, width, TITLE), Text(head[:width], FAINT)]
    for index, group in enumerate(fold_groups(found.groups, open_steps)):
        style = FAINT if isinstance(group, Fold) or group.kind else ""
        row = group.text() if isinstance(group, Fold) else _group_text(group)
        lines.append(line(row, width, HERE if index == cursor else style))
    return lines


def _group_text(group: GroupRow) -> str:
    count = len(group.rewards)
    mean = sum(group.rewards) / count if count else None
    solved = f"{group.solved:>3}/{count:<3}" if count else "runs   "
    rewards = " ".join(num(reward, ".1f") for reward in group.rewards)
    marks = [*(name for name in group.dispositions if name != "trained"), *group.flags]
    row = (
        f"  {group.step:>5} {pad(keep_end(group.task_id, 22), 22)} {solved} {num(mean, '6.2f'):>6}"
    )
    return f"{row} {group.spread:>5.2f}  {rewards}  {' '.join(marks)}"


def token_lines(shown: Shown, width: int) -> list[Text]:
    """Return the dispositions and lengths of the last step's episodes, then every metric per token as a curve."""
    data, found = shown.data, shown.recent
    lines, total = [Text(f"LAST STEP ({data.step})", TITLE)], len(found.lengths)
    for name, count in found.dispositions:
        text = f"  {name:<28} {count:>4} {bar(count / total, 22)}"
        lines.append(Text(text[:width], "" if name == "trained" else BAD))
    if ordered := sorted(found.lengths):
        cut, low, high = data.last("cut"), ordered[0], ordered[-1]
        p95 = ordered[min(int(total * 0.95), total - 1)]
        text = f"  sampled tokens an episode: median {ordered[total // 2]:,}, p95 {p95:,}, most {high:,}"
        lines.append(line(text + (f"; cut off {cut:.0%}" if cut is not None else ""), width))
        bins = min(max(width - 20, 10), 60)
        places = (int((value - low) / max(high - low, 1) * bins) for value in ordered)
        row = f"  {low:>7,} {counts_line(places, bins)} {high:,}"
        lines.append(Text(row, GOOD, no_wrap=True))
    metrics = (
        "completions|num_tokens|entropy|clip|logp|mismatch|approx_kl|^kl|ratio|drift|length|cut"
    )
    return [*lines, Text(""), *chart_grid(data, width, look=shown.look.only(metrics))]


def tool_lines(shown: Shown, width: int) -> list[Text]:
    """Return each tool's calls and failures in the newest steps, and their curves."""
    found = shown.recent
    lines = [Text(f"TOOLS since step {found.since}", TITLE)]
    head = f"  {'tool':<18} {'calls':>7} {'malformed':>10} {'failed':>8} {'mean':>8} {'slowest':>8}"
    head += "  kinds of error"
    lines.append(Text(head[:width] if found.tools else "  no tool was called", FAINT))
    for name, calls, malformed, failed, mean, slowest, kinds in found.tools:
        shares = f"{malformed / calls:>10.0%} {failed / calls:>8.0%}"
        row = (
            f"  {pad(clip(name, 18), 18)} {calls:>7,} {shares} {_wait(mean):>8} {_wait(slowest):>8}"
        )
        style = BAD if malformed + failed > 0.3 * calls else ""
        lines.append(line(f"{row}  {(kinds or '').replace(',', ' ')}", width, style))
    curves = chart_grid(shown.data, width, look=shown.look.only("tool|turns|branches"))
    return [*lines, Text(""), *curves]


def _wait(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds < 1 else span(seconds)


def event_lines(data: RunData, needle: str, width: int) -> list[Text]:
    """Return the log and events by time, the newest last."""
    events = [{"at": row["at"], "level": "event", "text": _event(row)} for row in data.events]
    rows = sorted([*data.logs, *events], key=lambda row: float(row["at"]))
    rows = [row for row in rows if needle.lower() in str(row["text"]).lower()]
    return log_lines(rows, f"LOG{f' holding {needle!r}' if needle else ''}", width, 400)


def _event(row: Mapping[str, Any]) -> str:
    data = row["data"] if isinstance(row["data"], Mapping) else {}
    values = (f"{name}={value}" for name, value in data.items() if name != "id")
    return " ".join([str(row["kind"]), *values])


def config_lines(shown: Shown, width: int) -> list[Text]:
    """Return every setting of the run; those that differ from the other run, or were changed during the run, are
    marked.
    """
    data, other = shown.data, next(iter(shown.look.others), None)
    mine, theirs = (
        {
            key: f"{value:g}" if isinstance(value, float) else str(value)
            for key, value in flat(run.config).items()
        }
        for run in (data.run, other.run if other is not None else data.run)
    )
    sets = [row["data"] for row in data.events if row["kind"] in ("control:set", HEALED)]
    changed = {str(one.get("key")): one.get("value", one.get("to")) for one in sets}
    title = f"CONFIG of {data.run.name}   seed {data.run.seed}   {data.run.dir}"
    lines, section = [line(title, width, TITLE)], ""
    for key, value in mine.items():
        head, _, rest = key.partition(".")
        if head != section:
            section = head
            lines.append(Text(section, "bold"))
        notes = [f"{other.run.name}: {theirs.get(key, '-')}"] if other is not None else []
        notes = notes if theirs.get(key, "-") != value else []
        notes += [f"changed while it ran to {changed[key]}"] if key in changed else []
        text = f"  {rest or key:<28} {value}"
        parts = wrap(text.strip(), max(width - 4, 20)) if len(text) > width else [text]
        rows = [parts[0], *(f"      {part}" for part in parts[1:])]
        lines += [Text(row, HERE if notes else "", no_wrap=True) for row in rows]
        lines += [Text(f"      {note}", BAD) for note in notes]
    return lines if mine else [*lines, Text("  none stored", FAINT)]


def worker_lines(data: RunData, width: int) -> list[Text]:
    """Return a line for each worker, and its last error under it."""
    if not data.workers:
        text = "  the process of the run makes the episodes itself (cluster.kind: here)"
        return [Text("WORKERS", TITLE), Text(text[:width], FAINT)]
    ready = [worker for worker in data.workers if worker.state == "ready"]
    title = f"WORKERS {len(data.workers)} ({data.workers[0].kind}), {len(ready)} ready"
    title += f", {sum(worker.rate for worker in ready):,.0f} tokens/s"
    node = max(8, *(min(len(worker.node), 24) for worker in data.workers))
    head = f"  {'':>4} {'node':<{node}} {'pid':>8} {'state':<9} {'weights':<18}"
    head += f" {'runs':>5} {'done':>8} {'tokens/s':>9} {'lost':>5}"
    lines = [line(title, width, TITLE), line(head, width, FAINT)]
    for worker, silent in zip(data.workers, data.silent, strict=True):
        version = keep_end(worker.version, 18)  # the step is at its end
        row = f"  {worker.number:>4} {pad(clip(worker.node, node), node)} {worker.pid:>8} {worker.state:<9}"
        row += f" {version:<18} {worker.running:>5} {worker.finished:>8,} {worker.rate:>9,.0f}"
        seen = f"  seen {span(silent)} ago" if silent else ""
        style = BAD if worker.state == "starting" else ""
        lines.append(line(f"{row} {worker.lost:>5}{seen}", width, style))
        lines += [line(f"         {worker.error}", width, BAD)] * bool(worker.error)
    return lines
