"""OpenEnv environments behind an address: `agentrl init --from openenv:http://…`."""

from __future__ import annotations

OFFERS = {"programs": {"openenv": "agentrl_cli.plugins.openenv.agent:OpenEnv"}}
