"""TRL's files as they are: reward functions, environment classes and rows."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.trl"
OFFERS = {
    "adapters": {
        "environment": f"{HERE}.files:environment_tools",
        "reward": f"{HERE}.reward:adapt_reward",
    },
    "forms": {"trl": f"{HERE}.files:FORM"},
    "rewards": {"environment": f"{HERE}.files:environment"},
}
