"""Tools of MCP servers in a pack."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.mcp_client"
OFFERS = {
    "moved": {
        "tools.mcp": "plugins.mcp_client.client",
        "tools.mcp_server": "plugins.mcp_client.server",
    },
    "adapters": {"mcp": f"{HERE}.entries:configured_tools"},
    "sources": {"mcp": f"{HERE}.entries:add"},
}
