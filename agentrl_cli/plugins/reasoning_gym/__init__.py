"""Question families of reasoning-gym: `agentrl init --from reasoning-gym:FAMILY`."""

OFFERS = {"programs": {"reasoning-gym": f"{__name__}.agent:ReasoningGym"}}
