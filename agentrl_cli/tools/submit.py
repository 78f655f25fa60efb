"""`submit` and `finish`: tools that end the episode."""

from __future__ import annotations

from agentrl_cli.tools.base import FunctionTool, ToolContext
from agentrl_cli.types import ToolResult


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
