"""Agent-Lightning's submodules that stand elsewhere here: `…lightning.tracer.agentops` is `…lightning.tracer`."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

HERE = "agentrl_cli.plugins.lightning"
OTHER = {
    **dict.fromkeys(("tracer.agentops", "tracer.base", "tracer.otel", "tracer.dummy"), "tracer"),
    **dict.fromkeys(("store.base", "store.memory", "store.threading", "store.sqlite"), "store"),
    **dict.fromkeys(("adapter.base", "adapter.messages", "adapter.triplet"), "adapter"),
    **dict.fromkeys(("types.core", "types.resources"), "types"),
    **dict.fromkeys(("litagent.decorator", "litagent.litagent"), "litagent"),
    **dict.fromkeys(
        ("algorithm.apo", "algorithm.decorator", "algorithm.fast", "algorithm.utils"),
        "algorithm.base",
    ),
    **dict.fromkeys(
        ("reward", "emitter.reward", "emitter.annotation", "emitter.message", "emitter.object"),
        "emitter",
    ),
    **{
        "runner.agent": "runner",
        "types.tracer": "spans",
        "trainer.trainer": "trainer",
        "logging": "types",
        "env_var": "semconv",
        "utils": "semconv",
        "utils.otel": "semconv",
        "execution": "trainer",
    },
}
"""Module there → module here."""


class _Later(ModuleType):
    """A module whose names are another's, which is imported when one of them is asked for."""

    def __init__(self, name: str, home: str) -> None:
        super().__init__(name)
        self._home = home

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [one for one in dir(import_module(self._home)) if not one.startswith("_")]
        if name.startswith("__"):
            raise AttributeError(name)
        inner = sys.modules.get(f"{self.__name__}.{name}")
        return inner if inner is not None else getattr(import_module(self._home), name)


def register(package: str) -> None:
    """Put these modules below a package's name, where an import of them finds them."""
    for there, here in OTHER.items():
        sys.modules.setdefault(f"{package}.{there}", _Later(f"{package}.{there}", f"{HERE}.{here}"))
