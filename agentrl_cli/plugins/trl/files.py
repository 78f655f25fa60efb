"""TRL's `environment_factory` classes as tools, and its reward functions: https://huggingface.co/docs/trl/grpo_trainer

A class has `reset(**row)`, which may return text to add to the task, or all of it; every other public method is a tool;
`get_reward()`, if present, is the environment's own reward. One instance serves one episode, shared by its tools.

f(prompts, completions, completion_ids, <the row's columns>, **kwargs) → one number each: arguments are given by name. A
row whose prompt is a text is in standard format: prompts and completions are texts. One with messages is
conversational: they are lists of messages, and a list that a tool returned stays a list. TRL's functions take a batch;
here they get one episode, as a batch of one.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, MutableMapping
from itertools import dropwhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentrl_cli.errors import ConfigError, EnvError, describe_error
from agentrl_cli.hooks.threads import call, name_of
from agentrl_cli.registry import resolve
from agentrl_cli.rewards.adapt import Parameters, accept_arguments
from agentrl_cli.rewards.context import RewardContext, split_messages
from agentrl_cli.tasks.forms import Form, read_own
from agentrl_cli.tools.base import Tool, ToolContext, as_result
from agentrl_cli.tools.schema import tool_schema
from agentrl_cli.types import Episode, Message, Origin, Task, ToolResult, Turn
from agentrl_cli.types.content import content_text

NOT_TOOLS = {"reset", "get_reward", "close"}
STATE = "environment"
"""Key of the episode's instance in `ToolContext.state`."""
FORM = Form(lambda row: False, read_own)
"""Its rows are ours without an `id`, and recognised as such."""
REWARDS = {"environment": {"primary": True, "function": "environment"}}
"""The reward of a pack that names none, if its environment has `get_reward`."""


def environment_tools(where: str, value: Any, folder: Path) -> list[Tool]:
    """Return the tools of a class, or of several by name: a row's `environment` picks one, and
    shows its tools alone.
    """
    named = value if isinstance(value, Mapping) else {"": value}
    worlds: dict[str, Callable[[], Any]] = {}
    methods: dict[str, dict[str, Callable[..., Any]]] = {}
    scores = False
    for name, target in named.items():
        factory = (
            resolve("environments", {}, target, base=folder) if isinstance(target, str) else target
        )
        if not callable(factory):
            raise ConfigError(
                f"{where}: {target} is neither a class nor a function that makes one."
            )
        worlds[str(name)] = factory
        kind = factory if isinstance(factory, type) else type(_make(where, factory))
        scores |= hasattr(kind, "get_reward")
        for method, function in _methods(where, kind).items():
            methods.setdefault(method, {})[str(name)] = function
    return [MethodTool(method, functions, worlds, scores) for method, functions in methods.items()]


def _methods(where: str, kind: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of an environment's class."""
    found: dict[str, Callable[..., Any]] = {
        name: function
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_TOOLS
    }
    if not found or not hasattr(kind, "reset"):
        raise ConfigError(
            f"{where}: {kind.__name__} needs reset() and at least one public method, which is a tool."
        )
    return found


def _make(where: str, factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        raise EnvError(f"{where}: the environment raised {describe_error(error)}") from error


class MethodTool(Tool):
    """A method of the episode's environment, of those environments that have it."""

    opens = True

    def __init__(
        self,
        name: str,
        functions: Mapping[str, Callable[..., Any]],
        worlds: Mapping[str, Callable[[], Any]],
        scores: bool = False,
    ) -> None:
        """`functions`: the method by the environment's name; `worlds`: the makers of all environments by name.

        `scores`: whether one of them has `get_reward`.
        """
        self.name = name
        self.schemas = {
            world: tool_schema(function, name=name) for world, function in functions.items()
        }
        self.schema = next(iter(self.schemas.values()))
        self.worlds = worlds
        self.owns_rows = len(worlds) == 1
        if scores:
            self.own_rewards = REWARDS

    def wrong(self, row: Mapping[str, Any]) -> str:
        name = row.get(STATE)
        if len(self.worlds) == 1 or name in self.worlds:
            return ""
        return f"`environment` is {name!r}, which is not one of {', '.join(self.worlds)}."

    def for_task(self, task: Task) -> Tool | None:
        name = self._world_name(task.data)
        if len(self.worlds) == 1:
            return self
        if name not in self.schemas:
            return None
        shown = copy.copy(self)
        shown.schema = self.schemas[name]
        return shown

    def _world_name(self, row: Mapping[str, Any]) -> str:
        return str(row.get(STATE)) if len(self.worlds) > 1 else next(iter(self.worlds))

    async def create(self, ctx: ToolContext) -> ToolContext:
        if STATE not in ctx.state:
            row = dict(ctx.task.data) if ctx.task is not None else {}
            name = self._world_name(row)
            if name not in self.worlds:
                raise EnvError(
                    f"The row's environment {name!r} is not one of {', '.join(self.worlds)}."
                )
            world = ctx.state[STATE] = await call(_make, name, self.worlds[name])
            if ctx.task is not None:
                row["prompt"] = list(ctx.task.prompt)
            if len(self.worlds) > 1:  # it only chooses
                row.pop(STATE, None)
            said = _text(
                await call(
                    world.reset, **accept_arguments(row, inspect.signature(world.reset).parameters)
                )
            )
            if said:
                ctx.opening.append(said)
        return ctx

    async def execute(self, state: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        method = getattr(state.state[STATE], self.name, None)
        if method is None:
            return ToolResult(
                f"Error: there is no {self.name} in this environment.", error="unknown_tool"
            )
        async with (
            state.writing
        ):  # calls of one turn run concurrently, but an environment takes one at a time
            return as_result(await call(method, **arguments))

    async def reward(self, state: ToolContext) -> float | None:
        """Return `get_reward()`, once, by the environment's first tool."""
        world: Any = state.state.get(STATE)
        if (
            not hasattr(world, "get_reward")
            or state.state.setdefault("environment_rewarded", self.name) != self.name
        ):
            return None
        value = await _reward_of(state.state)
        return None if value is None else float(value)

    async def release(self, state: ToolContext) -> None:
        world: Any = state.state.get(STATE)
        if hasattr(world, "close") and not state.state.get("environment_closed"):
            state.state["environment_closed"] = True
            await call(world.close)


async def environment(episode: Episode, ctx: RewardContext) -> Any:
    """Return `get_reward()` of the episode's environment; None, so not applicable, if it has none."""
    if STATE not in ctx.state:
        raise EnvError("The episode has no environment with get_reward().")
    return await _reward_of(ctx.state)


async def _reward_of(state: MutableMapping[str, Any]) -> Any:
    """Return `get_reward()` of the environment, called once; None if it has none."""
    if "environment_reward" not in state:
        get = getattr(state[STATE], "get_reward", None)
        state["environment_reward"] = None if get is None else await call(get)
    return state["environment_reward"]


def _text(said: Any) -> str:
    """Return the addition of `reset` to the task, a text or blocks of text. Raises EnvError for an image."""
    if said is None or isinstance(said, str):
        return said or ""
    if isinstance(said, list) and all(
        isinstance(block, Mapping) and "text" in block for block in said
    ):
        return "".join(str(block["text"]) for block in said)
    raise EnvError(
        "reset() returned something other than a text or blocks of text; images belong in a tool's answer."
    )


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
