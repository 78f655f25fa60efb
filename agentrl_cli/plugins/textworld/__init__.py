"""Challenges of TextWorld: `agentrl init --from textworld:tw-coin_collector`."""

from __future__ import annotations

OFFERS = {"programs": {"textworld": "agentrl_cli.plugins.textworld.agent:TextWorld"}}
