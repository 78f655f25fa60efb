"""Makes a Reward from an entry under `rewards:` of task.yaml.

exact: {weight: 1.0, primary: true}                              a function of task.py (REWARDS)
score: {function: "reward.py:compute_score", kwargs: {k: 1}}     any path, also with another project's signature
helpful: {judge: {url: "http://127.0.0.1:8000/v1", model: qwen, budget_calls: 1000}}
liked: {model: {name: my/reward-model, squash: sigmoid}}
proof: {timeout: 5, main_thread: true}     seconds of one call; for code that sets signals and hides its failure to
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from agentrl_cli.config.yamlfile import read_as
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.hooks.threads import stay_in_loop
from agentrl_cli.registry import resolve
from agentrl_cli.registry.adapters import foreign_imports
from agentrl_cli.rewards import Reward
from agentrl_cli.rewards.adapt import adapt_reward
from agentrl_cli.types.section import Seconds


class Entry(BaseModel):
    """An entry under `rewards:`. At most one of function, judge and model; without any it is of task.py."""

    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    primary: bool | None = None
    function: str | None = None
    kwargs: dict[str, Any] | None = None
    judge: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    timeout: Seconds | None = None
    main_thread: bool | None = None


def load_reward(
    folder: Path, name: str, value: Mapping[str, Any], functions: Mapping[str, Any]
) -> Reward:
    """Return a reward part of a pack. Raises ConfigError for an invalid entry, NotFound for a missing function."""
    where = f"{folder / 'task.yaml'}: rewards.{name}"
    entry = read_as(Entry, value, where, Entry.model_fields, strict=True)
    for key in ("judge", "model"):
        if key in value and value[key] is None:
            raise ConfigError(f"{where}.{key} is empty.", hint="Fill it in, or remove the key.")
    if sum(one is not None for one in (entry.function, entry.judge, entry.model)) > 1:
        raise ConfigError(f"{where} has more than one of function, judge and model.")
    function = _function(folder, where, name, entry, functions)
    return Reward(name, function, entry.weight, bool(entry.primary), entry.timeout)


def _function(
    folder: Path, where: str, name: str, entry: Entry, functions: Mapping[str, Any]
) -> Any:
    if entry.judge is not None:
        from agentrl_cli.rewards.judge import Judge

        return Judge.of(entry.judge, f"{where}.judge", folder)
    if entry.model is not None:
        from agentrl_cli.rewards.model import RewardModel

        return RewardModel.of(entry.model, f"{where}.model", folder)
    if entry.function is None:
        if name not in functions:
            raise NotFound.of(f"reward in {folder / 'task.py'} (REWARDS)", name, functions)
        found = functions[name]
    else:
        with foreign_imports(folder):
            found = resolve("rewards", {}, entry.function, base=folder)
    if entry.main_thread:
        stay_in_loop(found)
    return adapt_reward(found, entry.kwargs)
