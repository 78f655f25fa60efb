"""Harbor task folders both ways: `agentrl init --from harbor:FOLDER`, `agentrl harbor FOLDER`."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.harbor"
OFFERS = {
    "sources": {"harbor": f"{HERE}.source:add"},
    "commands": {
        "harbor": ("Manage", f"{HERE}.command:command", "Tasks of a pack as Harbor folders")
    },
    "examples": {
        "harbor": (
            "agentrl harbor tasks --pack swe-task -n 20",
            "agentrl harbor tasks --split test",
        )
    },
}
