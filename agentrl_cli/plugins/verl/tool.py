"""A verl `BaseTool` as a Tool. Its state lasts for the episode, whereas verl creates it again for each call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from agentrl_cli.chat.media import frames_of, image_bytes
from agentrl_cli.envs.user_simulator import kwargs_of
from agentrl_cli.errors import ConfigError, EnvError, describe_error
from agentrl_cli.plugins.verl.stand_ins import OpenAIFunctionToolSchema, wants_verl
from agentrl_cli.tools.base import Tool, ToolContext, as_result
from agentrl_cli.types import ToolResult


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
        """Make one from a class, its `config` and its `tool_schema` (a mapping, or None if the class has one).

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
            raise EnvError(f"{where}: {kind.__name__} raised {describe_error(error)}") from error

    async def create(self, ctx: ToolContext) -> Instance:
        given = {} if ctx.task is None else kwargs_of(ctx.task, "tools_kwargs").get(self.name)
        made = Instance("", given if isinstance(given, Mapping) else {}, ctx)
        answer = await self.wrapped.create(create_kwargs=made.of("create"), **made.of("create"))
        made.id = str(answer[0] if isinstance(answer, tuple) else answer)
        return made

    async def execute(self, state: Instance, arguments: dict[str, Any]) -> ToolResult:
        taken = inspect.signature(self.wrapped.execute).parameters.get("parameters")
        as_text = taken is not None and taken.annotation in (str, "str")  # as verl had it at first
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
        """Return `calc_reward`, for tools that the row's `tools_kwargs` name. Anything but a number gives no part."""
        if not state.kwargs:
            return None
        value = await self.wrapped.calc_reward(state.id, **state.of("calc_reward"))
        return float(value) if isinstance(value, Real) else None

    async def release(self, state: Instance) -> None:
        await self.wrapped.release(state.id, **state.of("release"))


def adapt_tool(kind: Any, config: Mapping[str, Any], schema: Any, where: str) -> Tool | None:
    """Return the class as a Tool; None if it is not one of verl's."""
    return VerlTool.of(kind, config, schema, where) if wants_verl(kind, "execute") else None
