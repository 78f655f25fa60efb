"""Processes that serve others: the child behind `agentrl chat`."""
