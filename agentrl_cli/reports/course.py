"""The rules about the course of a training: rewards, groups, gradients, step size, evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

from agentrl_cli.reports import reference
from agentrl_cli.reports.evidence import LEAST, Change, Evidence
from agentrl_cli.reports.findings import HALF, HARDLY, Hit, outcomes, over, reasons
from agentrl_cli.rollout.flags import short
from agentrl_cli.types import FAULTS, Task, group_pairs

NEARLY_ALL = 0.95
"""Share solved from which nothing is left to learn."""
CEILING, LEARNABLE, WINDOW = 0.8, 0.1, 5
"""Share of groups all solved or all failed; share with signal that is too small to learn from; steps of a mean."""
RISE, FLAT = 0.1, 0.01
"""Reward that rises by RISE while three evaluations gain less than FLAT is paid for something else."""
SPIKE, HISTORY = 10.0, 20
"""A gradient norm of so many times the median of the last steps is an explosion."""
ENTROPY_FLOOR, ENTROPY_FALL, LOW = 0.002, 0.02, 3
"""Nats per token, or share of the first steps' entropy, below which a policy has stopped exploring; and how many steps:
one may train a few tokens of a single group."""
COLD, ALIKE = 0.5, 0.3
"""A low temperature, and the share of attempts at a task that are then alike."""
UNMOVED = 0.003
"""Nats a token that some steps of training move at least."""
CLIPPED, FEW_ROWS = 0.3, 16
"""Share of tokens at a clipping bound; different rows below which their answers are learned."""
GIB = 2**30
all_solved = over("groups/all_solved", CEILING)


def hacking(e: Evidence) -> Hit | None:
    """Reward and solved part, in the step lines; or the reward rises while three evaluations gain nothing."""
    reward, fall = e.series("reward"), e.fall
    if fall is not None and len(reward) == len(e.series("solved")):
        before, after = (
            fmean(part) for part in (reward[fall.start : fall.end], reward[-fall.width :])
        )
        if after > before:
            words = {"what": "solved", "then": fall.best, "now": fall.now}
            return _name_part(e, before, after, words, fall.start, fall.end, fall.width)
        return None
    steps = {int(row["step"]): n for n, row in enumerate(e.steps)}
    places = [steps.get(max(1, row.step or 0), 0) for row in e.evals[-3:]]
    if len(places) < 3 or places[-1] - places[0] < WINDOW or len(reward) < len(e.steps):
        return None
    spans = [(max(0, n - WINDOW + 1), n + 1) for n in (max(places[0], WINDOW - 1), places[-1])]
    before, after = (fmean(reward[a:b]) for a, b in spans)
    if after - before <= RISE or e.rates[-1] - e.rates[-3] >= FLAT:
        return None
    words = {"what": "solved in three evaluations", "then": e.rates[-3], "now": e.rates[-1]}
    return _name_part(e, before, after, words, *spans[0], spans[1][1] - spans[1][0])


def _name_part(
    e: Evidence,
    before: float,
    after: float,
    words: Mapping[str, Any],
    start: int,
    end: int,
    width: int,
) -> Hit:
    """Name the part that moved the reward, by its weight."""
    names = sorted(
        {k for row in e.steps for k in row if k.startswith("rewards/") and k.endswith("/mean")}
    )
    weights = {part.name: part.weight for one in e.episodes for part in one.reward_parts}
    gains = {}
    for key in names:
        values, name = e.series(key), key.split("/")[1]
        if len(values) == len(e.steps):
            gain = fmean(values[-width:]) - fmean(values[start:end])
            gains[name] = gain * weights.get(name, 1.0)
    moved = max(gains, key=lambda name: gains[name], default="")
    part = f"; the part {moved} brought {gains[moved]:+.2f} of it" if moved else ""
    proof = max(e.graded, key=lambda one: (not one.solved, one.graded_reward), default=None)
    all_words = {**words, "before": before, "after": after, "part": part, "moved": moved}
    return Hit(after - before, 0.0, proof.id if proof is not None else "", all_words)


def same_attempts(e: Evidence) -> Hit | None:
    groups = group_pairs(((one.step, one.task_id), one.tokens.ids.tobytes()) for one in e.graded)
    several = [group for group in groups.values() if len(group) > 1]
    shares = [(len(group) - len(set(group))) / (len(group) - 1) for group in several]
    flat = (e.mean("frac_reward_zero_std") or 0.0) >= CEILING
    cold = e.get("rollout", "temperature", 1.0) < COLD
    if (
        not (flat and cold and shares)
        or fmean(shares) < ALIKE
        or (e.mean("solved") or 0.0) >= NEARLY_ALL
    ):
        return None
    return Hit(fmean(shares), ALIKE, e.graded[0].id)


def all_failed(e: Evidence) -> Hit | None:
    share = e.mean("groups/all_failed") or 0.0
    if share < CEILING or (e.mean("solved") or 0.0) > HARDLY or _faults(e) >= HALF:
        return None
    text, number, proof = next(iter(reasons(e.graded)), ("a wrong answer", 0, ""))
    why = f"{text} ({number} of {len(e.graded)})" if number else text
    return Hit(share, CEILING, proof, {"why": why})


def _faults(e: Evidence) -> float:
    return e.count(*(f"outcomes/{name}" for name in FAULTS)) / max(1.0, outcomes(e))


def no_signal(e: Evidence) -> Hit | None:
    """Say why nothing was trained: a group of one, errors, another reason of the episodes, equal rewards."""
    if all_solved(e):
        return None
    flat = e.mean("frac_reward_zero_std")
    size = e.get("rollout", "group_size", 0)
    if e.compares and size == 1 and e.steps:
        return Hit(
            0.0,
            LEARNABLE,
            words={"text": "rollout.group_size is 1: there is nothing to compare an attempt with."},
        )
    untrained = bool(outcomes(e)) and not e.count("facts/trained")
    if untrained if e.trained is None else not e.trained:
        reasons = {k for row in e.steps for k in row if k.startswith("facts/skipped:")}
        name = max(reasons, key=lambda key: (e.count(key), key), default="facts/skipped:no_signal")
        why = f"{e.count(name):.0f} were skipped as {name.partition(':')[2]}"
        if _faults(e) >= HALF:
            why = f"{_faults(e):.0%} ended in an error, so too few were left to compare"
        return Hit(
            0.0, LEARNABLE, words={"text": f"Nothing was trained: of the newest episodes {why}."}
        )
    shares = [1 - value for value in e.series("frac_reward_zero_std")[-WINDOW:]]
    if flat is None or not e.compares or len(shares) < WINDOW or not fmean(shares) < LEARNABLE:
        return None
    text = f"Only {fmean(shares):.0%} of the groups had attempts that differ in reward in the last {WINDOW} steps."
    return Hit(fmean(shares), LEARNABLE, words={"text": text})


def nan(e: Evidence) -> Hit | None:
    names = [
        k for k in ("loss", "grad_norm") if (v := e.now.get(k)) is not None and not math.isfinite(v)
    ]
    return Hit(len(names), 0.0, words={"names": " and ".join(names)}) if names else None


def no_gradient(e: Evidence) -> Hit | None:
    norms = e.series("grad_norm")[-WINDOW:]
    return Hit(len(norms), 0.0) if len(norms) > 1 and not any(norms) else None


def gradients(e: Evidence) -> Hit | None:
    values = e.series("grad_norm")
    usual, norm = values[:-1][-HISTORY:], e.now.get("grad_norm")
    if norm is None or not math.isfinite(norm) or len(usual) < HISTORY // 4:
        return None
    limit = SPIKE * median(usual)
    times = norm / limit * SPIKE if limit else 0.0
    return Hit(norm, limit, words={"times": times}) if norm > limit > 0 else None


def no_movement(e: Evidence) -> Hit | None:
    trained = sum(map(bool, e.series("facts/trained")))
    if e.moved is None or e.moved >= UNMOVED or trained < WINDOW:
        return None
    return Hit(e.moved, UNMOVED, words={"steps": trained, "lr": e.get("train", "lr", 0.0)})


def collapse(e: Evidence) -> Hit | None:
    fall = e.fall
    if fall is None or hacking(e) is not None:
        return None
    steps = [int(row.get("step", n + 1)) for n, row in enumerate(e.steps)]
    places = {
        row.pass_rate: f"step {row.step}" if row.step else "the base" for row in reversed(e.evals)
    }
    place = places[max(e.rates)] if places else f"step {steps[fall.end - 1]}"
    first, last = steps[fall.start], steps[fall.end - 1]
    words = {
        "then": fall.best,
        "now": fall.now,
        "first": first,
        "last": last,
        "place": place,
        "lr": e.get("train", "lr", 0.0),
    }
    proof = next((one.id for one in reversed(e.episodes) if not one.solved), "")
    return Hit(fall.now, fall.best / 2, proof, words)


def entropy(e: Evidence) -> Hit | None:
    """Find a policy that tries nothing new; one that solves nearly everything needs nothing."""
    values, first = e.series("entropy")[-LOW:], e.series("entropy")[:-1][:WINDOW]
    floor = max(ENTROPY_FLOOR, ENTROPY_FALL * fmean(first) if len(first) == WINDOW else 0.0)
    solved = fmean(e.series("solved")[-LOW:] or [0.0])
    low = len(values) == LOW and max(values) < floor and solved < NEARLY_ALL
    return Hit(fmean(values), floor) if low else None


def clip_drift(e: Evidence) -> Hit | None:
    share = sum(e.mean(f"clip_ratio/{side}_mean") or 0.0 for side in ("high", "low"))
    return Hit(share, CLIPPED) if share > CLIPPED else None


def leak(e: Evidence) -> Hit | None:
    if e.width == 1 and len(e.steps) > 1:
        return None  # rows do not change during a training: its first step tells

    def text(task: Task) -> str:
        data = {k: v for k, v in task.data.items() if k not in ("id", "split")}
        return repr((task.prompt, sorted(data.items(), key=str)))

    rows = {task.id: text(task) for task in e.rows}
    others, trained = [task for task in e.tasks.values() if task.id not in rows], set(rows.values())
    shared = [task for task in others if text(task) in trained]
    if not shared:
        return None
    return Hit(len(shared), 0.0, words={"of": len(others), "split": shared[0].split})


def few_rows(e: Evidence) -> Hit | None:
    rows, groups = len(e.rows), len(e.steps) * e.get("rollout", "prompts_per_step", 8)
    return Hit(rows, FEW_ROWS) if 0 < rows < FEW_ROWS and groups >= 2 * rows else None


def memorised(e: Evidence) -> Hit | None:
    train, held = e.change("solved"), carry_over(e)
    if train is None or held is None or train.word != "rose" or e.rates[-1] >= NEARLY_ALL:
        return None
    gap = (train.after - train.before) - (held.after - held.before)
    if held.word == "rose" or gap < max(RISE, held.margin + train.margin):
        return None
    return Hit(gap, RISE, words={"train": train.text, "held": held.text})


def carry_over(e: Evidence) -> Change | None:
    """Compare the first and the newest evaluation, with two standard errors by tasks; None if there are not two."""
    if len(e.evals) < 2:
        return None
    ends = [(e.rates[n], e.evals[n].n_tasks) for n in (0, -1)]
    error = math.hypot(*(math.sqrt(p * (1 - p) / n) if n else 0.0 for p, n in ends))
    return Change(e.rates[0], e.rates[-1], max(LEAST, 2 * error))


def off_reference(e: Evidence) -> Hit | None:
    """Compare with the curves of the pack's reference, the share solved first."""
    for key in reference.CURVES:
        values = e.series(key)
        if e.reference is None or not (since := e.reference.leaves(key, values)):
            continue
        low, high = e.reference.band(key)[len(values) - 1]
        mean = reference.smooth(values)[-1]
        differs = ", ".join(e.reference.differences(e.run.config))
        words = {"key": key, "low": low, "high": high, "since": since}
        words["differs"] = f" Set differently here: {differs}." if differs else ""
        return Hit(mean, low if mean < low else high, words=words)
    return None


def moved_part(e: Evidence) -> str:
    """Return a clause about the reward part whose mean changed most."""
    keys = sorted(
        {k for row in e.steps for k in row if k.startswith("rewards/") and k.endswith("/mean")}
    )
    found = {key.split("/")[1]: change for key in keys if (change := e.change(key)) is not None}
    moved = {name: c.after - c.before for name, c in found.items() if c.word != "stayed"}
    if not moved:
        return "no reward part moved"
    name = max(moved, key=lambda one: abs(moved[one]))
    return f"of the reward parts, {name} moved most, by {moved[name]:+.2f}"


def process(e: Evidence) -> Hit | None:
    error = short(e.run.error, 200).rstrip(".")
    texts = {"interrupted": "has no process any more", "failed": f"failed: {error}"}
    return Hit(1.0, words={"text": texts[e.run.state]}) if e.run.state in texts else None


def disk(e: Evidence) -> Hit | None:
    return Hit(e.free / GIB, 2.0) if e.free is not None and e.free < 2 * GIB else None
