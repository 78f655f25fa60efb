"""Challenges of TextWorld: `agentrl init --from textworld:tw-coin_collector`."""

OFFERS = {"programs": {"textworld": f"{__name__}.agent:TextWorld"}}
