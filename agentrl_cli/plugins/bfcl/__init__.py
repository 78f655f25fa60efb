"""Multi-turn tasks of the Berkeley Function Calling Leaderboard: `agentrl init --from bfcl:multi_turn_base`."""

from __future__ import annotations

OFFERS = {"programs": {"bfcl": "agentrl_cli.plugins.bfcl.agent:BFCL"}}
