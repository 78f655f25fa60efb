"""Multi-turn tasks of the Berkeley Function Calling Leaderboard: `agentrl init --from bfcl:multi_turn_base`."""

OFFERS = {"programs": {"bfcl": f"{__name__}.agent:BFCL"}}
