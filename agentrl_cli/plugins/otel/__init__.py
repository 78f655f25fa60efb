"""Episodes and training steps as OpenTelemetry spans, by its GenAI conventions."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.otel"
OFFERS = {
    "settings": {"telemetry": f"{HERE}.settings:TelemetryConfig"},
    "flags": {f"{name} otel": f"{HERE}.options:flags" for name in ("serve", "rollout", "train")},
    "observers": {"otel": f"{HERE}.spans:observer"},
    "watchers": {"otel": f"{HERE}.spans:watcher"},
}
