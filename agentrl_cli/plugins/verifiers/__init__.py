"""Tasksets of verifiers as agents: `agentrl init --from verifiers:PACKAGE`."""

from __future__ import annotations

OFFERS = {"programs": {"verifiers": "agentrl_cli.plugins.verifiers.agent:Verifiers"}}
