"""Games of TextArena: `agentrl init --from textarena:ID`."""

OFFERS = {"programs": {"textarena": f"{__name__}.agent:TextArena"}}
