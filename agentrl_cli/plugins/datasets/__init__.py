"""Rows of published data sets: HumanEval, MBPP, Spider, BFCL."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.datasets"
OFFERS = {
    "forms": {
        "humaneval": f"{HERE}.forms:HUMANEVAL",
        "mbpp": f"{HERE}.forms:MBPP",
        "spider": f"{HERE}.forms:SPIDER",
        "bfcl": f"{HERE}.forms:BFCL",
    }
}
