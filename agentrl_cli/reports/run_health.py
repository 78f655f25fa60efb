"""The checks of a run's health: rules over its stored numbers, each with advice. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from agentrl_cli.reports.run_data import Health, RunData
from agentrl_cli.types import FAULTS

CEILING = 0.8
"""Share of groups without a failed attempt from which on there is nothing left to learn."""
SETTLED = 5
"""Steps over which that share is a mean."""


Check = Callable[[RunData], Health | None]


def rule(
    name: str,
    value: Callable[[RunData], float | None],
    warn: float,
    bad: float,
    text: str,
    advice: str,
    *,
    low: bool = False,
) -> Check:
    """Return a check of one number: a value of at least `warn` or `bad` is bad, with `low` one below them."""

    def check(data: RunData) -> Health | None:
        found, sign = value(data), -1 if low else 1
        if found is None:
            return None
        levels = ((bad, "bad"), (warn, "warn"))
        over = (level for limit, level in levels if found * sign >= limit * sign)
        level = next(over, "ok")
        return Health(level, name, text.format(found), "" if level == "ok" else advice)

    return check


def ceiling(data: RunData) -> float:
    """Return the share of groups whose attempts are all solved, if that leaves nothing to learn; else 0."""
    shares = [share for _, share in data.series("all_solved")[-SETTLED:]]
    share = sum(shares) / SETTLED if len(shares) == SETTLED else 0.0
    if not shares and len(data.groups) > 1 and (data.last("solved") or 0.0) >= 0.95:
        # a run from before that metric: its last step
        share = sum(group.kind == "all solved" for group in data.groups) / len(data.groups)
    return share if share >= CEILING else 0.0


def _groups(data: RunData) -> Health | None:
    """Check for groups without signal: at the ceiling if every attempt is solved, a warning if not."""
    if top := ceiling(data):
        advice = f"stop (X), `agentrl eval {data.run.name}@best`, then harder tasks or task.order=curriculum"
        text = f"nothing left to learn: {top:.0%} of the groups all solved"
        return Health("done", "ceiling", text, advice)
    zero, solved, failed = (data.last(key) for key in ("zero_std", "all_solved", "all_failed"))
    if zero is None:
        return None
    easy = (solved or 0.0) > (failed or 0.0)  # too easy is not a fault
    level = "bad" if zero >= 0.95 and not easy else "warn" if zero >= 0.6 else "ok"
    text = f"groups without signal {zero:.2f}"
    advice = "all failed: easier tasks or a warm start; all solved: harder tasks"
    if solved is not None and failed is not None:
        text += f" (all solved {solved:.2f}, all failed {failed:.2f})"
        hard = "easier tasks, a warm start, or a larger group"
        advice = advice if solved == failed else "harder tasks" if easy else hard
    return Health(level, "groups", text, "" if level == "ok" else advice)


def _nan(data: RunData) -> Health | None:
    row = data.steps[-1] if data.steps else {}
    values = ((name, row.get(data.key(name))) for name in ("loss", "grad_norm"))
    broken = [name for name, x in values if isinstance(x, float) and not math.isfinite(x)]
    text = f"{' and '.join(broken)} is not a number"
    return Health("bad", "nan", text, "lower the rate; resume from best") if broken else None


def _hacking(data: RunData) -> Health | None:
    """Check the training reward against the evaluations."""
    evals = [row.pass_rate for row in data.evals if row.pass_rate is not None][-3:]
    reward = [y for _, y in data.series("reward")]
    if len(evals) < 3 or len(reward) < 10:
        return None
    rise, gain = sum(reward[-5:]) / 5 - sum(reward[:5]) / 5, max(evals) - evals[0]
    odd = rise > 0.1 and gain < 0.01
    text = f"reward {rise:+.2f}, last three evals {evals[-1] - evals[0]:+.2f}"
    advice = "read solved episodes: look for hacking" * odd
    return Health("warn" if odd else "ok", "hacking", text, advice)


def _process(data: RunData) -> Health | None:
    if data.run.state == "interrupted":
        resume = f"agentrl train --resume {data.run.name}"
        return Health("bad", "process", "the trainer has ended", resume)
    if data.run.status == "failed":
        return Health("bad", "process", f"failed: {data.run.error}", "see the log")
    return None


def _unusual(key: str) -> Callable[[RunData], float | None]:
    """Return a function for the newest value of a metric over its median in 50 steps; None before the fifth."""

    def value(data: RunData) -> float | None:
        values = [y for _, y in data.series(key)]
        usual = statistics.median_high(values[-50:]) if len(values) >= 5 else 0.0
        return values[-1] / usual if usual > 0 else None

    return value


def _count(*keys: str) -> Callable[[RunData], float | None]:
    """Return a function for the sum of counts in the last step that should be zero; None if they are."""
    return lambda data: (
        sum(float(data.steps[-1].get(key) or 0) for key in keys if data.steps) or None
    )


def _loops(data: RunData) -> float | None:
    return dict(data.flags).get("LOOP", 0) / len(data.advantages) if data.advantages else None


CHECKS: tuple[Check, ...] = (
    _groups,
    rule("tools", lambda data: data.last("tool_errors"), 0.3, 0.7, "tool error rate {:.2f}",
         "open a BADARG episode; check the schema"),
    rule("cut", lambda data: data.last("cut"), 0.2, 0.6, "cut off by a limit {:.2f}",
         "raise rollout.max_new_tokens or max_tokens"),
    rule("mismatch", lambda data: data.last("mismatch"), 0.1, 0.5, "rollout/train gap {:.2f}",
         "same precision for both; check the sampler"),
    rule("kl", lambda data: data.last("kl") if data.has_reference else None, 1.0, 10.0, "KL to the reference {:.2f}",
         "lower the rate or raise algo.kl_coef"),
    rule("entropy", lambda data: data.last("entropy"), 0.03, 0.005, "entropy {:.3f}",
         "collapsing: lower the rate", low=True),
    _nan,
    rule("loop", _loops, 0.2, 0.6, "repeat a call (LOOP) {:.2f}", "open one: is the tool's answer clear?"),
    _hacking,
    rule("spike", _unusual("grad_norm"), 10.0, math.inf, "grad_norm {:.1f} x its median",
         "look at the step's worst episodes; lower train.max_grad_norm"),
    rule("pace", _unusual("seconds"), 5.0, math.inf, "seconds {:.1f} x its median",
         "see the log: a stuck tool, a sandbox timeout, a busy machine"),
    rule("errors", _count(*(f"outcomes/{name}" for name in FAULTS)), 0, 0,
         "{:.0f} episodes ended in an error and were masked", f"`agentrl ls -f outcome:{','.join(FAULTS)}` lists them"),
    rule("drift", _count("drift/structural"), 0, 0, "{:.0f} episodes drifted in structure",
         "`agentrl ls -f flag:DRIFT` lists them"),
    rule("disk", lambda data: data.free / 2**30 if data.free else None, 2, 0.25, "disk left {:.1f} GiB",
         "`agentrl db prune`, or another disk: a full one stops the run", low=True),
    _process,
)  # fmt: skip
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
"""Why each check matters."""


def health_of(data: RunData) -> tuple[Health, ...]:
    """Return every check that has a value, with its advice."""
    return tuple(found for check in CHECKS if (found := check(data)) is not None)
