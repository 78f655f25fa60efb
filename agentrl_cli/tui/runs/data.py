"""The runs of a store as the first screen shows them. No textual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from agentrl_cli.store import CheckpointRow, EvalRow, RunRow, Store
from agentrl_cli.tui.common.charts import chart, short, span, sparkline
from agentrl_cli.tui.common.text import BAD, FAINT, GOOD, TITLE, clip, num, pad

WIDE = 98
"""Least width of a line with room for a name of usual length."""
WIDEST = 150
"""And for the model and the pack."""
NEXT = 30
"""Most characters of the next step, which the details below always name."""
NEXT_HEAD = "next: agentrl …"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run with the numbers of its line and its details."""

    run: RunRow
    episodes: int
    reward: float | None
    """Reward of the last finished step, else the mean of its newest 200 episodes."""
    evals: tuple[EvalRow, ...] = ()
    checkpoints: tuple[CheckpointRow, ...] = ()
    rewards: tuple[float, ...] = ()
    """Rewards of its newest steps."""

    @property
    def next(self) -> str:
        """The command that comes next."""
        run = self.run
        if run.kind == "eval":
            return "agentrl ls runs"
        if run.kind != "train":
            return f"agentrl replay best --run {run.name}"
        if run.alive:
            return f"agentrl watch {run.name}"
        if run.state in ("failed", "interrupted") and self.checkpoints:
            return f"agentrl train --resume {run.name}"
        if run.state == "failed" or not run.step:
            return f"agentrl show {run.name}"
        if not self.evals and self.checkpoints:
            return f"agentrl eval {run.name}@last"
        return f"agentrl export --report {run.name}"


NEWEST = 60
"""Steps of a run's small curve."""


def load_runs(store: Store) -> list[RunSummary]:
    """Return all runs, the newest first, in a handful of queries."""
    summaries, counts = [], store.stats.episodes()
    for run in store.runs.all():
        steps = [
            row.get("reward") for row in store.runs.steps(run.id, max(run.step - NEWEST + 1, 0))
        ]
        rewards = tuple(float(value) for value in steps if isinstance(value, (int, float)))
        reward = steps[-1] if steps else None
        evals = tuple(store.runs.evals(run.id))
        if reward is None and counts.get(run.id):
            # of an evaluation, of the test split, if it has any
            test = store.episodes.ids(
                "split:test" * (run.kind == "eval"), "-time", run.id, limit=200
            )
            rows = store.episodes.rows(test or store.episodes.ids("", "-time", run.id, limit=200))
            graded = [row.reward for row in rows if row.reward is not None]
            reward = sum(graded) / len(graded) if graded else None
        summaries.append(
            RunSummary(
                run,
                counts.get(run.id, 0),
                reward,
                evals,
                tuple(store.runs.checkpoints(run.id)),
                rewards,
            )
        )
    return summaries


def head_line(width: int) -> str:
    """Return the column titles of `run_line`."""
    name, kind = _room(width)
    text = f"   {'run':<{name}} {'kind'[:kind]:<{kind}} {'state':<11} {'step':>9}"
    text += f" {'episodes':>9} {'reward':>7} {'':<{_curve(width)}} {'eval':>5}"
    text += f"  {_fit_next(NEXT_HEAD, width, text)}"
    return (text + "  model and pack" * (width >= WIDEST))[:width].ljust(width)


def run_line(summary: RunSummary, width: int, *, marked: bool = False) -> Text:
    """Return one run in one line."""
    run = summary.run
    name, kind = _room(width)
    step = f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step or "-")
    splits = [row.split for row in summary.evals]
    split = "test" if "test" in splits else next(iter(splits), "")  # so that no number mixes splits
    rates = [row.pass_rate for row in summary.evals if row.split == split]
    best = max((rate for rate in rates if rate is not None), default=None)
    text = f" {'*' if marked else ' '} {pad(clip(run.name, name), name)} {run.kind[:kind]:<{kind}}"
    text += f" {run.state:<11} {step:>9}"
    curve = sparkline(summary.rewards, _curve(width)) if len(summary.rewards) > 1 else ""
    text += f" {summary.episodes:>9,} {num(summary.reward, '.3f'):>7} {curve:<{_curve(width)}} {num(best, '.2f'):>5}"
    text += f"  {_fit_next(summary.next.removeprefix('agentrl '), width, text)}"
    text += f"  {run.model or '-'} {run.pack}" * (width >= WIDEST)
    style = "#ffd75f" if run.alive else BAD if run.state in ("failed", "interrupted") else ""
    return Text(set_cell_size(text, width), style, no_wrap=True)


def _fit_next(command: str, width: int, before: str) -> str:
    """Return the column of the next step; empty if the whole command, or the column's title, does not fit."""
    room = width - cell_len(before) - 2
    return f"{command * (max(len(command), len(NEXT_HEAD)) <= min(room, NEXT)):<{NEXT}}"


def _curve(width: int) -> int:
    """Return the cells of a run's small curve."""
    return 16 if width >= 120 else 8 if width >= WIDE else 6


def _room(width: int) -> tuple[int, int]:
    """Return the columns for the name and for the kind of a run."""
    return (24, 8) if width >= WIDE else (max(width - 63, 8), 5)


def detail_lines(
    summary: RunSummary, curve: Sequence[tuple[float, float]], width: int
) -> list[Text]:
    """Return the chosen run: its curve, evaluations, checkpoints."""
    run, kept = summary.run, summary.checkpoints
    took = span(run.ended - run.started) if run.ended and run.started else "-"
    title = f"{run.name}   {run.kind}   {run.state}   {run.model}   {run.pack}   took {took}"
    rows = [
        (title, TITLE),
        (f" next: {summary.next}", "bold"),
        *[(f" {run.error}", BAD)] * bool(run.error),
    ]
    lines = [Text(clip(text, width), style) for text, style in rows]
    if curve:
        lines += chart(f"REWARD {short(curve[-1][1])}", curve, min(width, 90), 4, unit=True)
    for row in summary.evals[-3:]:
        between = f"[{num(row.low, '.2f')}, {num(row.high, '.2f')}]" if row.low is not None else ""
        step = "-" if row.step is None else row.step
        text = f" eval {row.name} {row.split} step {step}: {num(row.pass_rate, '.3f')} {between}"
        lines.append(Text(clip(text, width), GOOD))
    shown = "  ".join(f"{row.kind} {row.step}" for row in kept[-8:])
    return lines + [Text(clip(f" checkpoints ({len(kept)}): {shown}", width), FAINT)] * bool(kept)


def checkpoint_lines(summary: RunSummary, width: int) -> list[Text]:
    """Return every checkpoint of a run with its numbers, and how to use it."""
    if not summary.checkpoints:
        return [Text("no checkpoint yet", FAINT)]
    lines = []
    for row in summary.checkpoints:
        metrics = [item for item in row.metrics.items() if isinstance(item[1], (int, float))]
        numbers = "  ".join(f"{name} {num(value, '.3f')}" for name, value in metrics[:4])
        lines.append(Text(clip(f"step {row.step:>6}  {row.kind:<5} {numbers}", width)))
        lines.append(
            Text(clip(f"             {'/'.join(Path(row.path).parts[-3:])}", width), FAINT)
        )
    name, last = summary.run.name, summary.checkpoints[-1].step
    lines.append(Text(f"agentrl chat --model {name}@best   agentrl eval {name}@{last}", FAINT))
    return lines
