"""echo-task: one kind of question with no tool, one with a trivial tool; the smallest pack that uses every part."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from agentrl_cli.tasks import draw_splits

Row = dict[str, Any]

WORDS = (
    "bird",
    "stone",
    "river",
    "lamp",
    "cloud",
    "chair",
    "green",
    "north",
    "apple",
    "table",
    "wheel",
    "glass",
)


SPLITS = {"train": 32, "test": 16, "heldout": 0, "validation": 16}
SHOWN = {1001: 800, 1002: 11000}
"""Maps a seed of `generate` to the maximum number of its rows in the bundled model's demonstrations."""


def lookup(key: str) -> str:
    """Look up what is stored under a key.

    Args:
        key: The key.
    """
    word = WORDS[sum(map(ord, key)) % len(WORDS)]
    number = 0
    for character in key:
        number = (number * 31 + ord(character)) % 99991
    return f"{word} {number}"


TOOLS = [lookup]


def generate(seed: int, families: list[str] | None = None) -> Iterator[Row]:
    """Yields endless rows without ids; deterministic in the seed."""
    rng = random.Random(f"echo-task {seed}")
    while True:
        family = rng.choice(families or ["say", "look"])
        if family == "say":
            words = [
                rng.choice((*WORDS, str(rng.randint(0, 99999)))) for _ in range(rng.randint(1, 6))
            ]
            text = " ".join([*words, str(rng.randint(0, 99999))])
            yield {"family": family, "prompt": f"Say: {text}", "answer": text, "key": ""}
        else:
            key = f"{rng.choice(WORDS)}{rng.randint(0, 999)}"
            yield {
                "family": family,
                "prompt": f"Look up {key} and say it.",
                "answer": lookup(key),
                "key": key,
            }


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no question is in two splits, or in the warm-up."""

    def rows_of(split: str, number: int) -> Iterator[Row]:
        return generate(number)

    return draw_splits(SPLITS, rows_of, generate=generate, shown=SHOWN)


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution."""
    final = {"role": "assistant", "content": row["answer"]}
    if not row["key"]:
        return [final]
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": row["key"]}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "lookup", "content": row["answer"]},
        final,
    ]


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """The solver: this pack checks wiring and has nothing to guess."""
    return solve(row)


def exact(episode: Any, ctx: Any) -> Any:
    """1 if the final turn is exactly the expected text (primary)."""
    return ctx.part(
        float(ctx.final_text.strip() == ctx.task.data["answer"]),
        f"expected {ctx.task.data['answer']}",
    )


REWARDS = {"exact": exact}


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
