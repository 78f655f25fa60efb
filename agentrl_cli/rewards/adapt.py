"""Reward functions with other signatures than (episode, ctx), called unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentrl_cli.registry.adapters import adapt

Parameters = Mapping[str, inspect.Parameter]


def adapt_reward(
    function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Adapt another project's function to `function(episode, ctx)`; return any other unchanged.

    `kwargs` are extra keyword arguments.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    extra = dict(kwargs or {})
    made: Callable[..., Any] | None = adapt("reward", function, parameters, extra)
    return made or (partial(function, **extra) if extra else function)


def accept_arguments(given: dict[str, Any], parameters: Parameters) -> dict[str, Any]:
    """Return the arguments that the function accepts: all of them with **kwargs, else its parameters."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {key: value for key, value in given.items() if key in parameters}
