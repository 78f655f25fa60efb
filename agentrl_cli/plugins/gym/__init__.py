"""Gymnasium and MiniGrid environments: `agentrl init --from gym:ID`."""

OFFERS = {"programs": {"gym": f"{__name__}.agent:Gym"}}
