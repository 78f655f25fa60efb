"""Tools of MCP servers in a pack."""

OFFERS = {
    "moved": {
        "tools.mcp": "plugins.mcp_client.client",
        "tools.mcp_server": "plugins.mcp_client.server",
    },
    "adapters": {"mcp": f"{__name__}.client:configured_tools"},
    "sources": {"mcp": f"{__name__}.client:add"},
}
