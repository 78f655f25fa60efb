"""Evals of Inspect as agents: `agentrl init --from inspect:PACKAGE@TASK`."""

OFFERS = {"programs": {"inspect": f"{__name__}.agent:Inspect"}}
