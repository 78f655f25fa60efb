"""Games of TextArena: `agentrl init --from textarena:ID`."""

from __future__ import annotations

OFFERS = {"programs": {"textarena": "agentrl_cli.plugins.textarena.agent:TextArena"}}
