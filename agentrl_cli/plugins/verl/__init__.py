"""verl's files as they are: tools, simulated users, reward functions, rows, data sections and settings."""

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
        "modules": f"{__name__}.stand_ins:Verl",
        "data": f"{__name__}.data:adapt_data",
        "tool": f"{__name__}.tool:adapt_tool",
        "reward": f"{__name__}.reward:adapt_reward",
        "interaction": f"{__name__}.interaction:adapt_interaction",
    },
    "forms": {"verl": f"{__name__}.rows:FORM"},
    "layers": {"verl": f"{__name__}.settings:translate"},
}
