"""`run_python`: a Python session in the sandbox that lasts the episode."""

from __future__ import annotations

from agentrl_cli.errors import SandboxFault
from agentrl_cli.sandbox import ExecResult
from agentrl_cli.tools.base import FunctionTool, ToolContext
from agentrl_cli.types import ToolResult


async def run_python(code: str, ctx: ToolContext) -> ToolResult:
    """Run Python code and return what it prints. Variables are kept between calls.

    Args:
        code: Python code.
    """
    session = await ctx.session()
    return as_observation(await session.cell(code))


def as_observation(result: ExecResult) -> ToolResult:
    """Return the text of an execution for the model. Raises SandboxFault if the sandbox failed."""
    if result.infrastructure:
        raise SandboxFault(
            f"The sandbox failed: {result.status} {getattr(result, 'detail', '')}".strip()
        )
    return ToolResult(
        text=result.text(),
        error=None if result.ok else str(result.status),
        seconds=result.seconds,
        level=str(result.level),
    )


TOOL = FunctionTool(run_python, examples=({"code": "print(6 * 7)"},))
TOOL.own_timeout = True  # the sandbox limits the time; waiting for a slot there must not count
TOOL.rewinds = True
