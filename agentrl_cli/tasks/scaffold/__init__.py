"""Writes a new pack: a blank one, or from rows, functions, an agent, an HTTP service or an MCP server."""

from agentrl_cli.tasks.scaffold.draft import Draft, build
from agentrl_cli.tasks.scaffold.sources import add_source, blank, finish

__all__ = ["Draft", "add_source", "blank", "build", "finish"]
