"""Evals of Inspect as agents: `agentrl init --from inspect:PACKAGE@TASK`."""

from __future__ import annotations

OFFERS = {"programs": {"inspect": "agentrl_cli.plugins.inspect.agent:Inspect"}}
