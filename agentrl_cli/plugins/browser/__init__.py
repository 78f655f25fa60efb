"""The terminal screens in a browser, on this machine."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.browser"
OFFERS = {
    "moved": {
        "servers.screens": "plugins.browser.server",
    },
    "commands": {
        "screens": ("Look", f"{HERE}.command:command", "The screens in a browser, on this machine")
    },
    "examples": {"screens": ("agentrl screens", "agentrl screens RUN --port 7600")},
}
