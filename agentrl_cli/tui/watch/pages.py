"""The tabs of watch beside overview and charts: groups, tokens, tools, log, config. Pure but for `load_page`.

A page is lines, of which some can be chosen: enter opens the episode that belongs to them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.text import Text

from agentrl_cli.tui.common.charts import bar, span
from agentrl_cli.tui.common.panels import BAD, FAINT, GOOD, HERE, TITLE, clip, num, wrap
from agentrl_cli.tui.common.token_text import keep_end
from agentrl_cli.tui.watch.charts import Look, chart_grid
from agentrl_cli.tui.watch.data import WatchData
from agentrl_cli.tui.watch.panels import log_lines

if TYPE_CHECKING:
    from agentrl_cli.store import EpisodeRow, Store

NEWEST = 640
"""Episodes of a run, from the newest, that the pages look at."""
TOKEN_METRICS = r"completions|num_tokens|entropy|clip|logp|mismatch|approx_kl|^kl|ratio|drift|length|cut"
TOOL_METRICS = r"tool|turns"


@dataclass(frozen=True, slots=True)
class GroupLine:
    """The attempts at one task in one step."""

    step: int
    task_id: str
    rewards: tuple[float, ...]
    solved: int
    facts: tuple[str, ...]
    flags: tuple[str, ...]
    best: str
    """The id of the episode to open."""

    @property
    def spread(self) -> float:
        """Standard deviation of the rewards: without any there is nothing to learn."""
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else 0.0
        return math.sqrt(sum((r - mean) ** 2 for r in self.rewards) / len(self.rewards)) if self.rewards else 0.0


@dataclass(frozen=True, slots=True)
class PageData:
    """What the pages need beyond `WatchData`."""

    groups: tuple[GroupLine, ...] = ()
    lengths: tuple[int, ...] = ()
    """Sampled tokens of the episodes of the newest finished step."""
    facts: tuple[tuple[str, int], ...] = ()
    """What became of those episodes: trained, or skipped and why."""
    tools: tuple[Sequence[Any], ...] = ()
    since: int = 0
    """The first step that `tools` counts."""


@dataclass(frozen=True, slots=True)
class Page:
    """Lines; `targets` maps a line to the episode that enter opens there."""

    lines: list[Text]
    targets: Mapping[int, str] = field(default_factory=dict)


def load_page(store: Store, run_id: str) -> PageData:
    """The newest episodes of a run by group, and its tools (in the reader's thread)."""
    rows = store.episode_rows(store.episode_ids("kind:train", "-step", run_id, limit=NEWEST))
    groups: dict[tuple[int, str], list[EpisodeRow]] = {}
    for row in rows:
        groups.setdefault((row.step or 0, row.group_id or row.task_id), []).append(row)
    steps = sorted({row.step or 0 for row in rows if row.outcome is not None}, reverse=True)
    done = [s for s in steps if all(row.outcome is not None for row in rows if row.step == s)]
    last = [row for row in rows if done and row.step == done[0]]
    since = max(steps[0] - 19, 0) if steps else 0
    return PageData(
        tuple(_group(step, members) for (step, _), members in groups.items()),
        tuple(row.n_model_tokens for row in last),
        tuple(Counter(row.fact or "not yet decided" for row in last).most_common()),
        tuple(store.tool_stats(run_id, since)),
        since,
    )


def _group(step: int, rows: Sequence[EpisodeRow]) -> GroupLine:
    graded = [row for row in rows if row.reward is not None and not (row.outcome and row.outcome.is_error)]
    best = max(graded, key=lambda row: row.reward or 0.0) if graded else rows[0]
    return GroupLine(
        step,
        rows[0].task_id,
        tuple(row.reward for row in sorted(graded, key=lambda row: row.sample) if row.reward is not None),
        sum(str(row.outcome) == "solved" for row in rows),
        tuple(name for name, _ in Counter(row.fact for row in rows if row.fact).most_common()),
        tuple(name for name, _ in Counter(flag for row in rows for flag in row.flags).most_common(3)),
        best.id,
    )


def groups_page(found: PageData, cursor: int, width: int) -> Page:
    """Every group of the newest steps: its rewards, their spread, and whether anything was learned from it."""
    if not found.groups:
        return Page([Text("GROUPS", TITLE), Text("  no finished attempt yet", FAINT)])
    flat = sum(group.spread < 1e-8 for group in found.groups if group.rewards)
    lines = [
        Text(clip(f"GROUPS {len(found.groups)}, {flat} of them without spread: nothing to learn there", width), TITLE),
        Text(f"  {'step':>5} {'task':<22} {'solved':>7} {'mean':>6} {'sd':>5}  rewards by sample"[:width], FAINT),
    ]
    targets: dict[int, str] = {}
    for index, group in enumerate(found.groups):
        mean = sum(group.rewards) / len(group.rewards) if group.rewards else None
        solved = f"{group.solved:>3}/{len(group.rewards):<3}" if group.rewards else "runs   "
        row = f"  {group.step:>5} {keep_end(group.task_id, 22):<22} {solved}"
        row += f" {num(mean, '6.2f'):>6} {group.spread:>5.2f}  "
        row += " ".join(num(reward, ".1f") for reward in group.rewards)
        row += "  " + " ".join([*(fact for fact in group.facts if fact != "trained"), *group.flags])
        style = HERE if index == cursor else FAINT if group.spread < 1e-8 else ""
        targets[len(lines)] = group.best
        lines.append(Text(clip(row, width), style, no_wrap=True))
    return Page(lines, targets)


def tokens_page(data: WatchData, found: PageData, look: Look, width: int) -> Page:
    """Lengths and what became of the last step's episodes, then every metric per token as a curve."""
    lines = [Text(f"LAST STEP ({data.step})", TITLE)]
    total = sum(count for _, count in found.facts)
    for fact, count in found.facts:
        text = f"  {fact:<28} {count:>4} {bar(count / total, 22)}"
        lines.append(Text(text[:width], "" if fact == "trained" else BAD))
    if found.lengths:
        ordered = sorted(found.lengths)
        cut = data.last("cut")
        middle, high = ordered[len(ordered) // 2], ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)]
        text = f"  sampled tokens an episode: median {middle:,}, p95 {high:,}, most {ordered[-1]:,}"
        lines.append(Text(clip(text + (f"; cut off {cut:.0%}" if cut is not None else ""), width)))
        lines += _histogram(found.lengths, width)
    grid = chart_grid(data, width, look=look.only(TOKEN_METRICS))
    return Page([*lines, Text(""), *grid])


def _histogram(values: Sequence[int], width: int) -> list[Text]:
    bins, low, high = min(max(width - 20, 10), 60), min(values), max(values)
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / max(high - low, 1) * bins), bins - 1)] += 1
    cells = "".join(" ▁▂▃▄▅▆▇█"[min(math.ceil(count / max(counts) * 8), 8)] for count in counts)
    return [Text(f"  {low:>7,} {cells} {high:,}", GOOD, no_wrap=True)]


def tools_page(data: WatchData, found: PageData, look: Look, width: int) -> Page:
    """Each tool's calls and failures in the newest steps, then their curves."""
    lines = [Text(f"TOOLS since step {found.since}", TITLE)]
    if not found.tools:
        lines.append(Text("  no tool was called", FAINT))
    else:
        head = f"  {'tool':<18} {'calls':>7} {'malformed':>10} {'failed':>8} {'mean':>8} {'slowest':>8}  kinds of error"
        lines.append(Text(head[:width], FAINT))
    for name, calls, malformed, failed, mean, slowest, kinds in found.tools:
        bad = (malformed + failed) / calls if calls else 0.0
        row = f"  {clip(name, 18):<18} {calls:>7,} {malformed / calls:>10.0%} {failed / calls:>8.0%}"
        row += f" {_wait(mean):>8} {_wait(slowest):>8}  {(kinds or '').replace(',', ' ')}"
        lines.append(Text(clip(row, width), BAD if bad > 0.3 else "", no_wrap=True))
    return Page([*lines, Text(""), *chart_grid(data, width, look=look.only(TOOL_METRICS))])


def _wait(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds < 1 else span(seconds)


def log_page(data: WatchData, needle: str, width: int) -> Page:
    """Log and events by time, the newest last."""
    events = [{"at": row["at"], "level": "event", "text": _event(row)} for row in data.events]
    rows = sorted([*data.logs, *events], key=lambda row: float(row["at"]))
    if needle:
        rows = [row for row in rows if needle.lower() in str(row["text"]).lower()]
    return Page(log_lines(rows, f"LOG{f' holding {needle!r}' if needle else ''}", width, 400))


def _event(row: Mapping[str, Any]) -> str:
    data = row["data"] if isinstance(row["data"], Mapping) else {}
    return " ".join([str(row["kind"]), *(f"{name}={value}" for name, value in data.items() if name != "id")])


def config_page(data: WatchData, other: WatchData | None, width: int) -> Page:
    """Every setting of the run; what an earlier run had otherwise, and what was changed while it ran, is marked."""
    mine = dict(flat(data.run.config))
    theirs = dict(flat(other.run.config)) if other is not None else mine
    changed = {
        str(row["data"].get("key")): row["data"].get("value") for row in data.events if row["kind"] == "control:set"
    }
    lines = [Text(clip(f"CONFIG of {data.run.name}   seed {data.run.seed}   {data.run.dir}", width), TITLE)]
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
        for number, part in enumerate(wrap(text.strip(), max(width - 4, 20)) if len(text) > width else [text]):
            lines.append(Text(part if number == 0 else f"      {part}", HERE if notes else "", no_wrap=True))
        lines += [Text(f"      {note}", BAD) for note in notes]
    return Page(lines if mine else [*lines, Text("  none stored", FAINT)])


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, value) of nested settings."""
    out: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            out += flat(value, f"{prefix}{name}.")
        else:
            out.append((f"{prefix}{name}", f"{value:g}" if isinstance(value, float) else str(value)))
    return out
