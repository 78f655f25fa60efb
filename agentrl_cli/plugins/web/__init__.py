"""The web as tools: pages of allowed hosts as text, and the operations of an HTTP service from its description."""

OFFERS = {
    "moved": {
        "tools.fetch_page": "plugins.web.fetch_page",
        "tools.openapi": "plugins.web.openapi",
    },
    "tools": {"fetch_page": f"{__name__}.fetch_page:TOOL"},
    "adapters": {
        "openapi": f"{__name__}.openapi:openapi_tools",
        "service": f"{__name__}.openapi:draft_service",
    },
}
