"""Episodes and training steps as OpenTelemetry spans, by its GenAI conventions."""

COMMANDS = ("serve", "tools serve", "rollout", "train")
OFFERS = {
    "settings": {"telemetry": f"{__name__}.settings:TelemetryConfig"},
    "flags": {f"{name} otel": f"{__name__}.options:flags" for name in COMMANDS},
    "observers": {"otel": f"{__name__}.spans:observer"},
    "call_observers": {"otel": f"{__name__}.spans:call_observer"},
    "watchers": {"otel": f"{__name__}.spans:watcher"},
}
