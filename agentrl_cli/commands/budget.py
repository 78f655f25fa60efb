"""Settings for a time (`agentrl train --budget 5m`), chosen from a short probe before the training begins.

The probe is a training of a few steps in a store of its own, which is deleted: its speed, its groups, its turns and how
far it moved choose the settings. Nothing is cut off by a clock afterwards: a run has the steps that were chosen, also
after a resume. The user's own settings are kept.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Mapping
from operator import attrgetter as _at
from pathlib import Path
from statistics import fmean, median
from typing import Any

from agentrl_cli.config import Config, Sources, load_config
from agentrl_cli.errors import UsageError
from agentrl_cli.models.device import pick_device
from agentrl_cli.registry.plugins import offers, spread_settings
from agentrl_cli.reports.read_evidence import measure_movement
from agentrl_cli.runtime import new_training, run_training
from agentrl_cli.store import Store

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
TUNED = ["rollout.prompts_per_step", "rollout.group_size", "rollout.max_new_tokens", "train.lr"]
TUNED += ["train.heal", "train.steps", "train.eval", "train.eval.every", "train.eval.samples"]
# Steps of a probe, and tasks of each of its two evaluations.
STEPS, TASKS = 3, 8
# Nats by which the probe's steps change a token's log-probability: less teaches hardly anything, more is a jump.
STILL, FAR = 0.006, 0.3
# Share of groups with different rewards below which groups are doubled; such groups that a step has at least; share of
# a turn's limit from which solved turns are near it.
FEW, MIXED, NEAR = 0.25, 2.0, 0.8
# Share of the time for evaluations, and most of them.
CHECKS, EVALS = 0.15, 6
# Share of the steps asked for below which a time is short, the most by which the rate is then raised, and how many
# times a probe fits into a time that is long enough for a second one.
SHORT, FASTER, AMPLE = 0.2, 2.0, 20


def parse_time(text: str) -> float:
    """Return the seconds of `90s`, `5m`, `1.5h` or `1h30m`. Raises UsageError."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([a-z]*)", text.lower())
    seconds = sum(float(number) * UNITS.get(unit, math.nan) for number, unit in parts)
    if "".join(map("".join, parts)) != text.lower() or not 0 < seconds < math.inf:
        raise UsageError(
            f"--budget {text}: not a time.", hint="For example: --budget 5m, 90s, 1h30m"
        )
    return seconds


async def plan_budget(
    config: Config, sources: Sources, base: Path, seconds: float
) -> tuple[Config, dict[str, Any]]:
    """Return the settings for so many seconds, the probe included, and the record of how they were chosen.

    The probe has half the tasks in a step, and so have the steps of a short time, at a rate that is higher by the
    square root of the steps that are missing: healing is on. Raises UsageError if not one step fits.
    """
    began, own, given = time.monotonic(), set_by_user(config, sources, base), config
    if pick_device(config.model.device).type == "cpu":
        config = _with(config, spread_settings(config.model_dump()), own)
    tasks = config.rollout.prompts_per_step
    half = tasks if "rollout.prompts_per_step" in own else max(1, tasks // 2)
    found = await probe(config.replace(rollout={"prompts_per_step": half}), base)
    if half < tasks and seconds > AMPLE * (time.monotonic() - began):
        found = await probe(config, base)
    spent = time.monotonic() - began
    moved = {key: [_at(key)(given), _at(key)(config)] for key in offers("spread")}
    config, record = choose(config, found, seconds - spent, own)
    record["changed"] |= {key: pair for key, pair in moved.items() if pair[0] != pair[1]}
    record |= {"seconds": seconds, "spent": spent, "expected": record["expected"] + spent}
    return config, record


def set_by_user(config: Config, sources: Sources, base: Path) -> set[str]:
    """Return the keys to keep: those set by an option, a variable, or in a file that differs from the pack."""
    pack = load_config(sets=[f"task.packs={config.task.packs}"], base=base)[0]
    return {
        key
        for key in [*TUNED, *offers("spread")]
        if not sources[key].startswith(("default", "pack:"))
        and not (sources[key].startswith("file:") and _at(key)(config) == _at(key)(pack))
    }


async def probe(config: Config, base: Path) -> dict[str, float]:
    """Return the findings of a few steps: seconds, shares, tokens and nats. Hooks and loggers are left out.

    Raises KeyboardInterrupt if Ctrl-C ended it.
    """
    rows: list[dict[str, float]] = []
    checked = {"every": STEPS, "tasks": TASKS, "samples": 1}
    train = {"steps": STEPS, "heal": False, "stop_on": {"alerts": []}, "eval": checked}
    train["schedule"] = {"warmup_steps": 0}
    config, began = config.replace(train=train, hooks=[], loggers=[]), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agentrl-budget-") as folder:
        db = Path(folder) / "probe.db"
        parts: Any = {"base": base, "db": db, "narrate": lambda text: None}
        run = await run_training(
            config, new_training, on_step=lambda step, metrics: rows.append(metrics), **parts
        )
        took = time.monotonic() - began
        if run.step < STEPS:
            raise KeyboardInterrupt
        with Store.open(db, readonly=True) as store:
            moved = measure_movement(store, run.id, 0, STEPS)
            ids = store.episodes.ids("kind:train outcome:solved", "time", run.id)
            solved = [store.episodes.get(row.id) for row in store.episodes.rows(ids)]
    size = config.rollout.prompts_per_step * config.rollout.group_size
    attempt = median(row["time/rollout"] for row in rows[1:]) / size
    means = {
        name: fmean(row.get(key, 0.0) for row in rows)
        for name, key in (
            ("solved", "solved"),
            ("equal", "frac_reward_zero_std"),
            ("cut", "completions/clipped_ratio"),
        )
    }
    lengths = [t.end - t.start for e in solved for t in e.turns if t.role == "assistant"]
    busy = sum(row["time/step"] for row in rows) + 2 * TASKS * attempt
    return means | {
        "tasks": config.rollout.prompts_per_step,
        "step": median(row["time/step"] for row in rows[1:]),
        "attempt": attempt,
        "opening": max(0.0, took - busy),
        "longest": max(lengths, default=0),
        "moved": STILL if moved is None else moved,
    }


def choose(
    config: Config, found: Mapping[str, float], left: float, own: set[str]
) -> tuple[Config, dict[str, Any]]:
    """Return the settings for `left` seconds and their record; keys in `own` stay. Raises UsageError if none fit."""
    rollout, mixed = config.rollout, 1 - found["equal"]
    enough = math.ceil(MIXED / max(mixed, MIXED / rollout.prompts_per_step))
    whole = found["step"] * rollout.prompts_per_step / found["tasks"]
    short = (left - found["opening"]) / whole < SHORT * config.train.steps
    tasks = max(int(found["tasks"]), enough) if short else rollout.prompts_per_step
    values: dict[str, Any] = {
        "rollout.prompts_per_step": min(rollout.prompts_per_step, tasks),
        "train.heal": True,
    }
    if 0 < mixed < FEW and found["solved"] < 0.5:
        values["rollout.group_size"] = 2 * rollout.group_size
    if found["cut"] > FEW and found["longest"] > NEAR * rollout.max_new_tokens:
        values["rollout.max_new_tokens"] = min(2 * rollout.max_new_tokens, rollout.max_tokens)
    if mixed >= FEW and not STILL <= found["moved"] <= FAR:
        aim = STILL if found["moved"] < STILL else FAR
        factor = min(10.0, max(0.1, aim / max(found["moved"], 1e-9)))
        values["train.lr"] = float(f"{config.train.lr * factor:.2g}")
    chosen = _with(config, values, own)
    larger = chosen.rollout.prompts_per_step * chosen.rollout.group_size / rollout.group_size
    step, time_left = found["step"] * larger / found["tasks"], left - found["opening"]
    timed, expected = _fit(chosen, step, found["attempt"], time_left, own)
    faster = min(FASTER, math.sqrt(config.train.steps / timed["train.steps"]))
    if short and "train.lr" not in values:
        timed["train.lr"] = float(f"{config.train.lr * faster:.2g}")
    values |= timed
    chosen = _with(chosen, timed, own)
    both = {key: [_at(key)(config), _at(key)(chosen)] for key in values}
    changed = {key: pair for key, pair in both.items() if pair[0] != pair[1]}
    kept = [key for key, value in values.items() if key in own and value != _at(key)(config)]
    record = {"found": dict(found), "changed": changed, "kept": kept}
    return chosen, record | {"expected": expected + found["opening"]}


def _fit(
    config: Config, step: float, attempt: float, left: float, own: set[str]
) -> tuple[dict[str, Any], float]:
    """Return steps and evaluations for so many seconds, and the seconds that they take. Raises UsageError."""
    checks, fixed = config.train.eval, own & {"train.eval", "train.eval.every"}
    check = attempt * checks.tasks
    samples = checks.samples if fixed or 2 * check * checks.samples < CHECKS * left else 1
    count = min(EVALS, max(2, int(CHECKS * left / check / samples)))
    share = int((left - count * check * samples) / step) // (count - 1)
    every, steps = share, share * (count - 1)
    if fixed:
        every = checks.every
        steps = int(left / (step + (check * samples / every if every else 0.0)))
    if steps < 1:
        raise UsageError(
            f"Not one step fits: it takes {step:.2g} s, an evaluation {check * samples:.2g} s, and after the probe"
            f" {max(0.0, left):.0f} s are left.",
            hint="Take a longer --budget, or smaller rollout.prompts_per_step and train.eval.tasks.",
        )
    if "train.steps" in own and not fixed:
        every = math.ceil(config.train.steps / (count - 1))
    made = config.train.steps if "train.steps" in own else steps
    expected = made * step + (1 + made // every if every else 0) * check * samples
    values = {"train.steps": steps, "train.eval.every": every, "train.eval.samples": samples}
    return values, expected


def _with(config: Config, values: Mapping[str, Any], own: set[str]) -> Config:
    """Return the settings with these values, except those that the user set."""
    for key in values.keys() - own:
        section, *path = key.split(".")
        change: Any = values[key]
        for name in reversed(path):
            change = {name: change}
        config = config.replace(**{section: change})
    return config


def describe_budget(record: Mapping[str, Any]) -> list[str]:
    """Return the findings and the choice, in lines for people."""
    found = record["found"]
    changed = [f"{key} {old} → {new}" for key, (old, new) in record["changed"].items()]
    kept = ["; kept as they are set: ", ", ".join(record["kept"])] if record["kept"] else []
    return [
        f"{'found':9}  a step with {found['tasks']:.0f} tasks takes {found['step']:.2g} s, opening"
        f" {found['opening']:.2g} s; {found['solved']:.0%} are solved, {found['cut']:.0%} cut at a limit (the longest"
        f" solved turn: {found['longest']:.0f} tokens); in {1 - found['equal']:.0%} of the groups rewards differ;"
        f" {STEPS} steps move a token by {found['moved']:.2g} nats",
        "".join([f"{'chosen':9}  ", "; ".join(changed) or "nothing changes", *kept]),
        f"{'time':9}  {record['expected']:.0f} s expected of {record['seconds']:.0f} s",
    ]
