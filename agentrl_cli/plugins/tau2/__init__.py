"""Customer-service tasks of tau2-bench: `agentrl init --from tau2:retail`."""

OFFERS = {"programs": {"tau2": f"{__name__}.agent:Tau2"}}
