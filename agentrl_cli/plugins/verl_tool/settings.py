"""The section `tool_server` of agentrl.yaml."""

from __future__ import annotations

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
