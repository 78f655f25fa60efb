"""Environments of an episode: tools, and simulated users."""
