"""Agents that are not written as packs: the gateway between a program's model calls and an episode, and what runs them.

`emit_reward` is for the agents themselves.
"""

from agentrl_cli.agents.emit import emit_reward

__all__ = ["emit_reward"]
