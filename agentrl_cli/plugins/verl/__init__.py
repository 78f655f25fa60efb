"""verl's files as they are: tools, simulated users, reward functions, rows, data sections and settings."""

OFFERS = {
    "moved": {
        "compat.verl": "plugins.verl.stand_ins",
        "compat.verl_data": "plugins.verl.files",
        "compat.verl_interaction": "plugins.verl.files",
        "compat.verl_reward": "plugins.verl.files",
        "compat.verl_scorers": "plugins.verl.scorers",
        "compat.verl_tool": "plugins.verl.files",
        "config.verl": "plugins.verl.settings",
    },
    "adapters": {
        "modules": f"{__name__}.stand_ins:Verl",
        "data": f"{__name__}.files:adapt_data",
        "tool": f"{__name__}.files:adapt_tool",
        "reward": f"{__name__}.files:adapt_reward",
        "interaction": f"{__name__}.files:adapt_interaction",
    },
    "forms": {"verl": f"{__name__}.files:FORM"},
    "layers": {"verl": f"{__name__}.settings:translate"},
}
