"""Trajectories of others: ATIF both ways, OTLP and session logs in, a pack made of them."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.traces"
GROUP = ("Run", "agentrl_cli.commands.imported:app", "Episodes and models of other projects")
OFFERS = {
    "commands": {"import": GROUP},
    "subcommands": {
        "import atif": f"{HERE}.command:atif",
        "import otlp": f"{HERE}.command:otlp",
    },
    "examples": {
        "import atif": ("agentrl import atif trajectory.json", "agentrl import atif *.jsonl"),
        "import otlp": (
            "agentrl import otlp spans.jsonl",
            "agentrl import otlp --listen 4318",
        ),
    },
    "exports": {"atif": f"{HERE}.atif_write:lines"},
    "sources": {"traces": f"{HERE}.recorded:add"},
    "readers": {"traces": f"{HERE}.load:load"},
}
