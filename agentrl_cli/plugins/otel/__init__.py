"""Episodes and training steps as OpenTelemetry spans, by its GenAI conventions."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.otel"
COMMANDS = ("serve", "tools serve", "rollout", "train")
OFFERS = {
    "settings": {"telemetry": f"{HERE}.settings:TelemetryConfig"},
    "flags": {f"{name} otel": f"{HERE}.options:flags" for name in COMMANDS},
    "observers": {"otel": f"{HERE}.spans:observer"},
    "call_observers": {"otel": f"{HERE}.spans:call_observer"},
    "watchers": {"otel": f"{HERE}.spans:watcher"},
}
