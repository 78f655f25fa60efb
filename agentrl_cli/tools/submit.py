"""Tools that end the episode: `submit`, `finish`, and functions that a row declares and nothing implements.

Of a declared function only whether it is called rightly counts (rows of function-calling benchmarks).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from agentrl_cli.errors import ConfigError
from agentrl_cli.tools.base import FunctionTool, Tool, ToolContext
from agentrl_cli.types import Task, ToolResult


async def submit(answer: str, ctx: ToolContext) -> ToolResult:
    """Submit the final answer. This ends the task.

    Args:
        answer: The final answer.
    """
    ctx.state["answer"] = answer
    return ToolResult("Submitted.", done=True)


async def finish(ctx: ToolContext) -> ToolResult:
    """Say that the task is done. This ends the task."""
    ctx.state["finished"] = True
    return ToolResult("Finished.", done=True)


SUBMIT = FunctionTool(submit, examples=({"answer": "42"},))
FINISH = FunctionTool(finish, examples=({},))
SUBMIT.rewinds = FINISH.rewinds = True


TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""Python's names of types, which some schemas have, to JSON Schema's."""


class DeclaredTool(Tool):
    """Stands for every function among a row's `tool_schemas`; a call is noted, and ends the episode."""

    name = "declared"
    pure = True
    examples = ({},)

    def __init__(self, schema: Mapping[str, Any] | None = None) -> None:
        given: Any = {"name": self.name, "description": ""} if schema is None else schema
        inner: Any = given.get("function") or given if isinstance(given, Mapping) else None
        parameters = inner.get("parameters") or {} if isinstance(inner, Mapping) else None
        if not isinstance(parameters, Mapping) or not inner.get("name"):
            raise ConfigError(
                f"tool_schemas has {given!r:.80}, which does not describe a function.",
                hint='Each entry is {"name": …, "description": …, "parameters": {…}}, or that under "function".',
            )
        parameters = {"type": "object", "properties": {}, **_json_schema(parameters)}
        self.name = str(inner["name"])
        self.schema = {"type": "function", "function": {**inner, "parameters": parameters}}

    def offer(self, task: Task) -> list[Tool]:
        """Return one tool for each schema of the row. Raises ConfigError for another value."""
        given = task.data.get("tool_schemas") or ()
        return [
            DeclaredTool(one) for one in (given if isinstance(given, list | tuple) else [given])
        ]

    async def execute(self, state: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult("The call is noted.", done=True)


def _json_schema(given: Any) -> Any:
    """Return a schema with JSON Schema's names of types."""
    if isinstance(given, list):
        return [_json_schema(item) for item in given]
    if not isinstance(given, Mapping):
        return copy.copy(given)
    kind = given.get("type")
    made = {key: _json_schema(value) for key, value in given.items()}
    if isinstance(kind, str) and kind in TYPES:
        made = {key: value for key, value in made.items() if key != "type"} | (
            {"type": TYPES[kind]} if TYPES[kind] else {}
        )
    return made


DECLARED = DeclaredTool()
