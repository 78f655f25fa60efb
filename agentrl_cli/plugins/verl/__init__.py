"""verl's files as they are: tools, simulated users, reward functions, rows, data sections and settings."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.verl"
OFFERS = {
    "moved": {
        "compat.verl": "plugins.verl.stand_ins",
        "compat.verl_data": "plugins.verl.data",
        "compat.verl_interaction": "plugins.verl.interaction",
        "compat.verl_reward": "plugins.verl.reward",
        "compat.verl_scorers": "plugins.verl.scorers",
        "compat.verl_tool": "plugins.verl.tool",
        "config.verl": "plugins.verl.settings",
    },
    "adapters": {
        "modules": f"{HERE}.stand_ins:Verl",
        "data": f"{HERE}.data:adapt_data",
        "tool": f"{HERE}.tool:adapt_tool",
        "reward": f"{HERE}.reward:adapt_reward",
        "interaction": f"{HERE}.interaction:adapt_interaction",
    },
    "forms": {"verl": f"{HERE}.rows:FORM"},
    "layers": {"verl": f"{HERE}.settings:translate"},
}
