"""The store as read-only MCP tools, for a coding agent that is to find out why a run failed."""

from __future__ import annotations

OFFERS = {
    "commands": {
        "mcp": (
            "Look",
            "agentrl_cli.plugins.ask.command:command",
            "The store as tools of a coding agent",
        )
    },
    "examples": {"mcp": ("agentrl mcp --project my-task", "agentrl mcp --db runs/agentrl.db")},
}
