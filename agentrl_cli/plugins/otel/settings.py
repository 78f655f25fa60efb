"""The section `telemetry` of agentrl.yaml, and the option that sets it."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import Field

from agentrl_cli.types.section import Section


class TelemetryConfig(Section):
    """OpenTelemetry spans of episodes, sent to OTEL_EXPORTER_OTLP_ENDPOINT when an episode ends."""

    spans: bool = Field(default=False, description="send spans (GenAI conventions)")
    content: bool = Field(
        default=False,
        description="with messages, arguments and results; what looks like a secret is masked",
    )


def flags(
    otel: Annotated[
        bool, typer.Option("--otel", help="Send spans to OTEL_EXPORTER_OTLP_ENDPOINT.")
    ] = False,
) -> dict[str, Any]:
    """Return the settings that the option means."""
    return {"telemetry.spans": otel or None}
