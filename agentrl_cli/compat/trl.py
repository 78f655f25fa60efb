"""TRL's `environment_factory` classes as tools: https://huggingface.co/docs/trl/grpo_trainer

A class has `reset(**row)`, which may return text to add to the task; every other public method is a tool;
`get_reward()`, if present, is the environment's own reward. One instance serves one episode, shared by its tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl_cli.errors import ConfigError, EnvError
from agentrl_cli.registry import resolve
from agentrl_cli.threads import call, in_thread
from agentrl_cli.tools.base import Tool, ToolContext, as_result
from agentrl_cli.tools.schema import tool_schema
from agentrl_cli.types import ToolResult

NOT_TOOLS = {"reset", "get_reward", "close"}
STATE = "environment"
"""Key of the episode's instance in `ToolContext.state`."""


def environment_tools(where: str, value: Any, folder: Path) -> list[Tool]:
    """The tools of a class, or of several by name: the row's `environment` picks one, the others' tools refuse."""
    named = value if isinstance(value, Mapping) else {"": value}
    tools: dict[str, MethodTool] = {}
    for name, target in named.items():
        factory = resolve("environments", {}, target, base=folder) if isinstance(target, str) else target
        if not callable(factory):
            raise ConfigError(f"{where}: {target} is neither a class nor a function that makes one.")
        for method, function in _methods(where, factory).items():
            made = MethodTool(method, function, {**(tools[method].factories if method in tools else {}), name: factory})
            if method in tools and made.schema != tools[method].schema:
                raise ConfigError(f"{where}: two environments have a tool {method!r} with different parameters.")
            tools[method] = made
    every = {name: factory for tool in tools.values() for name, factory in tool.factories.items()}
    for tool in tools.values():
        tool.worlds = every
    return list(tools.values())


def _methods(where: str, factory: Callable[[], Any]) -> dict[str, Callable[..., Any]]:
    """Public methods of the environment class, or of the object that a factory function returns."""
    kind = factory if isinstance(factory, type) else type(_made(where, factory))
    found: dict[str, Callable[..., Any]] = {
        name: function
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_TOOLS
    }
    if not found or not hasattr(kind, "reset"):
        raise ConfigError(f"{where}: {kind.__name__} needs reset() and at least one public method, which is a tool.")
    return found


def _made(where: str, factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        raise EnvError(f"{where}: the environment raised {type(error).__name__}: {error}") from error


class MethodTool(Tool):
    """A method of the episode's environment."""

    opens = True

    def __init__(self, name: str, function: Callable[..., Any], factories: Mapping[str, Callable[[], Any]]) -> None:
        self.name = name
        self.schema = tool_schema(function, name=name)
        self.factories = dict(factories)
        self.worlds: Mapping[str, Callable[[], Any]] = self.factories

    async def create(self, ctx: ToolContext) -> ToolContext:
        if STATE not in ctx.state:
            row = dict(ctx.task.data) if ctx.task is not None else {}
            name = str(row.get(STATE) or next(iter(self.worlds)))
            if name not in self.worlds:
                raise EnvError(f"The row's environment {name!r} is not one of {', '.join(self.worlds)}.")
            world = ctx.state[STATE] = await call(_made, name, self.worlds[name])
            if ctx.task is not None:
                row["prompt"] = list(ctx.task.prompt)
            said = await _value(world.reset, **row)
            if said:
                ctx.opening.append(str(said))
        return ctx

    async def execute(self, state: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        method = getattr(state.state[STATE], self.name, None)
        if method is None:
            return ToolResult(f"Error: there is no {self.name} in this environment.", error="unknown_tool")
        async with state.writing:  # calls of one turn run concurrently, but an environment takes one at a time
            return as_result(await _value(method, **arguments))

    async def reward(self, state: ToolContext) -> float | None:
        """`get_reward()`, returned once, by the environment's first tool."""
        world: Any = state.state.get(STATE)
        if not hasattr(world, "get_reward") or state.state.setdefault("environment_rewarded", self.name) != self.name:
            return None
        value = await _value(world.get_reward)
        return None if value is None else float(value)

    async def release(self, state: ToolContext) -> None:
        world: Any = state.state.get(STATE)
        if hasattr(world, "close") and not state.state.get("environment_closed"):
            state.state["environment_closed"] = True
            await _value(world.close)


async def _value(function: Callable[..., Any], **arguments: Any) -> Any:
    """A method's result; a sync one runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    answer = await in_thread(function, **arguments)
    return await answer if inspect.isawaitable(answer) else answer
