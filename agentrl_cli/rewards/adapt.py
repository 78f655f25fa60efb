"""Reward functions of other projects, called unchanged.

    verl   compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) → float, or {"score": …}
    TRL    f(prompts, completions, completion_ids, <row's columns>, **kwargs) → list of float or None

TRL's functions take a batch; here they get one episode at a time, as a batch of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from agentrl_cli.errors import EnvError
from agentrl_cli.rewards.context import RewardContext, split
from agentrl_cli.threads import call
from agentrl_cli.types import Episode, Origin

VERL = {"solution_str", "ground_truth"}


def adapted(function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Adapts a function with verl's or TRL's signature to `function(episode, ctx)`; returns any other unchanged.

    `kwargs` are extra keyword arguments (verl's `reward_kwargs`).
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    extra = dict(kwargs or {})
    if set(parameters) >= VERL:
        return _of_verl(function, parameters, extra)
    if "completions" in parameters:
        return _of_trl(function, parameters, extra)
    return partial(function, **extra) if extra else function


def _of_verl(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], extra: dict[str, Any]
) -> Callable[..., Any]:
    async def reward(episode: Episode, ctx: RewardContext) -> Any:
        data = ctx.task.data
        rewards = [result.reward for turn in episode.turns for result in turn.results if result.reward is not None]
        info = {**(data.get("extra_info") or {}), "num_turns": len(episode.turns), "rollout_reward_scores": rewards}
        given = {
            "data_source": data.get("data_source") or episode.family,
            "solution_str": ctx.response(episode),
            "ground_truth": data.get("ground_truth", data.get("answer")),
            "extra_info": info,
            **extra,
        }
        return _verl_answer(await call(function, **_accepted(given, parameters)))

    return reward


def _verl_answer(answer: Any) -> Any:
    if not isinstance(answer, Mapping):
        return answer
    if "score" not in answer:
        raise EnvError(f"The reward function returned {sorted(answer)}; a mapping needs `score`.")
    return answer["score"], ", ".join(f"{key} {value}" for key, value in answer.items() if key != "score")


def _of_trl(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], extra: dict[str, Any]
) -> Callable[..., Any]:
    async def reward(episode: Episode, ctx: RewardContext) -> Any:
        prompt, completion = split(episode, ctx)
        said: dict[str, Any] = {}
        given = {
            **{key: [value] for key, value in ctx.task.data.items()},
            **{key: [value] for key, value in extra.items()},
            "prompts": [prompt],
            "completions": [completion],
            "completion_ids": [_completion_ids(episode)],
            "trainer_state": SimpleNamespace(global_step=episode.step or 0),
            "log_extra": lambda name, values: said.update({name: values[0] if values else None}),
            "log_metric": lambda name, value: said.update({name: value}),
        }
        environment = ctx.state.get("environment")
        if environment is not None:
            given["environments"] = [environment]
        answers = await call(function, **_accepted(given, parameters))
        if not isinstance(answers, (list, tuple)) or len(answers) != 1:
            raise EnvError(f"The reward function returned {answers!r}; a list of one number is expected.")
        return None if answers[0] is None else (answers[0], ", ".join(f"{k} {v}" for k, v in said.items()))

    return reward


def _completion_ids(episode: Episode) -> list[int]:
    episode = episode.chain(episode.main)
    first = next((turn.start for turn in episode.turns if turn.role == "assistant"), len(episode.tokens))
    ids = episode.tokens.ids[first:]
    return [int(id_) for id_, origin in zip(ids, episode.tokens.origin[first:], strict=True) if origin == Origin.MODEL]


def _accepted(given: dict[str, Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The arguments that the function accepts: all of them with **kwargs, else its parameters."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {key: value for key, value in given.items() if key in parameters}
