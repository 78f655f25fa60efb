"""The section `telemetry` of agentrl.yaml."""

from __future__ import annotations

from pydantic import Field

from agentrl_cli.types.section import Section


class TelemetryConfig(Section):
    """OpenTelemetry spans of episodes, sent to OTEL_EXPORTER_OTLP_ENDPOINT when an episode ends."""

    spans: bool = Field(default=False, description="send spans (GenAI conventions)")
    content: bool = Field(
        default=False,
        description="with messages, arguments and results; what looks like a secret is masked",
    )
