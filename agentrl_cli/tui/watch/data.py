"""A run as the watch screen shows it, read in one go in the reader's thread. Pure except `load`; no textual.

Metric names follow TRL; a run that logs others shows them under their own names on the charts tab.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.tui.common.charts import short
from agentrl_cli.types import FAULTS, Fact

if TYPE_CHECKING:
    from agentrl_cli.store import EpisodeRow, EvalRow, LiveRow, RunRow, Store, WorkerRow

METRICS: dict[str, tuple[str, ...]] = {
    "reward": ("reward", "reward/mean", "train/reward"),
    "solved": ("solved", "primary", "train/solved", "pass_rate"),
    "loss": ("loss", "policy_loss", "loss/policy"),
    "entropy": ("entropy", "policy/entropy"),
    "kl": ("kl", "kl/ref"),
    "mismatch": (
        "sampling/sampling_logp_difference/mean",
        "sampling/logp_difference",
        "mismatch_kl",
        "logp_gap",
        "mismatch",
    ),
    "clip": ("clip_ratio/region_mean", "clip_ratio/high_mean", "clip_ratio", "clipfrac"),
    "grad_norm": ("grad_norm", "optim/grad_norm"),
    "lr": ("learning_rate", "lr"),
    "zero_std": ("frac_reward_zero_std", "groups/zero_variance"),
    "tool_errors": ("tools/error_rate", "tools/failure_frequency", "tool_error_rate", "tool_errors"),
    "tool_calls": ("tools/call_frequency", "tools/call_rate", "tool_call_rate", "tool_calls"),
    "length": ("completions/mean_length", "tokens/mean", "length"),
    "cut": ("completions/clipped_ratio", "truncated"),
    "turns": ("turns", "turns/mean", "n_turns"),
    "seconds": ("time/step", "step_time", "seconds"),
}
"""Short name to the names it may have in the store; the first that is found wins."""

HIDDEN = frozenset({"step", "at"})


@dataclass(frozen=True, slots=True)
class Health:
    """One rule over the stored numbers."""

    level: str
    """ok | warn | bad"""
    name: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class WatchData:
    """A run as it is now."""

    run: RunRow
    steps: tuple[Mapping[str, Any], ...] = ()
    evals: tuple[EvalRow, ...] = ()
    live: tuple[LiveRow, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    """What makes its episodes, if not the process of the run."""
    logs: tuple[Mapping[str, Any], ...] = ()
    alerts: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    checkpoints: tuple[Any, ...] = ()
    notable: tuple[tuple[str, EpisodeRow], ...] = ()
    """(why, episode) of the last finished step."""
    advantages: tuple[float, ...] = ()
    """Of the episodes of the last finished step."""
    flags: tuple[tuple[str, int], ...] = ()
    """How many of them carry each flag, the most frequent first."""
    done: int = 0
    """Finished episodes of the current step."""
    wanted: int = 0
    """Episodes of a step, 0 if the configuration does not define it."""
    pending: tuple[str, ...] = ()
    """Controls that the trainer has not taken yet."""
    read: float = 0.0
    episodes: int = 0
    """Stored episodes of this run."""
    bytes: int = 0
    """Size of the store, its log included."""
    free: int = 0
    """Bytes left on its disk."""
    health: tuple[Health, ...] = ()

    @property
    def paused(self) -> bool:
        """Whether the run is alive and the last of its pauses, resumes and starts is a pause."""
        known = ("control:pause", "control:resume", "resumed")
        kinds = [str(event["kind"]) for event in self.events if str(event["kind"]) in known]
        return self.run.alive and bool(kinds) and kinds[-1] == "control:pause"

    @property
    def evaluating(self) -> bool:
        """Whether the running episodes are those of an evaluation."""
        return bool(self.live) and all(row.kind == "eval" for row in self.live)

    @property
    def has_reference(self) -> bool:
        """Whether the KL is to a reference model."""
        algo = self.run.config.get("algo")
        coefficient = algo.get("kl_coef") if isinstance(algo, Mapping) else None
        return bool(self.series("kl")) and coefficient != 0

    @property
    def step(self) -> int:
        """The last finished step."""
        return int(self.steps[-1]["step"]) if self.steps else self.run.step

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a metric by its short or stored name; NaN and missing values are left out."""
        key = self.key(name)
        out = []
        for row in self.steps:
            value = row.get(key)
            if isinstance(value, (int, float)) and math.isfinite(value):
                out.append((float(row["step"]), float(value)))
        return out

    def key(self, name: str) -> str:
        """The stored name of a short one."""
        names = METRICS.get(name, (name,))
        return next((n for n in names if any(n in row for row in self.steps[-3:])), names[0])

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        series = self.series(name)
        return series[-1][1] if series else None

    @property
    def learning_rate(self) -> float | None:
        """Of the last step, or as configured before the first one."""
        train = self.run.config.get("train")
        configured = float(train["lr"]) if isinstance(train, Mapping) and "lr" in train else None
        last = self.last("lr")
        return configured if last is None else last

    def names(self) -> list[str]:
        """All metrics of the run, the curated ones first."""
        known = [name for name in METRICS if self.series(name)]
        shown = {self.key(name) for name in known} | HIDDEN
        every = {name for row in self.steps for name, value in row.items() if isinstance(value, (int, float))}
        return known + sorted(every - shown)

    def seconds_per_step(self) -> float | None:
        """Mean wall seconds of the last ten steps, pauses left out."""
        stamps = [float(row["at"]) for row in self.steps[-11:] if row.get("at")]
        took = [later - earlier for earlier, later in pairwise(stamps)]
        usual = sorted(took)[len(took) // 2] if took else 0.0
        took = [seconds for seconds in took if seconds <= 5 * usual]
        return sum(took) / len(took) if took else self.last("seconds")

    def eta(self) -> float | None:
        """Seconds until the last step at the current pace."""
        pace, total = self.seconds_per_step(), self.run.total_steps
        return pace * max(total - self.step, 0) if pace is not None and total else None

    def reward_parts(self) -> list[tuple[str, float]]:
        """(name, mean) of the reward parts in the last step: metrics `rewards/<name>/mean` or `rewards/<name>`."""
        if not self.steps:
            return []
        out = []
        for name, value in self.steps[-1].items():
            if name.startswith("rewards/") and not name.endswith("/std") and isinstance(value, (int, float)):
                out.append((name.removeprefix("rewards/").removesuffix("/mean"), float(value)))
        return out


def step_line(row: Mapping[str, Any]) -> str:
    """`step 12  14:03:11  reward 0.412  loss …`: a step's metrics in one line, the curated ones first."""
    parts = [f"step {row['step']}"]
    if row.get("at"):
        parts.append(time.strftime("%H:%M:%S", time.localtime(float(row["at"]))))
    for name, stored in METRICS.items():
        value = next((row[key] for key in stored if isinstance(row.get(key), (int, float))), None)
        if value is not None:
            parts.append(f"{name} {short(float(value))}")
    return "  ".join(parts)


def metrics_csv(data: WatchData) -> str:
    """Every metric of every step, a row each."""
    names = list(dict.fromkeys(name for row in data.steps for name in row))
    lines = [",".join(names)]
    lines += [",".join("" if row.get(name) is None else str(row[name]) for name in names) for row in data.steps]
    return "\n".join(lines) + "\n"


def load(store: Store, run_id: str, before: WatchData | None = None, now: float | None = None) -> WatchData:
    """Reads a run; given the last reading, only newer steps, logs, alerts and events.

    `now` stands for the clock, in seconds since 1970.
    """
    run = store.runs.get(run_id)
    old = before if before is not None and before.run.id == run.id else None
    last = int(old.steps[-1]["step"]) if old and old.steps else 0
    kept = tuple(row for row in old.steps if row["step"] < last) if old else ()
    steps = kept + tuple(store.runs.steps(run.id, last))
    data = WatchData(
        run=run,
        steps=steps,
        evals=tuple(store.runs.evals(run.id)),
        live=tuple(store.live.all(run.id)),
        workers=tuple(store.workers.all(run.id)),
        logs=_tail(old.logs if old else (), lambda since: store.journal.logs(run.id, since), 400),
        alerts=tuple(_folded(row) for row in store.journal.folded_alerts(run.id)),
        events=_tail(old.events if old else (), lambda since: store.journal.events(run.id, since), 1000),
        checkpoints=tuple(store.runs.checkpoints(run.id)),
        wanted=_wanted(run.config),
        pending=tuple(row.action for row in store.controls.all(run.id) if row.taken is None),
        read=time.time() if now is None else now,
    )
    newest = _newest_step(store, run.id)
    going, done = bool(data.live) and not data.evaluating, 0
    if run.alive and data.live:
        which = f"step:{newest} kind:train" if going else f"step:{data.step} kind:eval"
        done = len(store.episodes.ids(which, "time", run.id)) - len(data.live)
    if old is not None and old.step == data.step and old.notable:
        data = replace(data, notable=old.notable, advantages=old.advantages, flags=old.flags)
        data = replace(data, episodes=old.episodes, bytes=old.bytes, free=old.free)
    else:  # while episodes run, the newest step that has some is the current one
        data = replace(data, **notable_of(store, run.id, newest - 1 if going and newest else newest))
        size, free = _disk(Path(store.path))
        data = replace(data, episodes=store.stats.episodes(run.id).get(run.id, 0), bytes=size, free=free)
    data = replace(data, done=max(done, 0))
    return replace(data, health=health_of(data))


def _disk(path: Path) -> tuple[int, int]:
    """(bytes of the store, bytes left on its disk)"""
    files = (path, path.with_name(f"{path.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists()), shutil.disk_usage(path.parent).free


def _newest_step(store: Store, run_id: str) -> int:
    """The step of the newest training episode."""
    rows = store.episodes.rows(store.episodes.ids("kind:train", "-time", run_id, limit=1))
    return rows[0].step or 0 if rows else 0


def _tail(old: Sequence[Mapping[str, Any]], read: Any, keep: int) -> tuple[Mapping[str, Any], ...]:
    return (*old, *read(int(old[-1]["id"]) if old else 0))[-keep:]


def _folded(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Alerts of one kind as one line of a log: how often, from which step to which, and the newest text."""
    if row["count"] == 1:
        return {**row, "at": row["last"]}
    first, last = row["first_step"], row["last_step"]
    steps = f", steps {first} to {last}" if first is not None and last is not None else ""
    return {**row, "at": row["last"], "text": f"{row['count']}×{steps}: {row['text']}"}


def _wanted(config: Mapping[str, Any]) -> int:
    rollout = config.get("rollout")
    if not isinstance(rollout, Mapping):
        return 0
    try:
        return int(rollout.get("group_size", 0)) * int(rollout.get("prompts_per_step", 0))
    except (TypeError, ValueError):
        return 0


def notable_of(store: Store, run_id: str, step: int) -> dict[str, Any]:
    """Of a step: `notable` (the best, worst, flagged, erroring episode), all `advantages`, `flags` counted."""
    rows = store.episodes.rows(store.episodes.ids(f"step:{step} kind:train", "-reward", run_id)[:512])
    graded = [row for row in rows if row.reward is not None and not (row.outcome and row.outcome.is_error)]
    out: list[tuple[str, EpisodeRow]] = []
    if graded:
        out.append(("best", max(graded, key=lambda row: row.reward or 0.0)))
        out.append(("worst", min(graded, key=lambda row: row.reward or 0.0)))
    seen = {row.id for _, row in out}
    for why, rest in (
        ("odd", [row for row in rows if row.flags]),
        ("error", [row for row in rows if row.outcome and row.outcome.is_error]),
    ):
        fresh = [row for row in rest if row.id not in seen]
        if fresh:
            out.append((why, fresh[0]))
            seen.add(fresh[0].id)
    return {
        "notable": tuple(out),
        # a group without spread has no advantages stored: each of them would be zero
        "advantages": tuple(
            row.advantage or 0.0 for row in rows if row.advantage is not None or row.fact == Fact.SKIPPED_ZERO_VARIANCE
        ),
        "flags": tuple(Counter(flag for row in rows for flag in row.flags).most_common()),
    }


def health_of(data: WatchData) -> tuple[Health, ...]:
    """Every check, with its value and what to try."""
    out: list[Health] = []

    def rule(name: str, value: float | None, warn: float, bad: float, text: str, advice: str) -> None:
        if value is None:
            return
        level = "bad" if value >= bad else "warn" if value >= warn else "ok"
        out.append(Health(level, name, f"{text} {value:.2f}", "" if level == "ok" else advice))

    rule(
        "groups",
        data.last("zero_std"),
        0.6,
        0.95,
        "groups without signal",
        "all 0: easier tasks or a warm start; all 1: harder tasks",
    )
    rule("tools", data.last("tool_errors"), 0.3, 0.7, "tool error rate", "open a BADARG episode; check the schema")
    rule("cut", data.last("cut"), 0.2, 0.6, "cut off by a limit", "raise rollout.max_new_tokens or max_tokens")
    rule("mismatch", data.last("mismatch"), 0.1, 0.5, "rollout/train gap", "same precision for both; check the sampler")
    far = data.last("kl") if data.has_reference else None
    rule("kl", far, 1.0, 10.0, "KL to the reference", "lower the rate or raise algo.kl_coef")
    entropy = data.last("entropy")
    if entropy is not None:
        low = "bad" if entropy < 0.005 else "warn" if entropy < 0.03 else "ok"
        out.append(
            Health(low, "entropy", f"entropy {entropy:.3f}", "" if low == "ok" else "collapsing: lower the rate")
        )
    broken = [n for n in ("loss", "grad_norm") if data.steps and _is_nan(data.steps[-1].get(data.key(n)))]
    if broken:
        out.append(Health("bad", "nan", f"{' and '.join(broken)} is not a number", "lower the rate; resume from best"))
    loops, rows = dict(data.flags).get("LOOP", 0), len(data.advantages)
    if rows:
        rule("loop", loops / rows, 0.2, 0.6, "repeat a call (LOOP)", "open one: is the tool's answer clear?")
    out += [*_trends(data), *_counted(data), *_stalled(data)]
    return tuple(out)


def _trends(data: WatchData) -> list[Health]:
    """Rules over several steps: reward against evaluation, gradient spikes, pace."""
    out: list[Health] = []
    evals = [row.pass_rate for row in data.evals if row.pass_rate is not None][-3:]
    reward = [y for _, y in data.series("reward")]
    if len(evals) == 3 and len(reward) >= 10:
        rise, gain = sum(reward[-5:]) / 5 - sum(reward[:5]) / 5, max(evals) - evals[0]
        odd = rise > 0.1 and gain < 0.01
        text = f"reward {rise:+.2f}, last three evals {evals[-1] - evals[0]:+.2f}"
        out.append(Health("warn" if odd else "ok", "hacking", text, "read solved episodes: look for hacking" * odd))
    for name, key, factor, advice in (
        ("spike", "grad_norm", 10.0, "look at the step's worst episodes; lower train.max_grad_norm"),
        ("pace", "seconds", 5.0, "see the log: a stuck tool, a sandbox timeout, a busy machine"),
    ):
        values = [y for _, y in data.series(key)]
        usual = sorted(values[-50:])[len(values[-50:]) // 2] if len(values) >= 5 else 0.0
        if usual > 0:
            much = values[-1] / usual
            level = "warn" if much >= factor else "ok"
            out.append(Health(level, name, f"{key} {much:.1f} x its median", advice if level == "warn" else ""))
    return out


def _counted(data: WatchData) -> list[Health]:
    """Rules over counts that should be zero, and over free disk space."""
    out: list[Health] = []
    row = data.steps[-1] if data.steps else {}
    errors = sum(float(row.get(f"outcomes/{name}") or 0) for name in FAULTS)
    if errors:
        text = f"{errors:.0f} episodes ended in an error and were masked"
        out.append(Health("bad", "errors", text, f"agentrl ls -f outcome:{','.join(FAULTS)} lists them"))
    drifted = float(row.get("drift/structural") or 0)
    if drifted:
        out.append(Health("bad", "drift", f"{drifted:.0f} episodes drifted in structure", "agentrl doctor --template"))
    if data.free:
        level = "bad" if data.free < 2**28 else "warn" if data.free < 2**31 else "ok"
        advice = "" if level == "ok" else "agentrl db prune, or another disk: a full one stops the run"
        out.append(Health(level, "disk", f"disk left {data.free / 2**30:.1f} GiB", advice))
    return out


def _stalled(data: WatchData) -> list[Health]:
    if data.run.state == "interrupted":
        return [Health("bad", "process", "the trainer has ended", f"agentrl train --resume {data.run.name}")]
    if data.run.status == "failed":
        return [Health("bad", "process", f"failed: {data.run.error}", "see the log")]
    return []


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
