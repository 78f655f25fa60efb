"""What each rule of a diagnosis looks for: functions from evidence to a number, the words of a text, and an episode."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

from agentrl_cli.reports.evidence import (
    LEAST,
    Change,
    Evidence,
    Rate,
    answer_of,
    most,
    short,
)
from agentrl_cli.rollout.flags import find_flags
from agentrl_cli.types import FAULTS, Episode, Outcome, StopReason
from agentrl_cli.types.content import content_text

LIMITS = {
    Outcome.TIMEOUT: "rollout.episode_timeout",
    Outcome.AGENT_TIMEOUT: "the agent's timeout (task.yaml; else rollout.episode_timeout)",
}
"""Outcomes of episodes that a limit on time ended, and the setting that has it."""
ENOUGH = 8
"""Episodes or calls below which a share says nothing."""
HALF, CUT, FAILING = 0.5, 0.5, 0.3
"""Shares: of unread episodes, of those cut at a limit, and of calls that fail by the tool's own fault."""
HARDLY, NEARLY_ALL = 0.05, 0.95
"""Shares solved below which nothing can be reinforced, and from which nothing is left to learn."""
CEILING, LEARNABLE, WINDOW = 0.8, 0.1, 5
"""Share of groups all solved or all failed; share with signal below which a training stands still; steps of a mean."""
RISE, FLAT = 0.1, 0.01
"""Reward that rises by RISE while three evaluations gain less than FLAT is paid for something else."""
SPIKE, HISTORY = 10.0, 20
"""A gradient norm of so many times the median of the last steps is an explosion."""
ENTROPY_FLOOR, ENTROPY_FALL = 0.002, 0.02
"""Nats per token, or share of the first steps' entropy, below which a policy has stopped exploring."""
PROBE_GAP, GAP, GAP_KL = 2e-2, 1.0, 0.1
"""Nats between sampler and trainer: of a server after an update, of one token, and on average."""
CLIPPED = 0.3
FEW_ROWS = 16
UNMOVED = 0.9
"""Share of evaluation attempts that are the same tokens as before any training."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Hit:
    """A number over its threshold, the words of the text, and the episode that proves it."""

    value: float
    threshold: float | None = None
    episode: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)


Find = Callable[[Evidence], Hit | None]


def fill(command: str, hit: Hit, e: Evidence) -> str:
    """Return a command with the values of this run for its capitals."""
    lr, words = e.get("train", "lr", 1e-4), hit.words
    best = any(rate.step and rate.solved > e.evals[0].solved for rate in e.evals)
    model = str(e.get("model", "name", "MODEL"))
    longer = str(e.get("rollout", "max_new_tokens" if "new" in command else "max_tokens", 256) * 4)
    values = {
        "RUN": e.name, "MODEL": f"{e.name}@best" if best and "lr" in command else model, "LOWER": f"{lr / 10:.1g}",
        "HIGHER": f"{lr * 30:.1g}", "LONGER": longer, "FAULTS": words.get("named", "").replace(" ", ""),
        "PARSER": words.get("parser", ""), "PART": words.get("moved", ""),
        "TOOL": words.get("tool", ""), "ARGUMENTS": shlex.quote(words.get("arguments", "{}")),
    }  # fmt: skip
    return re.sub(r"\b[A-Z]{3,}\b", lambda m: values.get(m[0], m[0]), command)


def count(key: str, flag: str = "") -> Find:
    """Return a rule for a count of episodes that should be zero."""

    def find(e: Evidence) -> Hit | None:
        proof = next((one.id for one in e.episodes if flag in one.flags), "") if flag else ""
        return Hit(value, 0.0, proof) if (value := e.count(key)) else None

    return find


def mismatch(e: Evidence) -> Hit | None:
    probe = e.mean("probe/logp_difference") or 0.0
    if probe > PROBE_GAP:
        return Hit(probe, PROBE_GAP, words={"who": "After an update the server and the trainer"})
    gap = e.mean("sampling/sampling_logp_difference/max") or 0.0
    kl = e.mean("sampling/kl") or 0.0
    words = {"who": "Sampler and trainer"}
    if gap > GAP and not e.now.get(
        "staleness/max"
    ):  # single tokens may differ: the mean measures the drift
        return Hit(gap, GAP, words=words)
    return Hit(kl, GAP_KL, words=words) if kl > GAP_KL else None


def too_long(e: Evidence) -> Hit | None:
    share = e.count("outcomes/too_long") / max(1.0, _outcomes(e))
    return Hit(share, HALF) if share >= HALF else None


def _outcomes(e: Evidence) -> float:
    """Return the number of episodes of the newest steps."""
    return e.count(*{key for row in e.steps for key in row if key.startswith("outcomes/")})


def stop(e: Evidence) -> Hit | None:
    cut = [
        (one, turn)
        for one in e.graded
        for turn in one.turns
        if turn.stop_reason is StopReason.LENGTH
    ]
    wrote = [
        (one, e.controls[int(token)])
        for one, turn in cut
        for token in one.tokens.ids[turn.start : turn.end][
            one.tokens.trained_mask[turn.start : turn.end]
        ]
        if int(token) in e.controls
    ]
    turns = {one.id for one, _ in wrote}
    if len(turns) < max(ENOUGH, len(cut) * HALF):
        return None
    token = most([text for _, text in wrote])[0]
    return Hit(len(turns), len(cut) * HALF, wrote[0][0].id, {"of": len(cut), "token": token})


def parser(e: Evidence) -> Hit | None:
    if not e.foreign or (e.mean("tools/call_frequency") or 0.0) > HALF:
        return None
    name = e.foreign.rpartition("model.parser=")[2].rstrip(".")
    return Hit(1.0, words={"text": e.foreign.partition(" If the model")[0], "parser": name})


def malformed(e: Evidence) -> Hit | None:
    errors = [
        (one, short(c.error)) for one in e.graded for t in one.turns for c in t.calls if c.error
    ]
    share = len({one.id for one, _ in errors}) / max(ENOUGH, len(e.graded))
    if share < HALF:
        return None
    text, number = most([text for _, text in errors])
    return Hit(share, HALF, errors[0][0].id, {"text": text, "count": number})


def truncated(e: Evidence) -> Hit | None:
    share = e.mean("completions/clipped_ratio") or 0.0
    proof = next((one.id for one in e.graded if "TRUNC" in one.flags), "")
    return Hit(share, CUT, proof) if share > CUT else None


def errors(e: Evidence) -> Hit | None:
    counts = {name: number for name in FAULTS if (number := e.count(f"outcomes/{name}"))}
    if not counts:
        return None
    over = [f"{counts[n]:.0f} took longer than {key}" for n, key in LIMITS.items() if n in counts]
    late = (
        f"; {' and '.join(over)} of their own (the model's turns and other programs do not count)"
    )
    broken = next((one for one in e.episodes if one.outcome in counts), None)
    error = f": {short(broken.error)}" if broken is not None and broken.error else ""
    words = {"named": ",".join(counts), "late": late if over else "", "error": error}
    return Hit(sum(counts.values()), 0.0, broken.id if broken is not None else "", words)


def tools(e: Evidence) -> Hit | None:
    """Only what tools do wrong counts: a call that does not fit its schema is the model's own fault."""
    raised = [item for item in e.results if item[2].error in ("exception", "timeout", "memory")]
    share = len(raised) / max(ENOUGH, len(e.results))
    if share < FAILING:
        return None
    kinds = [(call.name, short(result.text, 160)) for _, call, result in raised]
    # messages that differ in their arguments alone are one error
    stems = [f"{name} {re.sub(r'[^A-Za-z ]', '', text)[:24]}" for name, text in kinds]
    stem, number = most(stems)
    (tool, text), at = next((kind, n) for n, kind in enumerate(kinds) if stems[n] == stem)
    words = {
        "count": number,
        "of": len(raised),
        "tool": tool,
        "text": text,
        "arguments": json.dumps(raised[at][1].arguments),
    }
    return Hit(share, FAILING, raised[at][0].id, words)


def arguments(e: Evidence) -> Hit | None:
    """Whether calls of attempts at unsolved tasks refer to anything that stands in the question."""
    solved = sum(one.solved for one in e.graded) / max(1, len(e.graded))
    if solved > HARDLY or len(e.results) < ENOUGH:
        return None
    wrong = [
        item for item in e.results if item[2].error is not None or _foreign_words(e, *item[:2])
    ]
    share = len(wrong) / len(e.results)
    if share < HALF:
        return None
    one, call, result = wrong[0]
    asked = next((t for t in one.turns if t.role == "user"), one.turns[0])
    question = short(" ".join(content_text(m.get("content")) for m in asked.messages[-1:]))
    answer = f" (it answered: {short(result.text)})" if result.error else ""
    shown = ", ".join(f"{key}={value!r}" for key, value in (call.arguments or {}).items())
    return Hit(
        share,
        HALF,
        one.id,
        {"call": f"{call.name}({shown})", "question": question, "answer": answer},
    )


def _foreign_words(e: Evidence, one: Episode, call: Any) -> bool:
    """Whether an argument is a text whose words do not stand in what the model was given to read."""
    given = e.question(one).lower()
    values = [str(value).lower() for value in (call.arguments or {}).values()]
    return any(word not in given for value in values for word in re.findall(r"\w+", value))


def ungraded(e: Evidence) -> Hit | None:
    keys = {key for row in e.steps for key in row if key.startswith("ungraded/")}
    counts = {key.partition("/")[2]: number for key in keys if (number := e.count(key))}
    named = ", ".join(f"{name} of {number:.0f}" for name, number in sorted(counts.items()))
    proof = next((one.id for one in e.episodes if one.outcome is Outcome.UNGRADED), "")
    return Hit(sum(counts.values()), 0.0, proof, {"named": named}) if counts else None


def noise(e: Evidence) -> Hit | None:
    alike: dict[Any, list[Episode]] = defaultdict(list)
    for one in e.graded:
        alike[one.task_id, one.tokens.ids.tobytes()].append(one)
    pairs = [pair for same in alike.values() for pair in combinations(same[:8], 2)]
    odd = [(a, b) for a, b in pairs if a.primary != b.primary]
    if len(odd) < 2:
        return None
    a, b = odd[0]
    return Hit(len(odd), 0.0, a.id, {"of": len(pairs), "one": a.primary, "other": b.primary})


def grader(e: Evidence) -> Hit | None:
    """Compare with the rows' own answers, by family, as far as they are known; then look for a single value."""
    known = [(one, e.expected(one), answer_of(one)) for one in e.graded]
    right = [one for one, want, said in known if want and said == want]
    refused = [one for one in right if not one.solved]
    families = {one.family for one in right if one.solved}
    wrong = [o for o, want, said in known if want and said != want and o.family in families]
    paid = [one for one in wrong if one.solved]
    for cases, of, text in (
        (refused, right, "gives {0:g} to the row's own answer"),
        (paid, wrong, "gives {0:g} to another answer than the row's"),
    ):
        if len(cases) >= 3 and len(cases) > HALF * len(of):
            words = {"of": len(of), "text": text.format(cases[0].primary or 0.0)}
            return Hit(len(cases), HALF, cases[0].id, words)
    values = {one.primary for one in e.graded}
    if len(e.graded) < 2 * ENOUGH or len(values) > 1 or values & {0.0, 1.0}:
        return None
    words = {"of": len(e.graded), "text": f"gives the same, {next(iter(values)):g},"}
    return Hit(len(e.graded), None, e.graded[0].id, words)


def hacking(e: Evidence) -> Hit | None:
    """Reward and solved part, in the step lines; or the reward rises while three evaluations gain nothing."""
    reward, fall = e.series("reward"), e.fall
    if fall is not None and len(reward) == len(e.series("solved")):
        before, after = (
            _mean(part) for part in (reward[fall.start : fall.end], reward[-fall.width :])
        )
        if after > before:
            words = {"what": "solved", "then": fall.best, "now": fall.now}
            return _hacked(e, before, after, words, fall.start, fall.end, fall.width)
        return None
    rates = e.evals[-3:]
    if len(rates) < 3 or not rates[-1].step:
        return None
    places = [
        n for n, row in enumerate(e.steps) if row.get("step") in (rates[0].step, rates[-1].step)
    ]
    first, last = (places[0], places[-1]) if places else (0, 0)
    first = 0 if rates[0].step == 0 else first
    spans = [(max(0, n - WINDOW + 1), n + 1) for n in (max(first, WINDOW - 1), last)]
    before, after = (_mean(reward[a:b]) for a, b in spans)
    if (
        last - first < WINDOW
        or not after - before > RISE
        or rates[-1].solved - rates[0].solved >= FLAT
    ):
        return None
    words = {
        "what": "solved in the last three evaluations",
        "then": rates[0].solved,
        "now": rates[-1].solved,
    }
    return _hacked(e, before, after, words, *spans[0], spans[1][1] - spans[1][0])


def _hacked(
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
            gain = _mean(values[-width:]) - _mean(values[start:end])
            gains[name] = gain * weights.get(name, 1.0)
    moved = max(gains, key=lambda name: gains[name], default="")
    part = f"; the part {moved} brought {gains[moved]:+.2f} of it" if moved else ""
    proof = max(e.graded, key=lambda one: (not one.solved, one.graded_reward), default=None)
    all_words = {**words, "before": before, "after": after, "part": part, "moved": moved}
    return Hit(after - before, 0.0, proof.id if proof is not None else "", all_words)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _untrained(e: Evidence) -> bool:
    """Whether the newest steps trained on nothing."""
    if e.trained is not None:
        return not e.trained
    return bool(_outcomes(e)) and not e.count("facts/trained")


def all_solved(e: Evidence) -> Hit | None:
    share = e.mean("groups/all_solved") or 0.0
    return Hit(share, CEILING) if share >= CEILING else None


def same_attempts(e: Evidence) -> Hit | None:
    groups: dict[Any, list[bytes]] = defaultdict(list)
    for one in e.graded:
        groups[one.step, one.task_id].append(one.tokens.ids.tobytes())
    several = [group for group in groups.values() if len(group) > 1]
    shares = [(len(group) - len(set(group))) / (len(group) - 1) for group in several]
    if len(several) < 3 or _mean(shares) < UNMOVED or (e.mean("solved") or 0.0) >= NEARLY_ALL:
        return None
    return Hit(_mean(shares), UNMOVED, e.graded[0].id)


def all_failed(e: Evidence) -> Hit | None:
    share = e.mean("groups/all_failed") or 0.0
    if share < CEILING or (e.mean("solved") or 0.0) > HARDLY or _faults(e) >= HALF:
        return None
    failed = [one for one in e.graded if not one.solved]
    reasons = [flags[0].name if (flags := find_flags(one)) else "" for one in failed]
    name, number = most(reasons)
    one = next((one for one, reason in zip(failed, reasons, strict=True) if reason == name), None)
    if one is None:
        return Hit(share, CEILING, words={"why": "a wrong answer"})
    why = (
        find_flags(one)[0].evidence if name else f"a wrong answer, as “{short(answer_of(one), 40)}”"
    )
    return Hit(share, CEILING, one.id, {"why": f"{why} ({number} of {len(failed)})"})


def _faults(e: Evidence) -> float:
    return e.count(*(f"outcomes/{name}" for name in FAULTS)) / max(1.0, _outcomes(e))


def no_signal(e: Evidence) -> Hit | None:
    """Say why nothing was trained: a group of one, errors, another reason of the episodes, equal rewards."""
    flat = e.mean("frac_reward_zero_std")
    size = e.get("rollout", "group_size", 0)
    if e.compares and size == 1 and e.steps:
        return Hit(
            0.0,
            LEARNABLE,
            words={"text": "rollout.group_size is 1: there is nothing to compare an attempt with."},
        )
    if _untrained(e):
        reasons = {k for row in e.steps for k in row if k.startswith("facts/skipped:")}
        name = max(
            reasons, key=lambda key: (e.count(key), key), default="facts/skipped:zero_variance"
        )
        why = f"{e.count(name):.0f} were skipped as {name.partition(':')[2]}"
        if _faults(e) >= HALF:
            why = f"{_faults(e):.0%} ended in an error, so too few were left to compare"
        return Hit(
            0.0, LEARNABLE, words={"text": f"Nothing was trained: of the newest episodes {why}."}
        )
    shares = [1 - value for value in e.series("frac_reward_zero_std")[-WINDOW:]]
    if flat is None or not e.compares or len(shares) < WINDOW or not _mean(shares) < LEARNABLE:
        return None
    text = f"Only {_mean(shares):.0%} of the groups had attempts that differ in reward in the last {WINDOW} steps."
    return Hit(_mean(shares), LEARNABLE, words={"text": text})


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
    same, of = e.same
    if of < ENOUGH or same < UNMOVED * of or not any(e.series("facts/trained")):
        return None
    return Hit(same / of, UNMOVED, words={"same": same, "of": of, "lr": e.get("train", "lr", 0.0)})


def collapse(e: Evidence) -> Hit | None:
    fall = e.fall
    if fall is None or hacking(e) is not None:
        return None
    steps = [int(row.get("step", n + 1)) for n, row in enumerate(e.steps)]
    best = max(e.evals, key=lambda rate: (rate.solved, -rate.step), default=None)
    place = f"step {steps[fall.end - 1]}"
    if best is not None:
        place = f"step {best.step}, its best evaluation" if best.step else "the base"
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
    value, first = e.mean("entropy"), e.series("entropy")[:-1][:WINDOW]
    floor = max(ENTROPY_FLOOR, ENTROPY_FALL * _mean(first) if len(first) == WINDOW else 0.0)
    return Hit(value, floor) if value is not None and value < floor else None


def kl_drift(e: Evidence) -> Hit | None:
    for key, limit, what in (
        ("kl", 1.0, "the reference model"),
        ("approx_kl", 0.1, "what it was before this step"),
    ):
        if (value := e.mean(key)) is not None and value > limit:
            return Hit(value, limit, words={"what": what})
    return None


def clip_drift(e: Evidence) -> Hit | None:
    share = sum(e.mean(f"clip_ratio/{side}_mean") or 0.0 for side in ("high", "low"))
    return Hit(share, CLIPPED) if share > CLIPPED else None


def leak(e: Evidence) -> Hit | None:
    def text(task: Any) -> str:
        data = {k: v for k, v in task.data.items() if k not in ("id", "split")}
        return repr((task.prompt, sorted(data.items(), key=str)))

    trained = {text(task) for task in e.rows}
    others = [task for task in e.tasks.values() if task not in e.rows]
    shared = [task for task in others if text(task) in trained]
    if not shared:
        return None
    return Hit(len(shared), 0.0, words={"of": len(others), "split": shared[0].split})


def few_rows(e: Evidence) -> Hit | None:
    rows, groups = len(e.rows), len(e.steps) * e.get("rollout", "prompts_per_step", 8)
    return Hit(rows, FEW_ROWS) if 0 < rows < FEW_ROWS and groups >= 2 * rows else None


def memorised(e: Evidence) -> Hit | None:
    train = e.change("solved")
    if (
        train is None
        or len(e.evals) < 2
        or train.word != "rose"
        or e.evals[-1].solved >= NEARLY_ALL
    ):
        return None
    held = carry_over(e.evals)
    gap = (train.after - train.before) - (held.after - held.before)
    if held.word == "rose" or gap < max(RISE, held.margin + train.margin):
        return None
    return Hit(gap, RISE, words={"train": train.text, "held": held.text})


def carry_over(rates: Sequence[Rate]) -> Change:
    """Compare the first and the newest evaluation, with two standard errors by tasks."""
    first, last = rates[0], rates[-1]
    return Change(first.solved, last.solved, max(LEAST, 2 * math.hypot(first.error, last.error)))


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
    state, error = e.state
    texts = {"interrupted": "has no process any more", "failed": f"failed: {short(error, 200)}"}
    return Hit(1.0, words={"text": texts[state]}) if state in texts else None


def disk(e: Evidence) -> Hit | None:
    return Hit(e.free / GIB, 2.0) if e.free is not None and e.free < 2 * GIB else None
