"""TRL's reward functions: f(prompts, completions, completion_ids, <the row's columns>, **kwargs) → one number each.

https://huggingface.co/docs/trl/grpo_trainer: arguments are given by name. A row whose prompt is a text is in standard
format: prompts and completions are texts. One with messages is conversational: they are lists of messages, and a list
that a tool returned stays a list. TRL's functions take a batch; here they get one episode, as a batch of one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from itertools import dropwhile
from types import SimpleNamespace
from typing import Any

from agentrl_cli.errors import EnvError
from agentrl_cli.hooks.threads import call, name_of
from agentrl_cli.rewards.adapt import Parameters, accept_arguments
from agentrl_cli.rewards.context import RewardContext, split_messages
from agentrl_cli.types import Episode, Message, Origin, Turn
from agentrl_cli.types.content import content_text

NAMES = {
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
}
NOT_COLUMNS = {"prompt", "completion", "completion_ids"}
OWN = ("episode", "ctx")


def adapt_reward(
    function: Callable[..., Any], parameters: Parameters, extra: dict[str, Any]
) -> Any:
    """Return the function as one of (episode, ctx); None if it does not have TRL's parameters.

    A function of columns alone, `f(question, answer, **kwargs)`, looks like one of (episode, ctx): the row decides.
    """
    if set(parameters) & NAMES:
        return _call_with_batch(function, parameters, extra)
    columns = _columns(parameters)
    if columns is None:
        return None
    by_name = _call_with_batch(function, parameters, extra)

    async def either(episode: Episode, ctx: RewardContext) -> Any:
        if len(columns) == 2 and not set(columns) <= {*ctx.task.data, *extra}:
            return await call(function, episode, ctx, **extra)
        return await by_name(episode, ctx)

    return either


def _columns(parameters: Parameters) -> list[str] | None:
    """Return the names that a function of columns and **kwargs asks for; None for any other function."""
    kinds = [parameter.kind for parameter in parameters.values()]
    first = next(iter(parameters), "")
    if (
        inspect.Parameter.VAR_KEYWORD not in kinds
        or inspect.Parameter.VAR_POSITIONAL in kinds
        or first in OWN
    ):
        return None
    named = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    wanted = [p.name for p in named if p.default is p.empty]
    takes_two = len(wanted) <= 2 <= len([p for p in named if p.kind is not p.KEYWORD_ONLY])
    return [p.name for p in named][:2] if takes_two else wanted[:1] or [""]


def _call_with_batch(
    function: Callable[..., Any], parameters: Parameters, extra: dict[str, Any]
) -> Callable[..., Any]:
    async def reward(episode: Episode, ctx: RewardContext) -> Any:
        said: dict[str, Any] = {}
        given = {
            **{key: [value] for key, value in ctx.task.data.items() if key not in NOT_COLUMNS},
            **_conversation(episode, ctx),
            "trainer_state": SimpleNamespace(global_step=episode.step or 0),
            "log_extra": lambda name, values: said.update({name: values[0] if values else None}),
            "log_metric": lambda name, value: said.update({name: value}),
            **extra,
        }
        environment = ctx.state.get("environment")
        if environment is not None:
            given["environments"] = [environment]
        lacking = [p.name for p in parameters.values() if _is_required(p) and p.name not in given]
        if lacking:
            raise EnvError(
                f"The reward function {name_of(function)} needs {', '.join(lacking)}; the row has none."
            )
        value = _one(await call(function, **accept_arguments(given, parameters)))
        return None if value is None else (value, ", ".join(f"{k} {v}" for k, v in said.items()))

    return reward


def _is_required(parameter: inspect.Parameter) -> bool:
    variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and not variable


def _one(answers: Any) -> float | None:
    """Return the only reward of a batch of one; None and NaN are none, as in TRL."""
    try:
        (answer,) = answers
        value = None if answer is None else float(answer)
    except (TypeError, ValueError):
        raise EnvError(
            f"The reward function returned {answers!r}; a list of one number is expected."
        ) from None
    return None if value is None or math.isnan(value) else value


def _conversation(episode: Episode, ctx: RewardContext) -> dict[str, list[Any]]:
    """Return `prompts`, `completions` and `completion_ids` of a batch of one."""
    main = episode.chain(episode.main)
    turns = list(dropwhile(lambda turn: turn.role != "assistant", main.turns))
    # Everything to the last sampled token, tool results included.
    sampled = [n for n, origin in enumerate(main.tokens.origin) if origin == Origin.MODEL]
    ids = [int(id_) for id_ in main.tokens.ids[turns[0].start : sampled[-1] + 1]] if sampled else []
    prompt, messages = split_messages(episode, ctx)
    completion = [message for turn in turns for message in _with_values(turn)]
    text = ctx.task.data.get("prompt")
    if not isinstance(text, str):
        return {"prompts": [prompt], "completions": [completion], "completion_ids": [ids]}
    said = (
        "\n".join(content_text(m.get("content")) for m in messages)
        if ctx.decode is None
        else ctx.decode(ids)
    )
    return {"prompts": [text], "completions": [said], "completion_ids": [ids]}


def _with_values(turn: Turn) -> list[Message]:
    """Return a turn's messages, lists that tools returned in place of their texts."""
    values = [result.value for result in turn.results]
    if turn.role != "tool" or len(values) != len(turn.messages):
        return list(turn.messages)
    given: list[Mapping[str, Any]] = [
        {} if value is None else {"content": value} for value in values
    ]
    return [{**message, **value} for message, value in zip(turn.messages, given, strict=True)]
