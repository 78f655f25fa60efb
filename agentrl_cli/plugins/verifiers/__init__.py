"""Tasksets of verifiers as agents: `agentrl init --from verifiers:PACKAGE`."""

OFFERS = {"programs": {"verifiers": f"{__name__}.agent:Verifiers"}}
