"""minimind's files as they are: agent scripts, rows and weights; and the pack minimind-task."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.minimind"
GROUP = ("Run", "agentrl_cli.commands.imported:app", "Episodes and models of other projects")
OFFERS = {
    "moved": {
        "compat.minimind": "plugins.minimind.files",
        "models.import_minimind": "plugins.minimind.model",
    },
    "adapters": {
        "table": f"{HERE}.files:table_tools",
        "reward": f"{HERE}.files:adapt_reward",
    },
    "forms": {"minimind": f"{HERE}.rows:FORM"},
    "commands": {"import": GROUP},
    "subcommands": {"import minimind": f"{HERE}.command:minimind"},
    "examples": {
        "import minimind": (
            "agentrl import minimind full_sft.pth warm",
            "agentrl import minimind warm back.pth",
        )
    },
    "imports": {"minimind": "agentrl import minimind SOURCE OUT"},
}
