"""What an adapter is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from agentrl_cli.plugins.lightning.spans import Span

T_from = TypeVar("T_from")
T_to = TypeVar("T_to")


class Adapter(Generic[T_from, T_to]):
    """Turns one form into another."""

    def __call__(self, source: T_from, /) -> T_to:
        return self.adapt(source)

    def adapt(self, source: T_from, /) -> T_to:
        """Return the other form."""
        raise NotImplementedError("Adapter.adapt() is not implemented")


class OtelTraceAdapter(Adapter[Sequence[Any], T_to], Generic[T_to]):
    """Adapts OpenTelemetry's spans."""


class TraceAdapter(Adapter[Sequence[Span], T_to], Generic[T_to]):
    """Adapts the spans of an attempt."""
