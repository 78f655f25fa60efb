"""The failure modes of a run: why its episodes fail, counted, without a judge; and scanners over every episode."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.failures"
OFFERS = {
    "commands": {"failures": ("Look", f"{HERE}.command:command", "Why episodes fail, by kind")},
    "examples": {
        "failures": ("agentrl failures", "agentrl failures RUN --scan scanners.py:gave_up")
    },
}
