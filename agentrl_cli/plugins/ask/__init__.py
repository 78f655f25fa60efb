"""The store as read-only MCP tools, for a coding agent that is to find out why a run failed."""

OFFERS = {
    "commands": {
        "mcp": (
            "Look",
            f"{__name__}.command:command",
            "The store as tools of a coding agent",
        )
    },
    "examples": {"mcp": ("agentrl mcp --project my-task", "agentrl mcp --db runs/agentrl.db")},
}
