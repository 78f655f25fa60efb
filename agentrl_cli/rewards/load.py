"""Makes a Reward from an entry under `rewards:` of task.yaml.

exact: {weight: 1.0, primary: true}                              a function of task.py (REWARDS)
score: {function: "reward.py:compute_score", kwargs: {k: 1}}     any path, also with another project's signature
helpful: {judge: {url: "http://127.0.0.1:8000/v1", model: qwen, budget_calls: 1000}}
liked: {model: {name: my/reward-model, squash: sigmoid}}
proof: {timeout: 5, main_thread: true}     seconds of one call; for code that sets signals and hides its failure to
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.hooks.threads import stay_in_loop
from agentrl_cli.registry import resolve
from agentrl_cli.registry.adapters import foreign_imports
from agentrl_cli.rewards import Reward
from agentrl_cli.rewards.adapt import adapt_reward
from agentrl_cli.rewards.context import require_keys

KEYS = {"weight", "primary", "function", "kwargs", "judge", "model", "timeout", "main_thread"}


def load_reward(
    folder: Path, name: str, value: Mapping[str, Any], functions: Mapping[str, Any]
) -> Reward:
    """Return a reward part of a pack. Raises ConfigError for an invalid entry, NotFound for a missing function."""
    where = f"{folder / 'task.yaml'}: rewards.{name}"
    require_keys(value, KEYS, (), where)
    if sum(key in value for key in ("function", "judge", "model")) > 1:
        raise ConfigError(f"{where} has more than one of function, judge and model.")
    weight, primary, timeout = value.get("weight", 1.0), value.get("primary"), value.get("timeout")
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not math.isfinite(weight)
    ):
        raise ConfigError(f"{where}: `weight` must be a number, not {weight!r}.")
    if primary is not None and not isinstance(primary, bool):
        raise ConfigError(f"{where}: `primary` must be true or false, not {primary!r}.")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0
    ):
        raise ConfigError(f"{where}.timeout is {timeout!r}; seconds above 0 are expected.")
    function = _function(folder, where, name, value, functions)
    return Reward(
        name, function, float(weight), bool(primary), None if timeout is None else float(timeout)
    )


def _function(
    folder: Path, where: str, name: str, value: Mapping[str, Any], functions: Mapping[str, Any]
) -> Any:
    if "judge" in value:
        from agentrl_cli.rewards.judge import Judge

        return Judge.of(_mapping(value["judge"], where), f"{where}.judge", folder)
    if "model" in value:
        from agentrl_cli.rewards.model import RewardModel

        return RewardModel.of(_mapping(value["model"], where), f"{where}.model", folder)
    if value.get("function") is None:
        if name not in functions:
            raise NotFound.of(f"reward in {folder / 'task.py'} (REWARDS)", name, functions)
        found = functions[name]
    else:
        with foreign_imports(folder):
            found = resolve("rewards", {}, str(value["function"]), base=folder)
    if value.get("main_thread"):
        stay_in_loop(found)
    return adapt_reward(found, value.get("kwargs"))


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: judge and model are mappings.")
    return value
