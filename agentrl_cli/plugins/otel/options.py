"""The option that sends spans. A page of help reads it, and needs no settings."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def flags(
    otel: Annotated[
        bool, typer.Option("--otel", help="Send spans to OTEL_EXPORTER_OTLP_ENDPOINT.")
    ] = False,
) -> dict[str, Any]:
    """Return the settings that the option means."""
    return {"telemetry.spans": otel or None}
