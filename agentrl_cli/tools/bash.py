"""`bash`: shell commands in the episode's folder, in the sandbox."""

from __future__ import annotations

from agentrl_cli.tools.base import FunctionTool, ToolContext
from agentrl_cli.tools.run_python import as_observation
from agentrl_cli.types import ToolResult


async def bash(command: str, ctx: ToolContext) -> ToolResult:
    """Run a bash command and return its output and, if it is not 0, its exit code. Every command starts in the same
    folder; files stay there between calls, variables and `cd` do not.

    Args:
        command: A command, or a script of several lines.
    """
    session = await ctx.session()
    return as_observation(await session.bash(command))


TOOL = FunctionTool(
    bash, examples=({"command": "echo hi"}, {"command": "seq 3 > n.txt && wc -l n.txt"})
)
TOOL.own_timeout = True  # as for run_python
TOOL.rewinds = True
