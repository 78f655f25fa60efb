"""Customer-service tasks of tau2-bench: `agentrl init --from tau2:retail`."""

from __future__ import annotations

OFFERS = {"programs": {"tau2": "agentrl_cli.plugins.tau2.agent:Tau2"}}
