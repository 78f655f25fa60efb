"""The panes of the watch screen as lines of rich text. Pure."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.text import Text

from agentrl_cli.config.choice import name_of
from agentrl_cli.reports.compare import METRICS
from agentrl_cli.reports.diagnosis import STAGES
from agentrl_cli.reports.reference import get_setting
from agentrl_cli.reports.run_data import RunData
from agentrl_cli.store.journal import HEALED
from agentrl_cli.tui.common.charts import OVER, bar, counts_line, short, span
from agentrl_cli.tui.common.text import BAD, FAINT, GOOD, HERE, TITLE, clip, line, num, pad, wrap

TITLES = {
    "reward": "REWARD",
    "eval": "SOLVED, eval",
    "solved": "SOLVED, training",
    "loss": "LOSS",
    "entropy": "ENTROPY",
    "zero_std": "NO SIGNAL",
    "tool_errors": "TOOL ERRORS",
    "kl": "KL",
    "mismatch": "MISMATCH",
    "grad_norm": "GRAD NORM",
    "length": "TOKENS/EP",
    "clip": "CLIPPED",
    "cut": "CUT OFF",
    "all_solved": "ALL SOLVED",
    "all_failed": "ALL FAILED",
    "tool_calls": "TOOL CALLS",
    "turns": "TURNS",
    "lr": "LEARNING RATE",
    "seconds": "SECONDS/STEP",
}
"""Titles of the curves of the overview."""
LOUD = "bold #ff8f6b"
COLORS = {"warn": BAD, "bad": LOUD, "error": LOUD, "info": FAINT, "ok": FAINT, "done": GOOD}
MARKS = {"ok": ".", "warn": "!", "bad": "!!", "done": "*"}
CONTROLS = ("p pause / resume", "k checkpoint now", "E evaluate now", "+ - rate", "X stop")


def head(data: RunData, width: int = 120) -> Text:
    """Return the first line: run, step, reward, eval, pace, state; small terminals cut the end, so state comes early
    there.
    """
    run, small, paused = data.run, width < 100, data.paused
    shown = "PAUSED" if paused else "LIVE" if run.state == "running" else run.state.upper()
    state = (f"   {shown}", GOOD if run.alive and not paused else BAD)
    name = clip(run.name, 24) if small else run.name
    text = Text(f"agentrl watch   {name}", "bold", no_wrap=True, overflow="ellipsis")
    total = f"/{run.total_steps}" if run.total_steps else ""
    pace, eta = data.seconds_per_step(), data.eta()
    bad = sum(check.level in ("warn", "bad") for check in data.health)
    top = any(check.level == "done" for check in data.health)
    parts = [
        state if small else ("", ""),
        (f"   step {data.step}{total}   reward {short(data.last('reward'))}", ""),
        (f"   eval {short(data.evals[-1].pass_rate)}" if data.evals else "", ""),
        (f"   {span(pace)}/step" if pace is not None else "", ""),
        (f"   ETA {span(eta)}" if eta and run.alive and not paused else "", ""),
        ("   AT THE CEILING" * top, GOOD),
        (f"   {bad} warning{'s' * (bad > 1)}" if bad else "", BAD),
        ("", "") if small else state,
    ]
    for part, style in parts:
        text.append(part, style)
    return text


def eval_series(data: RunData) -> list[tuple[float, float]]:
    """Return the (step, pass rate) pairs of the evaluations; one without a step counts as step 0."""
    rates = ((float(row.step or 0), row.pass_rate) for row in data.evals)
    return [(step, rate) for step, rate in rates if rate is not None] or data.series("eval/solved")


def control_steps(data: RunData) -> list[float]:
    """Return the steps during which a control was used, or the run healed: marks on the axis."""
    stamps = sorted((float(row["at"]), float(row["step"])) for row in data.steps if row.get("at"))
    controls = (
        event for event in data.events if str(event["kind"]).startswith(("control", HEALED))
    )
    places = (bisect_left(stamps, (float(event["at"]), -math.inf)) for event in controls)
    return [stamps[place][1] for place in places if place < len(stamps)]


def step_line(row: Mapping[str, Any]) -> str:
    """Return `step 12  14:03:11  reward 0.412  loss …`: a step's metrics in one line, the curated ones first."""
    at = time.strftime("%H:%M:%S", time.localtime(float(row["at"]))) if row.get("at") else ""
    numbers = []
    for name, stored in METRICS.items():
        value = next((row[key] for key in stored if isinstance(row.get(key), (int, float))), None)
        numbers.append("" if value is None else f"{name} {short(float(value))}")
    return "  ".join(filter(None, [f"step {row['step']}", at, *numbers]))


def log_lines(rows: Sequence[Mapping[str, Any]], title: str, width: int, limit: int) -> list[Text]:
    """Return the newest rows of a log or of alerts."""
    lines = [Text(title, TITLE)]
    for row in rows[-limit:]:
        level = str(row.get("level", "info"))
        mark = f"{level} " if level not in ("info", "INFO") else ""
        at = time.strftime("%H:%M:%S ", time.localtime(float(row["at"]))) if width >= 50 else ""
        text = " ".join(str(row["text"]).split())
        lines.append(line(f" {at}{mark}{text}", width, COLORS.get(level, "")))
    return lines if rows else [*lines, Text("  none", FAINT)]


def run_lines(data: RunData, width: int) -> list[Text]:
    """Return the run: model, pack, settings, progress, best evaluation, last checkpoint."""
    run = data.run
    age = (run.ended or data.read) - run.started if run.started else 0.0
    title = f"RUN {run.state} {span(age)}"
    name = f"  {run.name}"  # in the first line of the screen too
    lines = [line(title + name * (len(title + name) <= width), width, TITLE)]
    lines.append(line(f" {run.model}  {run.pack}", width))
    lines += [line(f" {text}", width, FAINT) for text in config_facts(run.config)]
    if run.total_steps:
        done = data.step / run.total_steps
        lines.append(Text(f" step {data.step} of {run.total_steps}  {done:.0%}"))
        lines.append(Text(f" {bar(done, min(width - 2, 24))}"))
    best = max(data.evals, key=lambda row: row.pass_rate or 0.0, default=None)
    if best is not None:
        lines.append(line(f" best eval {short(best.pass_rate)} at {best.step}", width))
        between = f"   95 % [{num(best.low, '.2f')}, {num(best.high, '.2f')}]"
        lines += [line(between, width, FAINT)] * (best.low is not None)
    for last in data.checkpoints[-1:]:
        kind = "" if last.kind == "step" else f" {last.kind},"
        lines.append(line(f" checkpoint{kind} step {last.step}", width, FAINT))
    return lines + [Text(clip(f" {run.error}", width * 2), BAD)] * bool(run.error)


def config_facts(config: Mapping[str, Any]) -> list[str]:
    """Return two lines of the settings that matter most; missing ones are left out."""
    get = partial(get_setting, config)
    group, prompts = get("rollout.group_size"), get("rollout.prompts_per_step")
    groups = f"G={group} x {prompts} prompts" if group and prompts else ""
    numbers = {
        "lr": get("train.lr"),
        "T": get("rollout.temperature"),
        "seed": config.get("seed"),
    }
    known = (f"{name} {value}" for name, value in numbers.items() if value is not None)
    rows = (name_of(get("algo.advantage")), groups), known
    return list(filter(None, ("  ".join(filter(None, row)) for row in rows)))


def time_lines(data: RunData, width: int) -> list[Text]:
    """Return where a step's time goes, as medians of the last ten steps; the device's metrics if
    the trainer logs them.
    """
    row, total = data.steps[-1] if data.steps else {}, data.usual("time/step")
    if not total:
        return []
    phases = (("roll", "time/rollout"), ("upd", "time/update"))
    shares = [(name, data.usual(stored)) for name, stored in phases if stored in row]
    rest = max(total - sum(seconds for _, seconds in shares), 0.0)
    lines = [line(f"TIME/STEP {span(total)}, median", width, TITLE)]
    for name, seconds in [*shares, ("other", rest)] if shares else []:
        part = bar(seconds / total, max(width - 15, 4))
        lines.append(line(f" {name:<5} {span(seconds):>7} {part}", width))
    if row.get("time/cpu"):
        lines.append(line(f" cpu   {span(data.usual('time/cpu')):>7}", width, FAINT))
    device = [
        line(f" {name.partition('/')[2]:<16} {short(value)}", width)
        for name, value in row.items()
        if name.startswith(("gpu/", "perf/", "memory/"))
    ]
    return [*lines, *[Text("GPU", TITLE)] * bool(device), *device[:6]]


def store_lines(data: RunData, width: int) -> list[Text]:
    """Return the store: episodes, size."""
    text = f"STORE {data.episodes:,} ep  {data.bytes / 2**20:,.1f} MiB"
    return [line(text, width, TITLE)] if data.bytes else []


def part_lines(data: RunData, width: int) -> list[Text]:
    """Return the reward parts of the last step, with a bar each."""
    lines = [Text("REWARD PARTS (mean)", TITLE)]
    for name, value in data.reward_parts():
        fill = "#" * max(min(round(abs(value) * 10), width - 19), 0)
        row = f" {pad(clip(name, 11), 11)} {num(value, '+.2f'):>5} {fill}"
        lines.append(Text(row[:width], BAD if value < 0 else ""))
    return lines if len(lines) > 1 else []


def health_lines(data: RunData, width: int, *, advice: bool = False) -> list[Text]:
    """Return the checks: value and level; with `advice`, how to improve them."""
    levels = [check.level for check in data.health]
    count = "  ".join(f"{levels.count(level)} {level}" for level in ("ok", "warn", "bad"))
    lines, room = [Text(f"HEALTH {count}"[:width], TITLE)], max(width - 4, 8)
    for check in data.health:
        if check.level == "ok" and not advice:
            continue
        color, text = COLORS[check.level], check.stage if check.level == "ok" else check.text
        lines += [
            Text(f" {'' if n else MARKS[check.level]:<2} {part}", color, no_wrap=True)
            for n, part in enumerate(wrap(text, room))
        ]
        why = wrap(STAGES[check.stage], width - 8) if advice else []
        lines += [Text(f"      {part}", FAINT) for part in why if part]
        if check.level != "ok" and (advice or check.level == "done"):
            todo = f"try: {check.advice} {check.command}"
            lines += [Text(f"    {part}", "bold") for part in wrap(todo, room)]
    return lines if advice else [*lines, Text(" d explains each check"[:width], FAINT)]


def histogram_lines(values: Sequence[float], width: int) -> list[Text]:
    """Return a histogram of the last step's advantages, −2.5 to 2.5, and the share of zeros, which teach nothing.

    No line without advantages.
    """
    if not values:
        return []
    bins = max(min(width - 2, 25) // 2 * 2 + 1, 5)
    zero = sum(abs(value) < 1e-6 for value in values) / len(values)
    places = (round((value + 2.5) / 5 * (bins - 1)) for value in values)
    return [
        line(f"ADVANTAGE zero {zero:.0%} of {len(values)}", width, TITLE),
        Text(f" {counts_line(places, bins)}", BAD if zero > 0.6 else GOOD, no_wrap=True),
        Text(f" -2.5{'0':^{bins - 8}}+2.5", FAINT, no_wrap=True),
    ]


def compare_lines(data: RunData, others: Sequence[RunData], width: int) -> list[Text]:
    """Return the reward and evaluation beside the other runs' at the same step."""
    lines: list[Text] = []
    for n, other in enumerate(others):
        lines.append(line(f"COMPARE {other.run.name}", width, f"bold {OVER[n % len(OVER)]}"))
        for name, mine, theirs in (
            ("reward", data.series("reward"), other.series("reward")),
            ("eval", eval_series(data), eval_series(other)),
        ):
            then = [point for point in theirs if point[0] <= data.step]
            if mine and then:
                text = f" {name} {short(mine[-1][1])} vs {short(then[-1][1])} at {then[-1][0]:.0f}"
                lines.append(line(text, width))
    return lines


def control_lines(data: RunData, width: int) -> list[Text]:
    """Return the controls, and those that wait for the trainer."""
    lines = [Text("CONTROL (asks first)", TITLE)]
    if not data.run.alive:
        return [*lines, Text(" the run has ended", FAINT)]
    waiting = wrap(f"waiting: {', '.join(data.pending)}", width - 1) if data.pending else []
    lines += [Text(f" {text}") for text in CONTROLS]
    return lines + [Text(f" {part}", HERE) for part in waiting]
