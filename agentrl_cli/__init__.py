"""Train tool-using language-model agents with reinforcement learning on one machine, and see exactly what happened.

Names are loaded when they are first used: `import agentrl_cli` prints nothing and imports no torch.
The first name that is used sets how OpenMP waits (OMP_WAIT_POLICY, OMP_NUM_THREADS) where that is not set.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from agentrl_cli._version import __version__ as __version__

if TYPE_CHECKING:
    from agentrl_cli.chat.render import Chat
    from agentrl_cli.chat.tokenizer import ByteTokenizer, Tokenizer
    from agentrl_cli.config import Config, load_config
    from agentrl_cli.envs.tool_env import Env, ToolEnv
    from agentrl_cli.errors import AgentRLError
    from agentrl_cli.hooks import Hook
    from agentrl_cli.learning.batch import Batch
    from agentrl_cli.policies.protocols import Policy
    from agentrl_cli.policies.scripted import ScriptedPolicy
    from agentrl_cli.rewards import Reward
    from agentrl_cli.runtime import train
    from agentrl_cli.store import Store
    from agentrl_cli.store.codec import read_tokens
    from agentrl_cli.tasks import Pack, load_pack
    from agentrl_cli.tools.base import Tool, tool
    from agentrl_cli.trainer import Trainer
    from agentrl_cli.types import Episode, Group, Outcome, RewardPart, Task, ToolResult, Turn


class _OldModules:
    """Finds modules under their names before 0.1. It is asked last, and loads the names once one is asked for."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("agentrl_cli."):
            return None
        from agentrl_cli.registry.old_modules import OldModules

        return OldModules().find_spec(name, path, target)


sys.meta_path.append(_OldModules)

_WHERE = {
    "AgentRLError": "agentrl_cli.errors",
    "Batch": "agentrl_cli.learning.batch",
    "ByteTokenizer": "agentrl_cli.chat.tokenizer",
    "Chat": "agentrl_cli.chat.render",
    "Config": "agentrl_cli.config",
    "Env": "agentrl_cli.envs.tool_env",
    "Episode": "agentrl_cli.types",
    "Group": "agentrl_cli.types",
    "Hook": "agentrl_cli.hooks",
    "Outcome": "agentrl_cli.types",
    "Pack": "agentrl_cli.tasks",
    "Policy": "agentrl_cli.policies.protocols",
    "Reward": "agentrl_cli.rewards",
    "RewardPart": "agentrl_cli.types",
    "ScriptedPolicy": "agentrl_cli.policies.scripted",
    "Store": "agentrl_cli.store",
    "Task": "agentrl_cli.types",
    "Tokenizer": "agentrl_cli.chat.tokenizer",
    "Tool": "agentrl_cli.tools.base",
    "ToolEnv": "agentrl_cli.envs.tool_env",
    "ToolResult": "agentrl_cli.types",
    "Trainer": "agentrl_cli.trainer",
    "Turn": "agentrl_cli.types",
    "load_config": "agentrl_cli.config",
    "load_pack": "agentrl_cli.tasks",
    "read_tokens": "agentrl_cli.store.codec",
    "tool": "agentrl_cli.tools.base",
    "train": "agentrl_cli.runtime",
}

__all__ = [
    "AgentRLError",
    "Batch",
    "ByteTokenizer",
    "Chat",
    "Config",
    "Env",
    "Episode",
    "Group",
    "Hook",
    "Outcome",
    "Pack",
    "Policy",
    "Reward",
    "RewardPart",
    "ScriptedPolicy",
    "Store",
    "Task",
    "Tokenizer",
    "Tool",
    "ToolEnv",
    "ToolResult",
    "Trainer",
    "Turn",
    "load_config",
    "load_pack",
    "read_tokens",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentrl_cli.models.openmp import limit_openmp

    limit_openmp()
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
