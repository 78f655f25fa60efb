"""Question families of reasoning-gym: `agentrl init --from reasoning-gym:FAMILY`."""

from __future__ import annotations

OFFERS = {"programs": {"reasoning-gym": "agentrl_cli.plugins.reasoning_gym.agent:ReasoningGym"}}
