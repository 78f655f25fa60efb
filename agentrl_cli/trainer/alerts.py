"""The health of a training: rules over its steps, each with a value, a threshold and what to try.

A rule reads the metrics of the last step and of the steps before it, and returns an `Alert` or None. Names of alerts
are what `train.stop_on` takes. To add a rule: a function here, a line in RULES, its name in `ALERTS` of
config/models.py, a test on a made-up series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agentrl_cli.types import FAULTS, Outcome

Metrics = Mapping[str, float]

ENTROPY_FLOOR = 0.002
"""Nats per token below which a policy has stopped exploring."""
ENTROPY_FALL = 0.02
"""Share of its first steps' entropy under which it has, too."""
SPIKE = 10.0
"""A gradient norm of this many times the median is an explosion."""
HISTORY = 20
"""Steps that a median is taken over; at least a quarter of them must be there."""
LEARNABLE = 0.1
"""Share of groups with signal, over WINDOW steps, below which a training makes no progress."""
WINDOW = 5
RISE, FLAT = 0.1, 0.01
"""Reward that rises by RISE while three evaluations gain less than FLAT is being gamed, or memorised."""
KL_LIMIT = 1.0
"""Nats per token to the reference model."""
STEP_KL = 0.1
"""Nats per token that the policy moves within one step's updates."""
CLIPPED = 0.3
"""Share of tokens at a clipping bound."""
PROBE_GAP = 2e-2
"""Mean difference in nats between a server's and the trainer's log-probabilities right after an update."""
GAP = 1.0
"""Nats between the sampler's and the trainer's log-probability of one token."""
GAP_KL = 0.1
"""Nats per token between the two, on average."""
CUT = 0.5
"""Share of episodes that ended at a token limit."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A health rule's finding: its value, the threshold it crossed, and the remedy."""

    level: str
    """info | warn | bad"""
    name: str
    value: float
    threshold: float | None
    text: str


@dataclass
class Series:
    """The metrics of a run's steps so far, the newest last. `trained`: episodes that the newest was trained on."""

    steps: list[Metrics] = field(default_factory=list)
    trained: int = 0
    compares: bool = True
    """Whether the estimator learns from spread within groups alone."""

    @property
    def now(self) -> Metrics:
        return self.steps[-1]

    def before(self, key: str) -> list[float]:
        """Return the finite values of a metric in the steps before this one."""
        found = [row[key] for row in self.steps[:-1] if row.get(key) is not None]
        return [value for value in found if math.isfinite(value)]


def _nan(s: Series) -> Alert | None:
    broken = [
        k for k in ("loss", "grad_norm") if (v := s.now.get(k)) is not None and not math.isfinite(v)
    ]
    if not broken:
        return None
    text = f"{' and '.join(broken)} is not a number; that update was left out. Lower train.lr; resume from best."
    return Alert("bad", "nan", float(len(broken)), 0.0, text)  # a count: the store holds no NaN


def _gradients(s: Series) -> Alert | None:
    norm, usual = s.now.get("grad_norm"), s.before("grad_norm")[-HISTORY:]
    if norm is None or not math.isfinite(norm) or len(usual) < HISTORY // 4:
        return None
    limit = SPIKE * float(np.median(usual))
    if norm <= limit or not limit:
        return None
    text = f"The gradient norm is {norm / limit * SPIKE:.0f} times its median. Look at the step's worst episodes; lower"
    return Alert("warn", "gradients", norm, limit, f"{text} train.lr or train.max_grad_norm.")


def _entropy(s: Series) -> Alert | None:
    entropy, first = s.now.get("entropy"), s.before("entropy")[:WINDOW]
    if entropy is None:
        return None
    floor = max(
        ENTROPY_FLOOR, ENTROPY_FALL * float(np.mean(first)) if len(first) == WINDOW else 0.0
    )
    if not entropy < floor:
        return None
    text = "The policy is nearly deterministic. Lower train.lr, or raise algo.entropy_coef or rollout.temperature."
    return Alert("warn", "entropy_collapse", entropy, floor, text)


SOLVED = 0.8
"""Share of groups all solved from which on a training without signal is at its ceiling, not stuck."""


def _signal(s: Series) -> Alert | None:
    last = s.steps[-1] if s.steps else {}
    if not s.trained and last.get("groups/all_solved", 0.0) >= SOLVED:
        text = "Every attempt is solved: there is nothing left to learn here. Stop and evaluate, or take harder tasks."
        return Alert("info", "no_signal", 0.0, LEARNABLE, text)
    faults = sum(s.now.get(f"outcomes/{name}", 0.0) for name in FAULTS)
    if (
        not s.trained
        and faults
        >= sum(value for name, value in s.now.items() if name.startswith("outcomes/")) / 2
        > 0
    ):
        text = f"{faults:.0f} of the step's episodes ended in an error, so too few were left to compare."
        return Alert(
            "warn",
            "no_signal",
            0.0,
            LEARNABLE,
            f"{text} Fix the errors first; agentrl why lists them.",
        )
    if not s.trained:
        text = (
            "No group had spread rewards, so nothing was trained: the tasks are too easy or too hard by now."
            " Try task.order=curriculum, rollout.resample_rounds, a larger group, other tasks."
        )
        return Alert("warn", "no_signal", 0.0, LEARNABLE, text)
    if not s.compares:
        return None
    shares = [
        1 - row["frac_reward_zero_std"]
        for row in s.steps[-WINDOW:]
        if "frac_reward_zero_std" in row
    ]
    if len(shares) < WINDOW or not np.mean(shares) < LEARNABLE:
        return None
    text = f"Hardly any group had spread rewards in the last {WINDOW} steps. Try task.order=curriculum or other tasks."
    return Alert("warn", "no_signal", float(np.mean(shares)), LEARNABLE, text)


def _hacking(s: Series) -> Alert | None:
    """Compares the steps around the last three evaluations; once, in the step after the newest."""
    evals = [n for n, row in enumerate(s.steps) if row.get("eval/solved") is not None][-3:]
    if len(evals) < 3 or evals[-1] != len(s.steps) - 2:
        return None

    def reward(at: int) -> float:
        near = [
            row["reward"] for row in s.steps[max(0, at - WINDOW + 1) : at + 1] if "reward" in row
        ]
        return float(np.mean(near)) if near else math.nan

    rise = reward(evals[-1]) - reward(evals[0])
    gain = max(s.steps[n]["eval/solved"] for n in evals[1:]) - s.steps[evals[0]]["eval/solved"]
    if not (rise > RISE and gain < FLAT):
        return None
    text = (
        f"Reward rose by {rise:.2f} over the last three evaluations, which gained {gain:+.3f}. Read solved episodes"
        " (`agentrl replay best`): is the reward being gamed, or the training split memorised?"
    )
    return Alert("warn", "reward_hacking", rise, RISE, text)


def _kl(s: Series) -> Alert | None:
    for key, limit, text in (
        (
            "kl",
            KL_LIMIT,
            "The policy is far from the reference model. Lower train.lr, or raise algo.kl_coef.",
        ),
        (
            "approx_kl",
            STEP_KL,
            "The policy moves far in one step. Lower train.lr, algo.epochs or algo.minibatches.",
        ),
    ):
        value = s.now.get(key)
        if value is not None and value > limit:
            return Alert("warn", "kl_drift", value, limit, text)
    return None


def _clip(s: Series) -> Alert | None:
    share = s.now.get("clip_ratio/high_mean", 0.0) + s.now.get("clip_ratio/low_mean", 0.0)
    if not share > CLIPPED:
        return None
    text = "Many tokens are at a clipping bound and no longer trained. Lower train.lr, algo.epochs or algo.minibatches."
    return Alert("warn", "clip_drift", share, CLIPPED, text)


def _drift(s: Series) -> Alert | None:
    drifted = s.now.get("drift/structural", 0.0)
    text = "Episodes differ in structure from the chat template's rendering: `agentrl ls -f flag:DRIFT`."
    return Alert("bad", "drift", drifted, 0.0, text) if drifted else None


def _mask(s: Series) -> Alert | None:
    wrong = s.now.get("flags/MASK", 0.0)
    text = "Sampled tokens lie outside the model's turns, or have no log-probability: `agentrl ls -f flag:MASK`."
    return Alert("bad", "mask", wrong, 0.0, text) if wrong else None


def _mismatch(s: Series) -> Alert | None:
    probe = s.now.get("probe/logp_difference", 0.0)
    if probe > PROBE_GAP:
        text = "A server's log-probabilities after the update are not the trainer's: check its weights and dtype."
        return Alert("bad", "mismatch", probe, PROBE_GAP, text)
    gap, kl = (
        s.now.get(f"sampling/{name}", 0.0) for name in ("sampling_logp_difference/max", "kl")
    )
    if s.now.get(
        "staleness/max", 0.0
    ):  # single tokens may then differ: the mean measures the drift
        text = "The sampling weights are far behind the trained ones: lower rollout.async_staleness or train.lr."
        return Alert("warn", "mismatch", kl, GAP_KL, text) if kl > GAP_KL else None
    text = "Sampler and trainer disagree about a token's probability: check the dtype; was the model edited?"
    if gap > GAP:
        return Alert("warn", "mismatch", gap, GAP, text)
    return Alert("warn", "mismatch", kl, GAP_KL, text) if kl > GAP_KL else None


def _errors(s: Series) -> Alert | None:
    counts = {name: count for name in FAULTS if (count := s.now.get(f"outcomes/{name}", 0.0))}
    broken, named = sum(counts.values()), ",".join(counts)
    text = (
        f"Episodes ended in an error and were masked. `agentrl ls -f outcome:{named}` lists them."
    )
    late = [
        f"{counts[name]:.0f} took longer than {setting}"
        for name, setting in LIMITS.items()
        if name in counts
    ]
    if late:
        text += (
            f" {' and '.join(late)} of their own (the model's turns and other programs do not count): the training"
            " learns nothing from what is slow. Raise the limit, unless something hangs."
        )
    return Alert("bad", "errors", broken, 0.0, text) if broken else None


def _look_for_ungraded(s: Series) -> Alert | None:
    counts = {
        key.partition("/")[2]: value
        for key, value in s.now.items()
        if key.startswith("ungraded/") and value
    }
    if not counts:
        return None
    total, named = (
        sum(counts.values()),
        ", ".join(f"{name} of {count:.0f}" for name, count in counts.items()),
    )
    text = (
        f"{total:.0f} episodes have no grade, because their primary reward is None ({named}): they are masked, not"
        " trained as zero. `agentrl ls -f outcome:ungraded` lists them."
    )
    return Alert("bad", "ungraded", total, 0.0, text)


def _bad_tokens(s: Series) -> Alert | None:
    bad = s.now.get("facts/skipped:bad_tokens", 0.0)
    text = (
        "Episodes hold ids outside the vocabulary or impossible log-probabilities and were skipped: what samples is"
        " not the model that trains, or the store is damaged. `agentrl ls -f fact:skipped:bad_tokens` lists them."
    )
    return Alert("bad", "bad_tokens", bad, 0.0, text) if bad else None


def _cut(s: Series) -> Alert | None:
    share = s.now.get("completions/clipped_ratio", 0.0)
    if not share > CUT:
        return None
    text = "Most episodes end at a token limit. Raise rollout.max_new_tokens or max_tokens, or algo.overlong_penalty."
    return Alert("warn", "truncated", share, CUT, text)


LIMITS = {
    Outcome.TIMEOUT: "rollout.episode_timeout",
    Outcome.AGENT_TIMEOUT: "the agent's timeout (task.yaml; else rollout.episode_timeout)",
}
"""Outcomes of episodes that a limit on time ended, and the setting that has it."""


RULES: Mapping[str, Callable[[Series], Alert | None]] = {
    "nan": _nan,
    "gradients": _gradients,
    "entropy_collapse": _entropy,
    "no_signal": _signal,
    "reward_hacking": _hacking,
    "kl_drift": _kl,
    "clip_drift": _clip,
    "drift": _drift,
    "mask": _mask,
    "mismatch": _mismatch,
    "errors": _errors,
    "ungraded": _look_for_ungraded,
    "bad_tokens": _bad_tokens,
    "truncated": _cut,
}


def find_alerts(
    metrics: Metrics, *, trained: int, before: Sequence[Metrics] = (), compares: bool = True
) -> list[Alert]:
    """Return the health rules after one step.

    `trained`: episodes that were trained on; `before`: the steps until then; `compares`: as in Series.
    """
    series = Series([*before, metrics], trained, compares)
    return [alert for rule in RULES.values() if (alert := rule(series)) is not None]


@dataclass
class Health:
    """The alerts of a run, step by step, and which of them stop it."""

    stop_on: Sequence[str]
    patience: int = 1
    """Steps in a row that an alert must hold before it stops the run."""
    compares: bool = True
    """As in Series."""
    steps: list[Metrics] = field(default_factory=list)
    """Metrics of the steps so far; after a resume, those of the store."""
    held: dict[str, int] = field(default_factory=dict)
    """Alert → steps in a row."""

    def look(self, metrics: Metrics, trained: int) -> tuple[list[Alert], str]:
        """Return the alerts of a step, and the name of one that stops the run, "" if none does."""
        found = find_alerts(metrics, trained=trained, before=self.steps, compares=self.compares)
        self.steps.append(metrics)
        names = [alert.name for alert in found]
        self.held = {name: self.held.get(name, 0) + 1 for name in names}
        stops = [
            name for name in names if name in self.stop_on and self.held[name] >= self.patience
        ]
        return found, stops[0] if stops else ""
