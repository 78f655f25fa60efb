"""The section `tool_server` of agentrl.yaml, and where `tools serve` listens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pydantic import Field

from agentrl_cli.types.section import Seconds, Section


class ToolServerConfig(Section):
    """A server that runs the packs' tools (agentrl tools serve)."""

    url: str | None = Field(
        default=None,
        description="its address, http://host:port or unix:/path; null: tools run in this process",
    )
    patience: Seconds = Field(
        default=60.0,
        description="seconds that an episode waits for a busy, unreachable or restarting server",
    )


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
