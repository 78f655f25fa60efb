"""The pages of watch that scroll: charts, groups, tokens, tools, log, config, health."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.text import Text

from agentrl_cli.tui.common.charts import bar, span
from agentrl_cli.tui.common.dialogs import Prompt
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.text import BAD, FAINT, GOOD, HERE, TITLE, clip, num, wrap
from agentrl_cli.tui.common.token_text import keep_end
from agentrl_cli.tui.watch.charts import Look, chart_grid
from agentrl_cli.tui.watch.data import WatchData
from agentrl_cli.tui.watch.page import LinesPage, Shown
from agentrl_cli.tui.watch.panels import alert_lines, health_lines, log_lines
from agentrl_cli.tui.watch.recent import Fold, GroupLine, Recent, folded

TOKEN_METRICS = (
    r"completions|num_tokens|entropy|clip|logp|mismatch|approx_kl|^kl|ratio|drift|length|cut"
)
TOOL_METRICS = r"tool|turns|branches"
GROUP_HEAD = 2
"""Lines above the first group."""


class ChartsPage(LinesPage):
    """Every metric as a curve."""

    HAS_CHARTS = True

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        return chart_grid(shown.data, width, look=shown.look)


class GroupsPage(LinesPage):
    """The groups of the newest steps, those without signal folded into a line a step.

    Enter opens the best attempt of the chosen group, or unfolds the line.
    """

    NEEDS_RECENT = True

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.cursor = 0
        self.open_steps: frozenset[int] = frozenset()

    @property
    def rows(self) -> Sequence[GroupLine | Fold]:
        return folded(self.shown.recent.groups, self.open_steps) if self.shown is not None else ()

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        return group_lines(shown.recent, self.cursor, width, self.open_steps)

    def choose(self, step: int) -> None:
        self.cursor = max(0, min(self.cursor + step, len(self.rows) - 1))
        self.draw_again()
        self.scroll_to(y=max(self.cursor + GROUP_HEAD - self.size.height // 2, 0), animate=False)

    def open(self) -> None:
        rows = self.rows
        row = rows[self.cursor] if self.cursor < len(rows) else None
        if isinstance(row, Fold):
            self.open_steps ^= {row.step}
            self.draw_again()
        elif row is not None:
            self.post_message(self.Opened(row.best))

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        """A click on a row chooses it, a second one opens it."""
        row = event.line - GROUP_HEAD
        if not 0 <= row < len(self.rows):
            return
        if row == self.cursor:
            self.open()
        else:
            self.cursor = row
            self.draw_again()


class TokensPage(LinesPage):
    """Lengths and dispositions of the last step's episodes, and every metric per token."""

    NEEDS_RECENT = HAS_CHARTS = True

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        return token_lines(shown.data, shown.recent, shown.look, width)


class ToolsPage(LinesPage):
    """Calls and failures of each tool, and their curves."""

    NEEDS_RECENT = HAS_CHARTS = True

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        return tool_lines(shown.recent, width) + chart_grid(
            shown.data, width, look=shown.look.only(TOOL_METRICS)
        )


class LogPage(LinesPage):
    """Log and events by time; the end stays in sight until it is scrolled away."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.needle = ""
        """What a line must contain."""

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        return event_lines(shown.data, self.needle, width)

    def draw(self, shown: Shown) -> None:
        at_end = self.at_end
        super().draw(shown)
        if at_end:
            self.call_after_refresh(self.scroll_end, animate=False)

    def enter(self) -> None:
        super().enter()
        self.call_after_refresh(self.scroll_end, animate=False)

    def ask_filter(self) -> None:
        def use(text: str) -> None:
            self.needle = text
            self.draw_again()
            self.enter()

        self.ask(Prompt("lines that hold", self.needle), use)


class ConfigPage(LinesPage):
    """Every setting of the run."""

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        return config_lines(shown.data, next(iter(shown.look.others), None), width)


class HealthPage(LinesPage):
    """Every check with what to try, and the alerts."""

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        return [
            *health_lines(shown.data, width, advice=True),
            Text(""),
            *alert_lines(shown.data, width, 200),
        ]


def group_lines(
    found: Recent, cursor: int, width: int, open_steps: Collection[int] = ()
) -> list[Text]:
    """Return every group of the newest steps: its rewards, their spread, and whether it was trained."""
    if not found.groups:
        return [Text("GROUPS", TITLE), Text("  no finished attempt yet", FAINT)]
    flat = sum(group.flat for group in found.groups)
    lines = [
        Text(
            clip(
                f"GROUPS {len(found.groups)}, {flat} of them without spread: nothing to learn there",
                width,
            ),
            TITLE,
        ),
        Text(
            f"  {'step':>5} {'task':<22} {'solved':>7} {'mean':>6} {'sd':>5}  rewards by sample"[
                :width
            ],
            FAINT,
        ),
    ]
    for index, group in enumerate(folded(found.groups, open_steps)):
        row = group.text() if isinstance(group, Fold) else _group_text(group)
        dim = isinstance(group, Fold) or group.flat
        lines.append(
            Text(clip(row, width), HERE if index == cursor else FAINT if dim else "", no_wrap=True)
        )
    return lines


def _group_text(group: GroupLine) -> str:
    mean = sum(group.rewards) / len(group.rewards) if group.rewards else None
    solved = f"{group.solved:>3}/{len(group.rewards):<3}" if group.rewards else "runs   "
    row = f"  {group.step:>5} {keep_end(group.task_id, 22):<22} {solved}"
    row += f" {num(mean, '6.2f'):>6} {group.spread:>5.2f}  "
    row += " ".join(num(reward, ".1f") for reward in group.rewards)
    return (
        row
        + "  "
        + " ".join([*(name for name in group.dispositions if name != "trained"), *group.flags])
    )


def token_lines(data: WatchData, found: Recent, look: Look, width: int) -> list[Text]:
    """Dispositions and lengths of the last step's episodes, then every metric per token as a curve."""
    lines = [Text(f"LAST STEP ({data.step})", TITLE)]
    total = sum(count for _, count in found.dispositions)
    for name, count in found.dispositions:
        text = f"  {name:<28} {count:>4} {bar(count / total, 22)}"
        lines.append(Text(text[:width], "" if name == "trained" else BAD))
    if found.lengths:
        ordered = sorted(found.lengths)
        cut = data.last("cut")
        middle, high = (
            ordered[len(ordered) // 2],
            ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)],
        )
        text = f"  sampled tokens an episode: median {middle:,}, p95 {high:,}, most {ordered[-1]:,}"
        lines.append(Text(clip(text + (f"; cut off {cut:.0%}" if cut is not None else ""), width)))
        lines += _histogram(found.lengths, width)
    return [*lines, Text(""), *chart_grid(data, width, look=look.only(TOKEN_METRICS))]


def _histogram(values: Sequence[int], width: int) -> list[Text]:
    bins, low, high = min(max(width - 20, 10), 60), min(values), max(values)
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / max(high - low, 1) * bins), bins - 1)] += 1
    cells = "".join(" ▁▂▃▄▅▆▇█"[min(math.ceil(count / max(counts) * 8), 8)] for count in counts)
    return [Text(f"  {low:>7,} {cells} {high:,}", GOOD, no_wrap=True)]


def tool_lines(found: Recent, width: int) -> list[Text]:
    """Return each tool's calls and failures in the newest steps."""
    lines = [Text(f"TOOLS since step {found.since}", TITLE)]
    if not found.tools:
        lines.append(Text("  no tool was called", FAINT))
    else:
        head = f"  {'tool':<18} {'calls':>7} {'malformed':>10} {'failed':>8} {'mean':>8} {'slowest':>8}  kinds of error"
        lines.append(Text(head[:width], FAINT))
    for name, calls, malformed, failed, mean, slowest, kinds in found.tools:
        bad = (malformed + failed) / calls if calls else 0.0
        row = (
            f"  {clip(name, 18):<18} {calls:>7,} {malformed / calls:>10.0%} {failed / calls:>8.0%}"
        )
        row += f" {_wait(mean):>8} {_wait(slowest):>8}  {(kinds or '').replace(',', ' ')}"
        lines.append(Text(clip(row, width), BAD if bad > 0.3 else "", no_wrap=True))
    return [*lines, Text("")]


def _wait(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds < 1 else span(seconds)


def event_lines(data: WatchData, needle: str, width: int) -> list[Text]:
    """Log and events by time, the newest last."""
    events = [{"at": row["at"], "level": "event", "text": _event(row)} for row in data.events]
    rows = sorted([*data.logs, *events], key=lambda row: float(row["at"]))
    if needle:
        rows = [row for row in rows if needle.lower() in str(row["text"]).lower()]
    return log_lines(rows, f"LOG{f' holding {needle!r}' if needle else ''}", width, 400)


def _event(row: Mapping[str, Any]) -> str:
    data = row["data"] if isinstance(row["data"], Mapping) else {}
    return " ".join(
        [str(row["kind"]), *(f"{name}={value}" for name, value in data.items() if name != "id")]
    )


def config_lines(data: WatchData, other: WatchData | None, width: int) -> list[Text]:
    """Return every setting of the run; those that differ from the other run, or were changed during the run, are
    marked.
    """
    mine = dict(flat(data.run.config))
    theirs = dict(flat(other.run.config)) if other is not None else mine
    changed = {
        str(row["data"].get("key")): row["data"].get("value")
        for row in data.events
        if row["kind"] == "control:set"
    }
    lines = [
        Text(
            clip(f"CONFIG of {data.run.name}   seed {data.run.seed}   {data.run.dir}", width), TITLE
        )
    ]
    section = ""
    for key, value in mine.items():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines.append(Text(section, "bold"))
        notes = []
        if other is not None and theirs.get(key, "-") != value:
            notes.append(f"{other.run.name}: {theirs.get(key, '-')}")
        if key in changed:
            notes.append(f"changed while it ran to {changed[key]}")
        text = f"  {key.partition('.')[2] or key:<28} {value}"
        for number, part in enumerate(
            wrap(text.strip(), max(width - 4, 20)) if len(text) > width else [text]
        ):
            lines.append(
                Text(part if number == 0 else f"      {part}", HERE if notes else "", no_wrap=True)
            )
        lines += [Text(f"      {note}", BAD) for note in notes]
    return lines if mine else [*lines, Text("  none stored", FAINT)]


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, value) of nested settings."""
    out: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            out += flat(value, f"{prefix}{name}.")
        else:
            out.append(
                (f"{prefix}{name}", f"{value:g}" if isinstance(value, float) else str(value))
            )
    return out
