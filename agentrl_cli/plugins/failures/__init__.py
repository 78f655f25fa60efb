"""The failure modes of a run: why its episodes fail, counted, without a judge; and scanners over every episode."""

OFFERS = {
    "commands": {"failures": ("Look", f"{__name__}.command:command", "Why episodes fail, by kind")},
    "examples": {
        "failures": ("agentrl failures", "agentrl failures RUN --scan scanners.py:gave_up")
    },
}
