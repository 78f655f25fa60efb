"""The checks of a run's health: rules over its stored numbers, each with what to try. Pure."""

from __future__ import annotations

import math
from typing import Any

from agentrl_cli.tui.watch.data import Health, WatchData
from agentrl_cli.types import FAULTS

CEILING = 0.8
"""Share of groups without a failed attempt from which on there is nothing left to learn."""
SETTLED = 5
"""Steps over which that share is a mean."""


def health_of(data: WatchData) -> tuple[Health, ...]:
    """Return every check, with its value and what to try."""
    out: list[Health] = []

    def rule(
        name: str, value: float | None, warn: float, bad: float, text: str, advice: str
    ) -> None:
        if value is None:
            return
        level = "bad" if value >= bad else "warn" if value >= warn else "ok"
        out.append(Health(level, name, f"{text} {value:.2f}", "" if level == "ok" else advice))

    out += _groups(data)
    rule(
        "tools",
        data.last("tool_errors"),
        0.3,
        0.7,
        "tool error rate",
        "open a BADARG episode; check the schema",
    )
    rule(
        "cut",
        data.last("cut"),
        0.2,
        0.6,
        "cut off by a limit",
        "raise rollout.max_new_tokens or max_tokens",
    )
    rule(
        "mismatch",
        data.last("mismatch"),
        0.1,
        0.5,
        "rollout/train gap",
        "same precision for both; check the sampler",
    )
    far = data.last("kl") if data.has_reference else None
    rule("kl", far, 1.0, 10.0, "KL to the reference", "lower the rate or raise algo.kl_coef")
    entropy = data.last("entropy")
    if entropy is not None:
        low = "bad" if entropy < 0.005 else "warn" if entropy < 0.03 else "ok"
        out.append(
            Health(
                low,
                "entropy",
                f"entropy {entropy:.3f}",
                "" if low == "ok" else "collapsing: lower the rate",
            )
        )
    broken = [
        n for n in ("loss", "grad_norm") if data.steps and _is_nan(data.steps[-1].get(data.key(n)))
    ]
    if broken:
        out.append(
            Health(
                "bad",
                "nan",
                f"{' and '.join(broken)} is not a number",
                "lower the rate; resume from best",
            )
        )
    loops, rows = dict(data.flags).get("LOOP", 0), len(data.advantages)
    if rows:
        rule(
            "loop",
            loops / rows,
            0.2,
            0.6,
            "repeat a call (LOOP)",
            "open one: is the tool's answer clear?",
        )
    out += [*_trends(data), *_counted(data), *_stalled(data)]
    return tuple(out)


def _groups(data: WatchData) -> list[Health]:
    """Groups without signal: at the ceiling if every attempt is solved, a warning if not."""
    top = ceiling(data)
    if top:
        advice = f"stop (X), `agentrl eval {data.run.name}@best`, then harder tasks or task.order=curriculum"
        return [
            Health(
                "done",
                "ceiling",
                f"nothing left to learn: {top:.0%} of the groups all solved",
                advice,
            )
        ]
    zero = data.last("zero_std")
    if zero is None:
        return []
    solved, failed = data.last("all_solved"), data.last("all_failed")
    easy = (solved or 0.0) > (failed or 0.0)  # too easy is not a fault
    level = "bad" if zero >= 0.95 and not easy else "warn" if zero >= 0.6 else "ok"
    parts = (
        ""
        if solved is None or failed is None
        else f" (all solved {solved:.2f}, all failed {failed:.2f})"
    )
    advice = "all failed: easier tasks or a warm start; all solved: harder tasks"
    if solved is not None and failed is not None and solved != failed:
        advice = (
            "harder tasks" if solved > failed else "easier tasks, a warm start, or a larger group"
        )
    return [
        Health(
            level,
            "groups",
            f"groups without signal {zero:.2f}{parts}",
            "" if level == "ok" else advice,
        )
    ]


def ceiling(data: WatchData) -> float:
    """Return the share of groups whose attempts are all solved, if that leaves nothing to learn; else 0."""
    shares = [share for _, share in data.series("all_solved")[-SETTLED:]]
    if shares:
        share = sum(shares) / len(shares) if len(shares) == SETTLED else 0.0
    else:  # a run from before that metric: its last step
        solved, groups = data.last("solved") or 0.0, data.signal.groups
        share = data.signal.solved / groups if groups > 1 and solved >= 0.95 else 0.0
    return share if share >= CEILING else 0.0


def _trends(data: WatchData) -> list[Health]:
    """Rules over several steps: reward against evaluation, gradient spikes, pace."""
    out: list[Health] = []
    evals = [row.pass_rate for row in data.evals if row.pass_rate is not None][-3:]
    reward = [y for _, y in data.series("reward")]
    if len(evals) == 3 and len(reward) >= 10:
        rise, gain = sum(reward[-5:]) / 5 - sum(reward[:5]) / 5, max(evals) - evals[0]
        odd = rise > 0.1 and gain < 0.01
        text = f"reward {rise:+.2f}, last three evals {evals[-1] - evals[0]:+.2f}"
        out.append(
            Health(
                "warn" if odd else "ok",
                "hacking",
                text,
                "read solved episodes: look for hacking" * odd,
            )
        )
    for name, key, factor, advice in (
        (
            "spike",
            "grad_norm",
            10.0,
            "look at the step's worst episodes; lower train.max_grad_norm",
        ),
        ("pace", "seconds", 5.0, "see the log: a stuck tool, a sandbox timeout, a busy machine"),
    ):
        values = [y for _, y in data.series(key)]
        usual = sorted(values[-50:])[len(values[-50:]) // 2] if len(values) >= 5 else 0.0
        if usual > 0:
            much = values[-1] / usual
            level = "warn" if much >= factor else "ok"
            out.append(
                Health(
                    level, name, f"{key} {much:.1f} x its median", advice if level == "warn" else ""
                )
            )
    return out


def _counted(data: WatchData) -> list[Health]:
    """Rules over counts that should be zero, and over free disk space."""
    out: list[Health] = []
    row = data.steps[-1] if data.steps else {}
    errors = sum(float(row.get(f"outcomes/{name}") or 0) for name in FAULTS)
    if errors:
        text = f"{errors:.0f} episodes ended in an error and were masked"
        out.append(
            Health("bad", "errors", text, f"`agentrl ls -f outcome:{','.join(FAULTS)}` lists them")
        )
    drifted = float(row.get("drift/structural") or 0)
    if drifted:
        text = f"{drifted:.0f} episodes drifted in structure"
        out.append(Health("bad", "drift", text, "`agentrl ls -f flag:DRIFT` lists them"))
    if data.free:
        level = "bad" if data.free < 2**28 else "warn" if data.free < 2**31 else "ok"
        advice = (
            "" if level == "ok" else "`agentrl db prune`, or another disk: a full one stops the run"
        )
        out.append(Health(level, "disk", f"disk left {data.free / 2**30:.1f} GiB", advice))
    return out


def _stalled(data: WatchData) -> list[Health]:
    if data.run.state == "interrupted":
        return [
            Health(
                "bad", "process", "the trainer has ended", f"agentrl train --resume {data.run.name}"
            )
        ]
    if data.run.status == "failed":
        return [Health("bad", "process", f"failed: {data.run.error}", "see the log")]
    return []


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
