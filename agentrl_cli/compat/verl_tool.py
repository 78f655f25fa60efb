"""A verl `BaseTool` as a Tool. Its state lasts for the episode, whereas verl creates it again for each call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from agentrl_cli.chat.media import frames_of, image_bytes
from agentrl_cli.compat.verl import OpenAIFunctionToolSchema, wants_verl
from agentrl_cli.errors import ConfigError, EnvError, raised
from agentrl_cli.tools.base import Tool, ToolContext, as_result
from agentrl_cli.types import Task, ToolResult


@dataclass
class Instance:
    """A tool's instance of one episode."""

    id: str
    kwargs: Mapping[str, Any]
    """create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs of the row's `tools_kwargs`."""
    context: ToolContext

    def of(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of one of the four coroutines."""
        return dict(self.kwargs.get(f"{name}_kwargs") or {})


class VerlTool(Tool):
    """Calls `create`, `execute`, `calc_reward` and `release` of the wrapped tool like verl's agent loop."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        schema = wrapped.get_openai_tool_schema()
        self.schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        self.schema.setdefault("type", "function")
        self.name = str(self.schema["function"]["name"])

    @classmethod
    def of(cls, kind: type, config: Mapping[str, Any], schema: Any, where: str) -> VerlTool:
        """From a class, its `config` and its `tool_schema` (a mapping, or None if the class has one).

        Raises ConfigError for an invalid schema, EnvError if the class cannot be instantiated.
        """
        try:
            read = OpenAIFunctionToolSchema.model_validate(schema) if schema is not None else None
        except ValueError as error:
            raise ConfigError(
                f"{where}: `tool_schema` is not a function schema: {error}"
            ) from error
        try:
            return cls(kind(config=dict(config), tool_schema=read))
        except Exception as error:
            raise EnvError(f"{where}: {kind.__name__} raised {raised(error)}") from error

    async def create(self, ctx: ToolContext) -> Instance:
        kwargs = tools_kwargs(ctx.task, self.name)
        made = Instance("", kwargs, ctx)
        answer = await self.wrapped.create(create_kwargs=made.of("create"), **made.of("create"))
        made.id = str(answer[0] if isinstance(answer, tuple) else answer)
        return made

    async def execute(self, state: Instance, arguments: dict[str, Any]) -> ToolResult:
        as_text = parameter_type(self.wrapped.execute, "parameters") in (
            str,
            "str",
        )  # as verl had it at first
        given = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
        answer = await self.wrapped.execute(
            state.id, given, agent_data=state.context, **state.of("execute")
        )
        response, reward, metrics = answer if isinstance(answer, tuple) else (answer, None, {})
        numbers = {
            key: float(value)
            for key, value in (metrics or {}).items()
            if isinstance(value, (int, float))
        }
        images = [image_bytes(image) for image in getattr(response, "image", None) or ()]
        images += [
            frame for video in getattr(response, "video", None) or () for frame in frames_of(video)
        ]
        text = response.text if hasattr(response, "text") else as_result(response).text
        step = None if reward is None else float(reward)
        return ToolResult(text or "", reward=step, metrics=numbers, images=tuple(images))

    async def reward(self, state: Instance) -> float | None:
        """`calc_reward`, for tools that the row's `tools_kwargs` name. Anything but a number gives no part."""
        if not state.kwargs:
            return None
        value = await self.wrapped.calc_reward(state.id, **state.of("calc_reward"))
        return float(value) if isinstance(value, Real) else None

    async def release(self, state: Instance) -> None:
        await self.wrapped.release(state.id, **state.of("release"))


def adapted(kind: Any, config: Mapping[str, Any], schema: Any, where: str) -> Tool | None:
    """Return the class as a Tool; None if it is not one of verl's."""
    return VerlTool.of(kind, config, schema, where) if wants_verl(kind, "execute") else None


def parameter_type(function: Any, name: str) -> Any:
    """Return the annotation of a function's parameter; None if it has none."""
    found = inspect.signature(function).parameters.get(name)
    return None if found is None else found.annotation


def tools_kwargs(task: Task | None, name: str) -> Mapping[str, Any]:
    """Return a row's arguments for a tool: `extra_info.tools_kwargs.NAME`, or `tools_kwargs.NAME`."""
    if task is None:
        return {}
    extra = task.data.get("extra_info")
    found = (
        task.data.get("tools_kwargs")
        or (extra.get("tools_kwargs") if isinstance(extra, Mapping) else None)
        or {}
    )
    own = found.get(name) if isinstance(found, Mapping) else None
    return own if isinstance(own, Mapping) else {}
