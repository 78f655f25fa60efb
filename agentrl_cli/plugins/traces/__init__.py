"""Trajectories of others: ATIF both ways, OTLP and session logs in, a pack made of them."""

GROUP = ("Run", "agentrl_cli.commands.imported:app", "Episodes and models of other projects")
OFFERS = {
    "commands": {"import": GROUP},
    "subcommands": {
        "import atif": f"{__name__}.command:atif",
        "import otlp": f"{__name__}.command:otlp",
    },
    "examples": {
        "import atif": ("agentrl import atif trajectory.json", "agentrl import atif *.jsonl"),
        "import otlp": (
            "agentrl import otlp spans.jsonl",
            "agentrl import otlp --listen 4318",
        ),
    },
    "exports": {"atif": f"{__name__}.atif_write:lines"},
    "sources": {"traces": f"{__name__}.recorded:add"},
    "readers": {"traces": f"{__name__}.load:load"},
}
