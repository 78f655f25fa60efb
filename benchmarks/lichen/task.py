"""Questions that a stranger asks a tool of their own; the ranges of the values are the stranger's, too."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl_cli.registry import load_file
from agentrl_cli.tasks.called import called_rows, called_solution

TOOL = load_file(Path(__file__).with_name("stranger.py")).lichen_soak_minutes
QUESTIONS = (
    "How many minutes should {skeins} skeins of wool soak in a {lichen} dye vat with {vinegar_spoons} spoons of"
    " vinegar?",
    "I stirred {vinegar_spoons} spoons of vinegar into my {lichen} vat and put in {skeins} skeins; after how many"
    " minutes can I take the wool out?",
    "Using {lichen} as the dye lichen, what is the soaking time in minutes for a batch of {skeins} skeins if the vat"
    " holds {vinegar_spoons} spoons of vinegar?",
)


def ask(rng: random.Random) -> tuple[str, Any, dict[str, Any]]:
    """Return a question, the tool that answers it, and its arguments."""
    given = {
        "skeins": rng.randint(2, 30),
        "lichen": rng.choice("oakmoss crottle orchil lungwort cudbear usnea".split()),
        "vinegar_spoons": rng.randint(1, 40),
    }
    return rng.choice(QUESTIONS).format(**given), TOOL, given


def generate(seed: int) -> Iterator[dict[str, Any]]:
    """Yield endless rows; `answer` is what the tool returns. No row is one of the two other splits."""
    for row in called_rows([ask], seed):
        given = row["call"]["arguments"]
        if (given["skeins"] + given["vinegar_spoons"]) % 3 == seed % 3:
            yield row


def solve(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a right solution."""
    return called_solution(row)


def exact(episode: Any, ctx: Any) -> Any:
    """Return 1 if the last line `Answer: …` is the row's answer."""
    lines = re.findall(r"^Answer:[ \t]*(.+?)[ \t]*$", ctx.final_text, re.MULTILINE)
    answer = str(ctx.task.data["answer"])
    return ctx.part(float(lines[-1:] == [answer]), f"answered {lines[-1:]}, expected {answer!r}")


REWARDS = {"exact": exact}
