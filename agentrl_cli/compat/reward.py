"""Reward functions of other projects, called unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentrl_cli.compat.minimind import minimind_reward
from agentrl_cli.compat.trl_reward import trl_reward
from agentrl_cli.compat.verl_reward import verl_reward

READERS = (verl_reward, minimind_reward, trl_reward)
"""(function, its parameters, keyword arguments) to a function of (episode, ctx), or None if it has another form."""


def adapted(
    function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Adapts another project's function to `function(episode, ctx)`; returns any other unchanged.

    `kwargs` are extra keyword arguments (verl's `reward_kwargs`).
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    extra = dict(kwargs or {})
    for read in READERS:
        made: Callable[..., Any] | None = read(function, parameters, extra)
        if made is not None:
            return made
    return partial(function, **extra) if extra else function
