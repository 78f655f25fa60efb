"""minimind's files as they are: agent scripts, rows and weights; and the pack minimind-task."""

GROUP = ("Run", "agentrl_cli.commands.imported:app", "Episodes and models of other projects")
OFFERS = {
    "moved": {
        "compat.minimind": "plugins.minimind.files",
        "models.import_minimind": "plugins.minimind.command",
    },
    "adapters": {
        "table": f"{__name__}.files:table_tools",
        "reward": f"{__name__}.files:adapt_reward",
    },
    "forms": {"minimind": f"{__name__}.files:FORM"},
    "commands": {"import": GROUP},
    "subcommands": {"import minimind": f"{__name__}.command:minimind"},
    "examples": {
        "import minimind": (
            "agentrl import minimind full_sft.pth warm",
            "agentrl import minimind warm back.pth",
        )
    },
    "imports": {"minimind": "agentrl import minimind SOURCE OUT"},
}
