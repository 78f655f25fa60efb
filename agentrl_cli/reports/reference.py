"""The reference curves of a pack: its training with some seeds elsewhere, as a band that a run is held against.

`reference.json` in a pack's folder has them, with the rows, the model and the settings that made them
(`benchmarks/curves.py` writes it). It counts for a training of the same model on the same rows, whatever else differs:
that is what a curve outside the band finds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl_cli.errors import DataError

FILE, EVENT = "reference.json", "reference"
BASES = "bases.json"
"""In the folder of a plugin's curves: how often a model solved what has no curves, without any training."""
CURVES = ("solved", "reward", "reward_std")
"""The metrics that a run is held against, in this order. The share solved varies with the tasks that a step draws; the
spread of a group's rewards varies less, and stays where it was if the policy does not change: see `leaves`."""
GOOD = {"solved": 1, "reward_std": -1}
"""Where to be outside is not a fault: above (more solved), below (attempts that agree)."""
WINDOW = 8
"""Steps of a mean: single steps draw other tasks."""
SIGMAS, LEAST = 2.5, 0.02
"""Standard errors, and what else a curve may lie beyond those of the seeds, which are few."""
LASTING = 3
"""Steps in a row outside the band: one alone says nothing."""
Band = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Reference:
    """The curves of some seeds."""

    settings: Mapping[str, Any]
    """Dotted settings that a user is likely to change, as they were."""
    curves: Mapping[str, Sequence[Sequence[float]]]
    """Maps a metric to its values by step, a list for each seed."""

    def band(self, key: str) -> Band:
        """Return (low, high) of a metric's mean over the last WINDOW steps, for each step; empty if it is not known.

        It holds the curves of all seeds, wider by half their distance and by SIGMAS standard errors of such a mean.
        """
        seeds = self.curves.get(key, ())
        noise = [(b - a) ** 2 / 2 for seed in seeds for a, b in pairwise(seed)]
        error = math.sqrt(fmean(noise)) if noise else 0.0
        found = []
        for step, values in enumerate(zip(*map(smooth, seeds), strict=False), 1):
            low, high = min(values), max(values)
            beyond = (high - low) / 2 + SIGMAS * error / math.sqrt(min(step, WINDOW)) + LEAST
            found.append((low - beyond, high + beyond))
        return found

    def leaves(self, key: str, values: Sequence[float]) -> int:
        """Return the step from which the newest values are outside the band, 0 if they are not for LASTING steps.

        More solved than in the band is not a fault, nor is a smaller spread of the rewards. The spread counts from
        step WINDOW on: where few are solved, it varies with the tasks as well.
        """
        pairs = list(zip(smooth(values), self.band(key), strict=False))
        if len(pairs) < len(values):
            return 0  # the curves end before
        good, first = GOOD.get(key, 0), WINDOW if key == "reward_std" else 1
        outside = [
            step >= first and ((mean < low and good >= 0) or (mean > high and good <= 0))
            for step, (mean, (low, high)) in enumerate(pairs, 1)
        ]
        since = next((n for n, out in enumerate(reversed(outside)) if not out), len(outside))
        return len(values) - since + 1 if since >= LASTING else 0

    def differences(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the settings of a run that differ: `train.lr 0.01 (there 0.0003)`."""
        return [
            f"{key} {value} (there {self.settings[key]})"
            for key, value in pick_settings(settings, self.settings).items()
            if value != self.settings[key]
        ]


def curve_file(folder: Path, id: str) -> Path:
    """Return the file of the reference that a plugin in `folder` ships for one of its environments."""
    return folder / "curves" / f"{re.sub(r'[^A-Za-z0-9]+', '-', id)}.json"


def smooth(values: Sequence[float], steps: int = WINDOW) -> list[float]:
    """Return each value as the mean of the last `steps`."""
    return [fmean(values[max(0, n - steps) : n]) for n in range(1, len(values) + 1)]


def pick_settings(settings: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of these dotted keys, those of sections that a run stored; None if absent."""
    return {key: get_setting(settings, key) for key in keys}


def get_setting(settings: Mapping[str, Any], key: str) -> Any:
    """Return a run's stored setting by its dotted key; None if absent."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def read_reference(folder: Path, model: str, rows: str) -> dict[str, Any] | None:
    """Return the content of a pack's reference; None without one for this model and these rows.

    `rows` is the hash of the training rows. Raises DataError if the file cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        parse_reference(found)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        text = f"{path} is not a reference of curves: {error}."
        raise DataError(text, hint="Delete it: a training needs none.") from None
    return found if (found.get("model"), found.get("rows")) == (model, rows) else None


def project_settings(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by section the settings of `rollout`, and the adapter if there was one, that made a reference."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in content["settings"].items():
        section, _, name = key.partition(".")
        if section == "rollout" or (key == "adapter.enabled" and value):
            found.setdefault(section, {})[name] = value
    return found


def describe_bases(folder: Path, source: str, model: str) -> str:
    """Return how often a model solved a source, with any options, before training; empty if that is not measured."""
    path, name = folder / BASES, source.partition("?")[0]
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = {
        key: numbers
        for key, numbers in kept.get(model, {}).items()
        if key.partition("?")[0] == name
    }
    if not found:
        return ""
    each = (f"{solved} of {attempts} of `{key}`" for key, (solved, attempts) in found.items())
    text = f"{model} solved {', '.join(each)} when this was measured, without training."
    if any(solved for solved, _ in found.values()):
        return text
    return f"{text} It will not learn here: take a larger one, --model NAME."


def parse_reference(content: Mapping[str, Any]) -> Reference:
    """Return the curves of a reference's content. Raises ValueError, TypeError or KeyError if it is none."""
    curves = {
        str(key): [[float(value) for value in seed] for seed in seeds]
        for key, seeds in content["curves"].items()
    }
    return Reference(dict(content["settings"]), curves)
