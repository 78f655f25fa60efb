"""Harbor task folders both ways: `agentrl init --from harbor:FOLDER`, `agentrl harbor FOLDER`."""

OFFERS = {
    "sources": {"harbor": f"{__name__}.source:add"},
    "commands": {
        "harbor": ("Manage", f"{__name__}.command:command", "Tasks of a pack as Harbor folders")
    },
    "examples": {
        "harbor": (
            "agentrl harbor tasks --pack swe-task -n 20",
            "agentrl harbor tasks --split test",
        )
    },
}
