"""Where `tools serve` listens. A page of help reads it, and needs no settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and for whom."""

    host: str
    port: int
    token: str
    """The bearer token of its clients; empty if anyone may call."""
    names: Collection[str]
    """Host names that clients may use."""
    most: int
    """Calls or sessions at once."""
