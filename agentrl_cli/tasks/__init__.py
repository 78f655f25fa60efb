"""Packs and their rows: prompts, tools and rewards."""

from agentrl_cli.tasks.agent import AgentSpec
from agentrl_cli.tasks.drawing import draw_splits, question
from agentrl_cli.tasks.pack import AGENT_PART, ROLES, SPLITS, BadLine, Pack
from agentrl_cli.tasks.spec import check_weights, load_pack, load_packs

__all__ = [
    "AGENT_PART",
    "ROLES",
    "SPLITS",
    "AgentSpec",
    "BadLine",
    "Pack",
    "check_weights",
    "draw_splits",
    "load_pack",
    "load_packs",
    "question",
]
