"""Agents that are not written as packs: the gateway between a program's model calls and an episode."""
