"""Hooks: callbacks of a run. `Hook` and `HookList` are in base.py, loggers in their own files, names in HOOKS."""

from agentrl_cli.hooks.base import HOOKS, LOGGERS, Fields, Hook, HookList, load_hooks

__all__ = ["HOOKS", "LOGGERS", "Fields", "Hook", "HookList", "load_hooks"]
