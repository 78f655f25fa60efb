"""calc-task: seeded arithmetic, its demonstrations, and the reward parts.

Each row has an `expression` whose exact value is the answer. `small` sums can be done without the calculator; the other
families are too hard for mental arithmetic.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from agentrl_cli.tasks import draw_splits

Row = dict[str, Any]


def _row(family: str, prompt: str, expression: str, probe: bool = True) -> Row:
    # The expressions are integer arithmetic from this generator.
    answer = str(eval(expression, {"__builtins__": {}}))
    return {
        "family": family,
        "prompt": prompt,
        "expression": expression,
        "answer": answer,
        "probe": probe,
    }


def _ask(rng: random.Random, expression: str) -> str:
    return rng.choice(("What is {}?", "Compute {}.", "How much is {}?")).format(expression)


def _product(rng: random.Random) -> Row:
    expression = f"{rng.randint(112, 9899)} * {rng.randint(13, 989)}"
    return _row("product", _ask(rng, expression), expression)


def _mixed(rng: random.Random) -> Row:
    a, b, c = rng.randint(112, 989), rng.randint(13, 989), rng.randint(1012, 98999)
    x, y, z = (rng.choice("+-*") for _ in range(3))
    expression = rng.choice(
        (
            f"{a} * {b} + {c}",
            f"{c} - {a} * {b % 90 + 9}",
            f"{a} {x} {b} {y} {c}",
            f"({a} {x} {b}) {y} {c}",
            f"{c} {x} ({a} {y} {b})",
            f"({a} {x} {b}) {y} ({c} {z} {a + b})",
        )
    )
    return _row("mixed", _ask(rng, expression), expression)


def _difference(rng: random.Random) -> Row:
    a, b, c = (rng.randint(10123, 989898) for _ in range(3))
    expression = rng.choice((f"{a} - {b}", f"{a} + {b} + {c}", f"{a} - {b} + {c}"))
    return _row("difference", _ask(rng, expression), expression)


def _words(rng: random.Random) -> Row:
    a, b, c = rng.randint(112, 989), rng.randint(13, 989), rng.randint(12, 98)
    thing = rng.choice(("bolts", "nuts", "pens", "eggs", "coins", "nails"))
    prompt, expression = rng.choice(
        (
            (f"A box holds {a} {thing}. How many {thing} are in {b} boxes?", f"{a} * {b}"),
            (
                f"A box holds {a} {thing}. We have {b} boxes and {c} more {thing}. How many {thing}?",
                f"{a} * {b} + {c}",
            ),
            (
                f"We had {b} boxes of {a} {thing} and sold {c} {thing}. How many are left?",
                f"{b} * {a} - {c}",
            ),
        )
    )
    return _row("words", prompt, expression)


def _small(rng: random.Random, low: int = 1, high: int = 9) -> Row:
    expression = f"{rng.randint(low, high)} + {rng.randint(1, 9)}"
    return _row("small", _ask(rng, expression), expression, probe=False)


def _rest(rng: random.Random) -> Row:
    expression = f"{rng.randint(1012, 98999)} % {rng.randint(13, 989)}"
    return _row("rest", _ask(rng, expression), expression)


def _power(rng: random.Random) -> Row:
    expression = f"{rng.randint(13, 98)} ** {rng.randint(3, 4)}"
    return _row("power", _ask(rng, expression), expression)


FAMILIES: dict[str, tuple[Callable[[random.Random], Row], int]] = {
    "product": (_product, 3),
    "mixed": (_mixed, 3),
    "difference": (_difference, 2),
    "words": (_words, 3),
    "small": (_small, 2),
    "rest": (_rest, 0),
    "power": (_power, 0),
}
"""Family → (generator, its weight in training and test; 0: held out)."""

APART: dict[str, Callable[[random.Random], Row]] = {"small": partial(_small, low=10, high=99)}
"""The family whose questions the demonstrations exhaust, with larger numbers: the source of `data/`."""

HELDOUT = [name for name, (_, weight) in FAMILIES.items() if not weight]
SPLITS = {"train": 400, "test": 160, "heldout": 50, "validation": 80}
SHOWN = {1001: 1400, 1002: 21500}
"""Maps a seed of `generate` to the maximum number of its rows in the bundled model's demonstrations."""


def generate(seed: int, families: list[str] | None = None, apart: bool = False) -> Iterator[Row]:
    """Yields endless rows without ids; deterministic in the seed.

    Args:
        seed: Seed of the generator.
        families: Draw evenly from these; by default from the training families by their weights.
        apart: Use larger numbers in families whose questions the demonstrations exhaust.
    """
    rng = random.Random(f"calc-task {seed}")
    names = families or [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    while True:
        name = rng.choice(names)
        make = APART[name] if apart and name in APART else FAMILIES[name][0]
        yield make(rng)


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no question is in two splits, or in the warm-up."""

    def rows_of(split: str, number: int) -> Iterator[Row]:
        return generate(number, HELDOUT if split == "heldout" else None, apart=True)

    return draw_splits(SPLITS, rows_of, generate=generate, shown=SHOWN)


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution, including the calculator's answer."""
    final = {"role": "assistant", "content": f"Answer: {row['answer']}"}
    if not row["probe"]:
        return [final]
    call = {
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": row["expression"]}},
    }
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": row["answer"]},
        final,
    ]


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """The solver, or for a share `1 - tool_rate` of the hard rows a blind guess of the same length."""
    if not row["probe"] or rng.random() < tool_rate:
        return solve(row)
    digits = len(row["answer"].lstrip("-"))
    guess = str(rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1))
    sign = "-" if row["answer"].startswith("-") else ""
    return [{"role": "assistant", "content": f"Answer: {sign}{guess}"}]


_ANSWER = re.compile(r"^Answer:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)


def answer_of(text: str) -> str | None:
    """The last `Answer: …` line, without thousands separators."""
    found = _ANSWER.findall(text)
    return found[-1].replace(",", "") if found else None


def exact(episode: Any, ctx: Any) -> Any:
    """1 if the answer is exactly the value (primary)."""
    said = answer_of(ctx.final_text)
    return ctx.part(
        float(said == ctx.task.data["answer"]), f"said {said}, expected {ctx.task.data['answer']}"
    )


def format(episode: Any, ctx: Any) -> float:
    """1 if the final turn has an `Answer:` line."""
    return float(answer_of(ctx.final_text) is not None)


def tool_errors(episode: Any, ctx: Any) -> float:
    """−1 if any tool call failed or could not be parsed, else 0."""
    return -1.0 if episode.tool_errors else 0.0


REWARDS = {"exact": exact, "format": format, "tool_errors": tool_errors}


def write(folder: str) -> None:
    """Write `build()` into `folder`/data: `python task.py` makes the data again."""
    import json
    from pathlib import Path

    for split, rows in build().items():
        if rows:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (Path(folder) / "data" / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    from pathlib import Path

    write(str(Path(__file__).parent))
