"""Gymnasium and MiniGrid environments: `agentrl init --from gym:ID`."""

from __future__ import annotations

OFFERS = {"programs": {"gym": "agentrl_cli.plugins.gym.agent:Gym"}}
