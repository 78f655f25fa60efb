"""`import agentrl_cli.plugins.lightning.alias`: from then on `import agentlightning` means this plugin.

In this process alone, and only by this import. Raises ImportError if the real package was imported before.
"""

from __future__ import annotations

import importlib
import sys

from agentrl_cli.plugins.lightning.semconv import AGENTLIGHTNING as NAME

HERE = "agentrl_cli.plugins.lightning"
SAME = (
    "types litagent runner store adapter adapter.base adapter.triplet adapter.messages tracer algorithm algorithm.base"
    " algorithm.apo algorithm.verl emitter llm_proxy trainer env_var semconv execution utils utils.otel"
).split()
"""Modules that have the same name there and here."""
OTHER = {
    **dict.fromkeys(("tracer.agentops", "tracer.base", "tracer.otel", "tracer.dummy"), "tracer"),
    **dict.fromkeys(("store.base", "store.memory", "store.threading"), "store"),
    **dict.fromkeys(("types.core", "types.resources"), "types"),
    **dict.fromkeys(("litagent.decorator", "litagent.litagent"), "litagent"),
    **dict.fromkeys(("algorithm.decorator", "algorithm.fast", "algorithm.utils"), "algorithm.base"),
    **dict.fromkeys(("reward", "emitter.reward", "emitter.annotation", "emitter.message", "emitter.object"), "emitter"),
    **{"runner.agent": "runner", "types.tracer": "spans", "trainer.trainer": "trainer", "logging": "hooks"},
}
"""Module there → module here."""


def register() -> None:
    """Put the modules under Agent-Lightning's names. Raises ImportError if the real package is there already."""
    ours = importlib.import_module(HERE)
    if sys.modules.get(NAME, ours) is not ours:
        raise ImportError(f"The real {NAME} was imported before {HERE}.alias: import the alias first.")
    sys.modules[NAME] = ours
    for there, here in ({name: name for name in SAME} | OTHER).items():
        sys.modules[f"{NAME}.{there}"] = importlib.import_module(f"{HERE}.{here}")


register()
