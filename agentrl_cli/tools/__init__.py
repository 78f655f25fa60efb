"""Tools: the actions of an agent. A typed function with a docstring is one; built-in tools have a line in `TOOLS`."""

from __future__ import annotations

from typing import Any

from agentrl_cli.chat.parse import validate_arguments
from agentrl_cli.errors import ConfigError
from agentrl_cli.registry import resolve
from agentrl_cli.registry.old_modules import keep_old_names
from agentrl_cli.tools.base import FunctionTool, Tool, ToolContext, refuse, tool
from agentrl_cli.tools.schema import tool_schema

TOOLS: dict[str, str] = {
    "calculator": "agentrl_cli.tools.calculator:TOOL",
    "run_python": "agentrl_cli.tools.session:TOOL",
    "bash": "agentrl_cli.tools.session:BASH",
    "files": "agentrl_cli.tools.session:FILES",
    "sql": "agentrl_cli.tools.sql:TOOL",
    "search": "agentrl_cli.tools.search:TOOL",
    "submit": "agentrl_cli.tools.submit:SUBMIT",
    "declared": "agentrl_cli.tools.submit:DECLARED",
    "finish": "agentrl_cli.tools.submit:FINISH",
}
"""Name to the module and object of a built-in tool; `as_tool(name)` loads it."""

__all__ = [
    "TOOLS",
    "FunctionTool",
    "Tool",
    "ToolContext",
    "as_tool",
    "refuse",
    "tool",
    "tool_schema",
    "validate_arguments",
]


def as_tool(value: Any) -> Tool:
    """Return a Tool from a Tool, a Tool class, a plain typed function, or a name (see `TOOLS`)."""
    if isinstance(value, Tool):
        return value
    if isinstance(value, str):
        return as_tool(resolve("tools", TOOLS, value))
    if isinstance(value, type) and issubclass(value, Tool):
        return value()
    if callable(value):
        return FunctionTool(value)
    raise ConfigError(
        f"{value!r} is not a tool.", hint="A tool is a typed function with a docstring, or a Tool."
    )


keep_old_names(__name__)
