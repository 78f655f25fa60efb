"""Helpers of Agent-Lightning that scripts import."""
