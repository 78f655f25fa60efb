"""The terminal screens in a browser, on this machine."""

OFFERS = {
    "moved": {
        "servers.screens": "plugins.browser.server",
    },
    "commands": {
        "screens": (
            "Look",
            f"{__name__}.command:command",
            "The screens in a browser, on this machine",
        )
    },
    "examples": {"screens": ("agentrl screens", "agentrl screens RUN --port 7600")},
}
