"""Guess the number: the simulated user's answers narrow it down."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl_cli.tasks import draw_splits

Row = dict[str, Any]


def _row(rng: random.Random, high: int) -> Row:
    low = 1
    opening = rng.choice(
        (
            "I think of a number from {} to {}.",
            "Guess my number. It is from {} to {}.",
            "From {} to {}.",
        )
    )
    return {
        "prompt": opening.format(low, high),
        "low": low,
        "high": high,
        "secret": rng.randint(low, high),
    }


FAMILIES: dict[str, tuple[Callable[[random.Random], Row], int]] = {
    "small": (lambda rng: _row(rng, 20), 1),
    "middle": (lambda rng: _row(rng, 50), 1),
    "large": (lambda rng: _row(rng, 100), 0),
}
"""Family → (generator, its weight in training and test; 0: held out)."""

WORLD = ("secret",)
"""Fields that make two rows with the same prompt different tasks."""

HELDOUT = [name for name, (_, weight) in FAMILIES.items() if not weight]
SPLITS = {"train": 120, "test": 40, "heldout": 30, "validation": 20}


def generate(seed: int, families: list[str] | None = None) -> Iterator[Row]:
    """Yields endless rows without ids; deterministic in the seed."""
    rng = random.Random(f"guess-task {seed}")
    names = families or [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    while True:
        family = rng.choice(names)
        yield {"family": family, **FAMILIES[family][0](rng)}


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no prompt with the same number is in two splits."""

    def rows_of(split: str, number: int) -> Iterator[Row]:
        return generate(number, HELDOUT if split == "heldout" else None)

    return draw_splits(SPLITS, rows_of, world=WORLD)


def _search(low: int, high: int, secret: int) -> Iterator[int]:
    while True:
        guess = (low + high) // 2
        yield guess
        if guess == secret:
            return
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)


def _talk(guesses: list[int], secret: int) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    for guess in guesses:
        said.append({"role": "assistant", "content": str(guess)})
        if guess != secret:
            said.append({"role": "user", "content": "higher" if guess < secret else "lower"})
    return said


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution: a binary search."""
    return _talk(list(_search(row["low"], row["high"], row["secret"])), row["secret"])


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """The solver, or for a share `1 - tool_rate` of the rows guesses that ignore the answers."""
    if rng.random() < tool_rate:
        return solve(row)
    guesses = [rng.randint(row["low"], row["high"]) for _ in range(4)]
    return _talk(
        [guess for guess in guesses if guess != row["secret"]] or [row["low"]], row["secret"]
    )


def right(episode: Any, ctx: Any) -> Any:
    """1 if the number was guessed (primary)."""
    feedback = ctx.state.get("feedback", [])
    return ctx.part(float(bool(feedback) and feedback[-1] == 1.0), f"{len(feedback)} guesses")


def quick(episode: Any, ctx: Any) -> float:
    """1 for at most the guesses of a binary search, less for more; 0 if the number was not guessed."""
    feedback = ctx.state.get("feedback", [])
    if not feedback or feedback[-1] != 1.0:
        return 0.0
    most = math.ceil(math.log2(ctx.task.data["high"] - ctx.task.data["low"] + 2))
    return max(0.0, 1.0 - max(0, len(feedback) - most) / most)


REWARDS = {"right": right, "quick": quick}


def write(folder: str) -> None:
    """Write `build()` into `folder`/data: `python task.py` makes the data again."""
    for split, rows in build().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = Path(folder) / "data" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(str(Path(__file__).parent))
