"""`import agentrl_cli.plugins.lightning.alias`: from then on `import agentlightning` means this plugin.

In this process alone, and only by this import. Raises ImportError if the real package was imported before.
"""

from __future__ import annotations

import importlib
import sys

from agentrl_cli.plugins.lightning.modules import HERE, register
from agentrl_cli.plugins.lightning.semconv import AGENTLIGHTNING as NAME

SAME = (
    "types litagent runner store adapter tracer algorithm algorithm.base"
    " algorithm.verl emitter llm_proxy trainer semconv"
).split()
"""Modules that have the same name there and here."""


def claim() -> None:
    """Put the modules under Agent-Lightning's names. Raises ImportError if the real package is there already."""
    ours = importlib.import_module(HERE)
    if sys.modules.get(NAME, ours) is not ours:
        raise ImportError(
            f"The real {NAME} was imported before {HERE}.alias: import the alias first."
        )
    sys.modules[NAME] = ours
    for name in SAME:
        sys.modules[f"{NAME}.{name}"] = importlib.import_module(f"{HERE}.{name}")
    register(NAME)


claim()
