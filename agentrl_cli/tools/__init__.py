"""Tools: what an agent can do. A typed function with a docstring is one; those here have a line in `TOOLS`."""

from __future__ import annotations

from agentrl_cli.tools.base import (
    FunctionTool,
    Tool,
    ToolContext,
    as_tool,
    refused,
    tool,
    tool_schema,
    validate_arguments,
)

TOOLS: dict[str, str] = {
    "calculator": "agentrl_cli.tools.calculator:TOOL",
    "run_python": "agentrl_cli.tools.run_python:TOOL",
    "bash": "agentrl_cli.tools.bash:TOOL",
    "files": "agentrl_cli.tools.files:TOOL",
    "sql": "agentrl_cli.tools.sql:TOOL",
    "search": "agentrl_cli.tools.search:TOOL",
    "fetch_page": "agentrl_cli.tools.fetch_page:TOOL",
    "submit": "agentrl_cli.tools.submit:SUBMIT",
    "finish": "agentrl_cli.tools.submit:FINISH",
}
"""Name to the module and object of a built-in tool; `as_tool(name)` loads it."""

__all__ = [
    "TOOLS",
    "FunctionTool",
    "Tool",
    "ToolContext",
    "as_tool",
    "refused",
    "tool",
    "tool_schema",
    "validate_arguments",
]
