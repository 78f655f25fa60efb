"""The web as tools: pages of allowed hosts as text, and the operations of an HTTP service from its description."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.web"
OFFERS = {
    "moved": {
        "tools.fetch_page": "plugins.web.fetch_page",
        "tools.openapi": "plugins.web.openapi",
    },
    "tools": {"fetch_page": f"{HERE}.fetch_page:TOOL"},
    "adapters": {
        "openapi": f"{HERE}.openapi:openapi_tools",
        "service": f"{HERE}.openapi:draft_service",
    },
}
