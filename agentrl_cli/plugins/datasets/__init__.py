"""Rows of published data sets: HumanEval, MBPP, Spider, BFCL."""

OFFERS = {
    "forms": {
        "humaneval": f"{__name__}.forms:HUMANEVAL",
        "mbpp": f"{__name__}.forms:MBPP",
        "spider": f"{__name__}.forms:SPIDER",
        "bfcl": f"{__name__}.forms:BFCL",
    }
}
