"""The panes of the watch screen as lines of rich text. Pure."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from agentrl_cli.config.choice import name_of
from agentrl_cli.tui.common.charts import OVER, bar, short, span, sparkline
from agentrl_cli.tui.common.text import BAD, FAINT, GOOD, HERE, TITLE, clip, flag_names, num, wrap
from agentrl_cli.tui.common.token_text import keep_end
from agentrl_cli.tui.watch.data import WatchData
from agentrl_cli.types import FAULTS

TITLES = {
    "reward": "REWARD",
    "eval": "SOLVED, eval",
    "loss": "LOSS",
    "entropy": "ENTROPY",
    "zero_std": "NO SIGNAL",
    "tool_errors": "TOOL ERRORS",
    "kl": "KL",
    "grad_norm": "GRAD NORM",
    "length": "TOKENS/EP",
    "all_solved": "ALL SOLVED",
    "all_failed": "ALL FAILED",
}
"""Titles of the curves of the overview."""
SMALL = ("reward", "loss", "entropy", "zero_std", "tool_errors", "kl")
"""The curves of a small terminal."""
EXPLAIN = {
    "groups": "A group whose attempts all got the same reward has no advantage and teaches nothing.",
    "ceiling": "Every attempt at nearly every task is solved: equal rewards have no advantage, so nothing moves.",
    "tools": "Share of tool calls that failed: malformed, unknown, bad arguments, exceptions, timeouts.",
    "cut": "Share of episodes that a token limit cut off: they are graded unfinished.",
    "mismatch": "How far the sampler's log-probabilities are from the trainer's: ratios lie where this is large.",
    "kl": "Distance from the reference model; a fast rise often comes before a collapse.",
    "entropy": "How undecided the policy is per token; near zero it tries nothing new.",
    "nan": "A loss or gradient that is not a number spoils the weights for good.",
    "hacking": "Training reward rises while the evaluation does not: the policy may game the reward.",
    "spike": "A gradient far above its usual size; one bad batch can undo many steps.",
    "pace": "Wall time of a step against the usual; a stuck tool or a full disk shows here first.",
    "loop": "Share of episodes that make the same call with the same arguments again and again.",
    "errors": "The sandbox, the environment or a limit of time failed: such episodes are masked, not trained.",
    "drift": "What was trained differs in structure from what the chat template would render.",
    "disk": "Checkpoints and tokens need room; what cannot be written ends the run.",
    "process": "Whether the trainer's process is there.",
}
COLORS = {
    "warn": BAD,
    "bad": "bold #ff8f6b",
    "error": "bold #ff8f6b",
    "info": FAINT,
    "ok": FAINT,
    "done": GOOD,
}


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def head(data: WatchData, width: int = 120) -> Text:
    """Return the first line: run, step, reward, eval, pace, state; small terminals cut the end, so state comes early
    there.
    """
    run, small = data.run, width < 100
    shown = "PAUSED" if data.paused else "LIVE" if run.state == "running" else run.state.upper()
    state, colour = f"   {shown}", GOOD if run.alive and not data.paused else BAD
    name = clip(run.name, 24) if small else run.name
    text = Text(f"agentrl watch   {name}", "bold", no_wrap=True, overflow="ellipsis")
    if small:
        text.append(state, colour)
    total = f"/{run.total_steps}" if run.total_steps else ""
    text.append(f"   step {data.step}{total}   reward {short(data.last('reward'))}", "")
    if data.evals:
        text.append(f"   eval {short(data.evals[-1].pass_rate)}")
    pace, eta = data.seconds_per_step(), data.eta()
    if pace is not None:
        text.append(f"   {span(pace)}/step")
    if eta and run.alive and not data.paused:
        text.append(f"   ETA {span(eta)}")
    if any(check.level == "done" for check in data.health):
        text.append("   AT THE CEILING", GOOD)
    bad = sum(1 for check in data.health if check.level in ("warn", "bad"))
    if bad:
        text.append(f"   {bad} warning{'s' * (bad > 1)}", BAD)
    if not small:
        text.append(state, colour)
    return text


def eval_series(data: WatchData) -> list[tuple[float, float]]:
    """(step, pass rate) of the evaluations; one without a step counts as step 0."""
    found = [
        (float(row.step or 0), row.pass_rate) for row in data.evals if row.pass_rate is not None
    ]
    return found or data.series("eval/solved")


def part_lines(data: WatchData, width: int) -> list[Text]:
    """Return the reward parts of the last step, with a bar each."""
    lines = [Text("REWARD PARTS (mean)", TITLE)]
    for name, value in data.reward_parts():
        fill = "#" * max(min(round(abs(value) * 10), width - 19), 0)
        lines.append(
            Text(
                f" {name[:11]:<11} {num(value, '+.2f'):>5} {fill}"[:width], BAD if value < 0 else ""
            )
        )
    return [*lines, Text("")] if len(lines) > 1 else []


def control_steps(data: WatchData) -> list[float]:
    """Return the steps during which a control was used: marks on the axis."""
    stamps = sorted((float(row["at"]), float(row["step"])) for row in data.steps if row.get("at"))
    whens = [
        float(event["at"]) for event in data.events if str(event["kind"]).startswith("control")
    ]
    places = (bisect_left(stamps, (at, -math.inf)) for at in whens)
    return [stamps[place][1] for place in places if place < len(stamps)]


def now_lines(data: WatchData, width: int, limit: int, cursor: int) -> list[Text]:
    """Return the current step: progress and the running episodes."""
    title = Text("NOW ", TITLE, no_wrap=True)
    if data.run.alive and data.evaluating:
        title.append(f"EVALUATION after step {data.step}: {data.done} done, {len(data.live)} run")
    elif data.run.alive and data.live:
        total = data.wanted or data.done + len(data.live)
        cells = min(max(width - 30, 6), 24)
        title.append(
            f"step {data.step + 1}  ROLLOUT {bar(data.done / max(total, 1), cells)} {data.done}/{total}"
        )
    elif data.paused:
        title.append(f"paused after step {data.step}: p resumes", BAD)
    elif data.run.alive:
        title.append("no episode runs: scoring, updating or saving", FAINT)
    else:
        title.append(f"{data.run.state}", FAINT)
    lines, wide = [title], width >= 60
    task, kind = (18, 11) if wide else (max(width - 21, 4), 5)
    if data.live and limit:
        lines.append(
            Text(clip(f"  # {'task':<{task}} turn {'phase':<{kind}}    time", width), FAINT)
        )
    first = first_live(data, limit, cursor)
    for index, row in list(enumerate(data.live))[first : first + limit]:
        tail = " ".join(row.text.split())
        seconds = max((data.read if data.run.alive else row.updated) - row.started, 0.0)
        phase = {"processing_tools": "tool", "generating": "gen", "interacting": "user"}.get(
            row.state, row.state
        )
        line = (
            f"{row.sample:>3} {keep_end(row.task_id, task):<{task}} {row.turn:>{4 if wide else 2}}"
        )
        line += f" {phase[:kind]:<{kind}} {span(seconds):>7}  "
        room = max(width - len(line), 0) if wide else 0
        lines.append(
            Text(
                line + tail[-room:] if room else line[:width],
                HERE if index == cursor else "",
                no_wrap=True,
            )
        )
    if len(data.live) > limit:
        lines.append(Text(f"    … {len(data.live)} run", FAINT))
    return lines


def first_live(data: WatchData, limit: int, cursor: int) -> int:
    """Return the running episode that the first of `limit` lines shows."""
    return max(0, min(cursor - limit // 2, len(data.live) - limit))


def live_lines(data: WatchData, width: int, limit: int, cursor: int) -> list[Text]:
    """Return the chosen running episode: the end of its newest text in at most `limit` lines."""
    if cursor >= len(data.live) or limit < 1:
        return []
    row = data.live[cursor]
    title = f"LIVE #{row.sample} {row.task_id}  turn {row.turn}  {row.state}   enter opens it"
    parts = [part for line in row.text.splitlines() for part in wrap(line, width - 2)]
    lines = [Text(clip(title, width), TITLE, no_wrap=True)]
    lines += [Text(f"  {part}", no_wrap=True) for part in parts[-limit:]]
    return lines if parts else [*lines, Text("  its first turn is being generated", FAINT)]


def notable_lines(data: WatchData, width: int, cursor: int) -> list[Text]:
    """Episodes of the last step that are worth opening; the cursor counts from the first of them."""
    lines = [Text(f"LAST STEP ({data.step}), worth a look", TITLE, no_wrap=True)]
    if not data.notable:
        return [*lines, Text("  no finished step yet", FAINT)]
    most = min(18, max(width - 25, 6))
    room = max(len(keep_end(row.task_id, most)) for _, row in data.notable)
    for index, (why, row) in enumerate(data.notable):
        task = keep_end(row.task_id, most)
        line = f" {why:<6}{task:<{room}} #{row.sample:<2} {num(row.reward, '5.2f')} {num(row.advantage):>5}"
        line += f" {row.n_turns:>2}t {flag_names(row.flags)}"
        lines.append(Text(clip(line, width), HERE if index == cursor else "", no_wrap=True))
    if data.flags:
        counted = "  ".join(f"{name} x{count}" for name, count in data.flags)
        lines.append(Text(clip(f" flags {counted}   x lists them", width), FAINT, no_wrap=True))
    if data.signal.groups:
        lines += [
            Text(f" {part}", FAINT, no_wrap=True) for part in wrap(data.signal.text(), width - 1)
        ]
    return lines


def alert_lines(data: WatchData, width: int, limit: int, cursor: int = -1) -> list[Text]:
    """Return the newest kinds of alerts, each once; the cursor counts from the first that is shown."""
    lines = log_lines(data.alerts, "ALERTS", width, limit)
    if data.alerts and 0 <= cursor < len(lines) - 1:
        lines[cursor + 1].stylize(HERE)
    return lines


ABOUT = {
    "truncated": "flag:TRUNC",
    "mask": "flag:MASK",
    "drift": "flag:DRIFT",
    "errors": f"outcome:{','.join(FAULTS)},drift",
    "ungraded": "outcome:ungraded",
    "bad_tokens": "fact:skipped:bad_tokens",
}
"""Alerts about some episodes of their step only, as a filter."""


def alert_filter(alert: Mapping[str, Any]) -> str:
    """Return the episodes that an alert is about, as a filter; empty if it names no step."""
    if not alert.get("last_step"):
        return ""
    return " ".join(filter(None, [f"step:{alert['last_step']}", ABOUT.get(str(alert["name"]))]))


def log_lines(rows: Sequence[Mapping[str, Any]], title: str, width: int, limit: int) -> list[Text]:
    """Return the newest rows of a log or of alerts."""
    lines = [Text(title, TITLE)]
    if not rows:
        return [*lines, Text("  none", FAINT)]
    for row in rows[-limit:]:
        level = str(row.get("level", "info"))
        mark = f"{level} " if level not in ("info", "INFO") else ""
        text = " ".join(str(row["text"]).split())
        when = f"{clock(float(row['at']))} " if width >= 50 else ""
        lines.append(Text(clip(f" {when}{mark}{text}", width), COLORS.get(level, ""), no_wrap=True))
    return lines


def run_lines(data: WatchData, width: int) -> list[Text]:
    """Return the run: model, pack, settings, progress, best evaluation, last checkpoint."""
    run, lines = data.run, []
    age = (run.ended or data.read) - run.started if run.started else 0.0
    title, name = (
        f"RUN {run.state} {span(age)}",
        f"  {run.name}",
    )  # the name is in the first line of the screen too
    lines.append(
        Text(clip(title + name * (len(title + name) <= width), width), TITLE, no_wrap=True)
    )
    lines.append(Text(clip(f" {run.model}  {run.pack}", width), no_wrap=True))
    lines += [
        Text(clip(f" {text}", width), FAINT, no_wrap=True) for text in config_facts(run.config)
    ]
    if run.total_steps:
        done = data.step / run.total_steps
        lines.append(Text(f" step {data.step} of {run.total_steps}  {done:.0%}"))
        lines.append(Text(f" {bar(done, min(width - 2, 24))}"))
    best = max(data.evals, key=lambda row: row.pass_rate or 0.0, default=None)
    if best is not None:
        lines.append(Text(clip(f" best eval {short(best.pass_rate)} at {best.step}", width)))
        if best.low is not None:
            lines.append(
                Text(
                    clip(f"   95 % [{num(best.low, '.2f')}, {num(best.high, '.2f')}]", width), FAINT
                )
            )
    if data.checkpoints:
        last = data.checkpoints[-1]
        kind = "" if last.kind == "step" else f" {last.kind},"
        lines.append(Text(clip(f" checkpoint{kind} step {last.step}", width), FAINT))
    if run.error:
        lines.append(Text(clip(f" {run.error}", width * 2), BAD))
    return lines


def time_lines(data: WatchData, width: int) -> list[Text]:
    """Return where a step's time goes, as medians of the last ten steps; the device's metrics if
    the trainer logs them.
    """
    row = data.steps[-1] if data.steps else {}
    total = data.usual("time/step")
    if not total:
        return []
    phases = (("roll", "time/rollout"), ("upd", "time/update"))
    shares = [(name, data.usual(stored)) for name, stored in phases if stored in row]
    rest = total - sum(seconds for _, seconds in shares)
    lines = [Text(clip(f"TIME/STEP {span(total)}, median", width), TITLE)]
    for name, seconds in [*shares, ("other", max(rest, 0.0))] if shares else []:
        text = f" {name:<5} {span(seconds):>7} {bar(seconds / total, max(width - 15, 4))}"
        lines.append(Text(clip(text, width), no_wrap=True))
    if row.get("time/cpu"):
        lines.append(Text(clip(f" cpu   {span(data.usual('time/cpu')):>7}", width), FAINT))
    device = [
        (name, value)
        for name, value in row.items()
        if name.startswith(("gpu/", "perf/", "memory/"))
    ]
    if device:
        lines.append(Text("GPU", TITLE))
        lines += [
            Text(clip(f" {name.partition('/')[2]:<16} {short(value)}", width))
            for name, value in device[:6]
        ]
    return [*lines, Text("")]


def store_lines(data: WatchData, width: int) -> list[Text]:
    """Return the store: episodes, size."""
    if not data.bytes:
        return []
    return [
        Text(clip(f"STORE {data.episodes:,} ep  {data.bytes / 2**20:,.1f} MiB", width), TITLE),
        Text(""),
    ]


def config_facts(config: Mapping[str, Any]) -> list[str]:
    """Two lines of the settings that matter most; missing ones are left out."""

    def get(path: str) -> Any:
        value: Any = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    group, prompts = get("rollout.group_size"), get("rollout.prompts_per_step")
    first = [name_of(get("algo.advantage"))]
    if group and prompts:
        first.append(f"G={group} x {prompts} prompts")
    second = [
        f"{name} {value}"
        for name, value in (
            ("lr", get("train.lr")),
            ("T", get("rollout.temperature")),
            ("seed", config.get("seed")),
        )
        if value is not None
    ]
    return [line for line in ("  ".join(part for part in first if part), "  ".join(second)) if line]


def health_lines(data: WatchData, width: int, *, advice: bool = False) -> list[Text]:
    """Return the checks: value and level; with `advice` what to try."""
    counts = {
        level: sum(1 for check in data.health if check.level == level)
        for level in ("ok", "warn", "bad")
    }
    lines = [
        Text(f"HEALTH {counts['ok']} ok  {counts['warn']} warn  {counts['bad']} bad"[:width], TITLE)
    ]
    for check in data.health:
        if check.level == "ok" and not advice:
            continue
        mark = {"ok": ".", "warn": "!", "bad": "!!", "done": "*"}[check.level]
        for part in wrap(check.text, max(width - 4, 8)):
            lines.append(Text(f" {mark:<2} {part}", COLORS[check.level], no_wrap=True))
            mark = ""
        if advice:
            lines += [
                Text(f"      {part}", FAINT)
                for part in wrap(EXPLAIN.get(check.name, ""), width - 8)
                if part
            ]
        if check.advice and (advice or check.level == "done"):
            lines += [
                Text(f"    {part}", "bold")
                for part in wrap(f"try: {check.advice}", max(width - 4, 8))
            ]
    if not advice:
        lines.append(Text(" d explains each check"[:width], FAINT))
    return lines


def histogram_lines(values: Sequence[float], width: int) -> list[Text]:
    """Return a histogram of the last step's advantages, −2.5 to 2.5, and the share of zeros, which teach nothing."""
    if not values:
        return [Text("ADVANTAGE", TITLE), Text("  none yet", FAINT)]
    bins = max(min(width - 2, 25) // 2 * 2 + 1, 5)
    counts = [0] * bins
    for value in values:
        counts[min(max(round((value + 2.5) / 5 * (bins - 1)), 0), bins - 1)] += 1
    zero = sum(abs(value) < 1e-6 for value in values) / len(values)
    top = max(counts)
    cells = "".join(" ▁▂▃▄▅▆▇█"[min(math.ceil(count / top * 8), 8)] for count in counts)
    axis = f"-2.5{'0':^{bins - 8}}+2.5"
    return [
        Text(clip(f"ADVANTAGE zero {zero:.0%} of {len(values)}", width), TITLE, no_wrap=True),
        Text(f" {cells}", BAD if zero > 0.6 else GOOD, no_wrap=True),
        Text(f" {axis}", FAINT, no_wrap=True),
    ]


def compare_lines(data: WatchData, others: Sequence[WatchData], width: int) -> list[Text]:
    """Reward and evaluation beside the other runs' at the same step."""
    lines: list[Text] = []
    for n, other in enumerate(others):
        lines.append(Text(clip(f"COMPARE {other.run.name}", width), f"bold {OVER[n % len(OVER)]}"))
        rewards = ("reward", data.series("reward"), other.series("reward"))
        for name, mine, theirs in (rewards, ("eval", eval_series(data), eval_series(other))):
            then = [point for point in theirs if point[0] <= data.step]
            if mine and then:
                text = f" {name} {short(mine[-1][1])} vs {short(then[-1][1])} at {then[-1][0]:.0f}"
                lines.append(Text(clip(text, width)))
    return [*lines, Text("")] if lines else []


def control_lines(data: WatchData, width: int) -> list[Text]:
    """Return the controls, and those that wait for the trainer."""
    lines = [Text("CONTROL (asks first)", TITLE)]
    if not data.run.alive:
        return [*lines, Text(" the run has ended", FAINT)]
    lines += [
        Text(text)
        for text in (
            " p pause / resume",
            " k checkpoint now",
            " E evaluate now",
            " + - rate",
            " X stop",
        )
    ]
    if data.pending:
        lines += [
            Text(f" {part}", HERE)
            for part in wrap(f"waiting: {', '.join(data.pending)}", width - 1)
        ]
    return lines


def small_lines(data: WatchData, width: int) -> list[Text]:
    """Return the overview of a small terminal: six curves of a line each."""
    lines = []
    for name in SMALL:
        series = data.series(name)
        if series:
            line = Text(f"{TITLES[name]:<12} {short(series[-1][1]):>7} ", no_wrap=True)
            line.append(sparkline([y for _, y in series], max(width - 22, 8)), GOOD)
            lines.append(line)
    evals = eval_series(data)
    if evals:
        lines.append(
            Text(
                f"{'EVAL':<12} {short(evals[-1][1]):>7} {sparkline([y for _, y in evals], width - 22)}",
                GOOD,
            )
        )
    return lines
