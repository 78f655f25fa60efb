"""The content of a report, without a form: a run's facts, its progress and the episodes worth reading.

Texts of episodes are whatever a model or a tool wrote. Secrets are masked here; escaping is the pages' work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl_cli.evaluate.result import TaskPair
from agentrl_cli.hooks.loggers import flat
from agentrl_cli.reports.compare import all_evals, flips, series
from agentrl_cli.reports.diagnosis import conclude
from agentrl_cli.reports.html import Texts
from agentrl_cli.reports.read_evidence import read_evidence
from agentrl_cli.reports.run_data import sort_by_rarity
from agentrl_cli.reports.spans import of_step, waterfall_lines
from agentrl_cli.reports.svg import Curve, chart_svg
from agentrl_cli.rollout.flags import find_flags
from agentrl_cli.store import EpisodeRow, EvalRow, RunRow, Store
from agentrl_cli.store.queries import message_texts
from agentrl_cli.types.masking import mask, mask_text

SHOWN = (
    "reward",
    "solved",
    "all_solved",
    "all_failed",
    "entropy",
    "kl",
    "grad_norm",
    "loss",
    "tool_errors",
    "length",
)
"""The curves of a report, if the run has them."""
UNIT = frozenset({"reward", "solved", "all_solved", "all_failed", "tool_errors"})
CANDIDATES = 5000
"""Newest attempts among which the oddest is looked for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An episode to read."""

    why: str
    row: EpisodeRow
    parts: tuple[tuple[str, float, float, str], ...]
    """(name, value, weight, detail) of the reward."""
    flags: tuple[str, ...]
    turns: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
    """(role, pieces): a piece is (text, push as a share of the run's scale, NaN if not trained)."""
    masked: bool
    """Whether a secret was masked: then a turn is its text in one piece."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """The content of a report."""

    run: RunRow
    verdict: str
    facts: tuple[tuple[str, str], ...]
    machine: tuple[tuple[str, str], ...]
    pictures: tuple[tuple[str, str], ...]
    """(file name without its ending, SVG)"""
    evals: tuple[EvalRow, ...]
    compared: tuple[str, str]
    flipped: tuple[TaskPair, ...]
    tasks: int
    """Tasks that both compared evaluations attempted."""
    samples: tuple[Sample, ...]
    settings: tuple[tuple[str, str], ...]
    alerts: tuple[str, ...]
    time: str
    """Where the time of the last step goes, as lines; empty if no step has finished."""


def make_report(store: Store, name: str, texts: Texts, *, masked: bool = True) -> RunReport:
    """Reads a run. Raises NotFound."""
    run = store.runs.get(name)
    steps, evals = store.runs.steps(run.id), all_evals(store, run)
    first, last, tasks = flips(store, run)
    machine = store.journal.newest_event(run.id, "machine") or {}
    alerts = [
        f"{row['count']}× {row['name']}: {row['text']}"
        for row in store.journal.folded_alerts(run.id)
    ]
    hide: Callable[[str], str] = mask_text if masked else str
    config = mask(dict(run.config)) if masked else run.config
    return RunReport(
        run=run,
        verdict=hide(_summarise(store, run, evals)),
        facts=tuple((key, hide(value)) for key, value in _facts(store, run, steps)),
        machine=tuple((key, str(value)) for key, value in machine.items()),
        pictures=tuple(_pictures(steps, evals)),
        evals=tuple(evals),
        compared=(first, last),
        flipped=tuple(line for line in tasks if line.flip),
        tasks=len(tasks),
        samples=tuple(_samples(store, run, texts, hide)),
        settings=tuple((key, str(value)) for key, value in flat(config).items()),
        alerts=tuple(map(hide, alerts)),
        time="\n".join(waterfall_lines(of_step(store, run), 96))
        if "time/step" in (steps or [{}])[-1]
        else "",
    )


def _pictures(
    steps: Sequence[Mapping[str, Any]], evals: Sequence[EvalRow]
) -> list[tuple[str, str]]:
    out = []
    for split in dict.fromkeys(row.split for row in evals):
        own = [row for row in evals if row.split == split and row.pass_rate is not None]
        points = [(float(row.step or 0), row.pass_rate or 0.0) for row in own]
        spans = [
            (float(r.step or 0), r.low, r.high)
            for r in own
            if r.low is not None and r.high is not None
        ]
        plain = re.sub(r"[^\w-]", "-", split) or "none"
        if points:
            title = f"share solved, {split} split, with 95 % intervals"
            out.append(
                (
                    f"eval-{plain}",
                    chart_svg(title, [Curve(split, points, spans)], unit=True),
                )
            )
    for name in SHOWN:
        points = series(steps, name)
        if len(points) > 1:
            out.append(
                (name, chart_svg(name.replace("_", " "), [Curve(name, points)], unit=name in UNIT))
            )
    keys = {key for row in steps for key in row}
    parts = sorted(key for key in keys if key.startswith("rewards/") and key.endswith("/mean"))
    curves = [Curve(key.split("/")[1], series(steps, key)) for key in parts[:4]]
    if any(len(curve.points) > 1 for curve in curves):
        out.append(("reward-parts", chart_svg("reward parts", curves)))
    return out


def _summarise(store: Store, run: RunRow, evals: Sequence[EvalRow]) -> str:
    """Return the diagnosis, and the evaluations without a claim beyond their intervals."""
    said = (
        " ".join(conclude(read_evidence(store, run)))
        or f"{run.name} has too few steps for a verdict."
    )
    graded = [row for row in evals if row.pass_rate is not None]
    splits = [row.split for row in graded]
    own = [row for row in graded if splits.count(row.split) > 1]  # of the newest split with two
    own = [row for row in own if row.split == own[-1].split]
    own.sort(key=lambda row: row.step or 0)  # the base may have been evaluated last
    if not own:
        return f"{said} No split has two evaluations, so nothing is known about tasks outside of training."
    one, two = own[0], own[-1]
    change = f"On the {one.split} split {one.pass_rate:.3f} became {two.pass_rate:.3f}"
    if one.high is None or two.low is None or one.low is None or two.high is None:
        return f"{said} {change}; no intervals are stored."
    apart = two.low > one.high or two.high < one.low
    overlap = f"the intervals {'do not ' if apart else ''}overlap"
    return f"{said} {change}, [{one.low:.3f}, {one.high:.3f}] to [{two.low:.3f}, {two.high:.3f}]: {overlap}."


def _facts(store: Store, run: RunRow, steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    seconds = (run.ended or run.heartbeat) - run.started if run.started else 0.0
    times = sorted(value for _, value in series(steps, "seconds"))
    rows = [
        ("run", f"{run.name} ({run.id}), {run.kind}, {run.state}"),
        ("model", run.model),
        ("pack", run.pack),
        ("seed", str(run.seed)),
        ("steps", f"{run.step} of {run.total_steps}" if run.total_steps else str(run.step)),
        ("episodes", f"{store.stats.episodes(run.id).get(run.id, 0):,}"),
        ("took", f"{seconds / 60:.1f} min" if seconds > 0 else ""),
        ("seconds a step, median", f"{times[len(times) // 2]:.2f}" if times else ""),
        ("agentrl", run.version),
        ("error", run.error),
    ]
    return [(key, value) for key, value in rows if value]


def _samples(store: Store, run: RunRow, texts: Texts, hide: Callable[[str], str]) -> list[Sample]:
    """Return the best, the worst and the oddest episode of a run."""
    newest = "-outcome:none -reward:none -kind:whatif -kind:chat", "-time", run.id, CANDIDATES
    rows = [
        row
        for row in store.episodes.used(*newest)
        if row.outcome is not None and not row.outcome.is_error
    ]
    if not rows:
        return []
    chosen = [
        (why, store.episodes.row(store.episodes.resolve(why, run.id))) for why in ("best", "worst")
    ]
    seen = {row.id for _, row in chosen}
    odd = [row for row in sort_by_rarity(rows) if row.id not in seen]
    chosen += [("oddest", row) for row in odd[:1]]
    scale = store.signals.push_scale(run.id)
    return [_sample(store, why, row, texts, scale, hide) for why, row in chosen]


def _sample(
    store: Store, why: str, row: EpisodeRow, texts: Texts, scale: float, hide: Callable[[str], str]
) -> Sample:
    """Return an episode by its tokens; by its messages if `hide` changes these or what the tokens spell."""
    episode, signals = store.episodes.get(row.id), store.signals.get(row.id)
    whole = [
        (turn.role, "\n".join(text for m in turn.messages for text in message_texts(m)))
        for turn in episode.turns
    ]
    clean = [(role, hide(text)) for role, text in whole]
    pieces = texts(store, row, episode.tokens.ids.tolist())
    spelled = "".join(pieces)
    hidden = clean != whole or hide(spelled) != spelled
    turns: list[tuple[str, tuple[tuple[str, float], ...]]] = []
    if hidden:
        turns = [(role, ((text, math.nan),)) for role, text in clean]
    else:
        push = (
            np.full(len(pieces), np.nan) if signals is None or not scale else signals.push / scale
        )
        push = np.where(episode.tokens.trained_mask, push, np.nan)
        for turn in episode.turns:
            own = range(turn.start, turn.end)
            turns.append(
                (turn.role, tuple(_merge_untrained([(pieces[i], float(push[i])) for i in own])))
            )
    parts = tuple(
        (part.name, part.value, part.weight, hide(part.detail)) for part in episode.reward_parts
    )
    flags = tuple(hide(f"{flag.name} {flag.evidence}".strip()) for flag in find_flags(episode))
    return Sample(why, row, parts, flags, tuple(turns), hidden)


def _merge_untrained(pieces: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Merge neighbours that were not trained into one piece."""
    out: list[tuple[str, float]] = []
    for text, push in pieces:
        if out and math.isnan(push) and math.isnan(out[-1][1]):
            out[-1] = (out[-1][0] + text, push)
        else:
            out.append((text, push))
    return out
