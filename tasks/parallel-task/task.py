"""Two independent lookups: both calls fit into one turn."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl_cli.tasks import draw_splits
from agentrl_cli.tools import FunctionTool, ToolContext
from agentrl_cli.types import ToolResult

Row = dict[str, Any]

THINGS = (
    "lamp",
    "rope",
    "cup",
    "bell",
    "drum",
    "fork",
    "kite",
    "nail",
    "oar",
    "pan",
    "ring",
    "saw",
    "tent",
    "vase",
)


async def price(item: str, ctx: ToolContext) -> ToolResult:
    """Look up the price of an item.

    Args:
        item: Its name.
    """
    return _look(ctx, "prices", item)


async def stock(item: str, ctx: ToolContext) -> ToolResult:
    """Look up how many of an item are in stock.

    Args:
        item: Its name.
    """
    return _look(ctx, "stocks", item)


def _look(ctx: ToolContext, table: str, item: str) -> ToolResult:
    known = ctx.task.data[table] if ctx.task is not None else {}
    if item not in known:
        return ToolResult(f"Error: there is no item {item}.", error="exception")
    return ToolResult(str(known[item]))


TOOLS = [
    FunctionTool(price, examples=({"item": "lamp"},)),
    FunctionTool(stock, examples=({"item": "rope"},)),
]


def _row(rng: random.Random, same: bool, first: str, second: str) -> Row:
    one, other = rng.sample(THINGS, 2)
    other = one if same else other
    tables = {
        table: {name: rng.randint(11, 999) for name in sorted({one, other})}
        for table in ("prices", "stocks")
    }
    asked = (
        f"the {first} and the {second} of {one}"
        if same
        else f"the {first} of {one} and the {second} of {other}"
    )
    answer = f"{tables[first + 's'][one]} {tables[second + 's'][other]}"
    return {
        "prompt": f"What are {asked}?",
        "first": [first, one],
        "second": [second, other],
        **tables,
        "answer": answer,
    }


FAMILIES: dict[str, tuple[Callable[[random.Random], Row], int]] = {
    "one": (lambda rng: _row(rng, True, "price", "stock"), 1),
    "two": (lambda rng: _row(rng, False, "price", "stock"), 4),
    "swapped": (lambda rng: _row(rng, False, "stock", "price"), 0),
}
"""Family → (generator, its weight in training and test; 0: held out)."""

HELDOUT = [name for name, (_, weight) in FAMILIES.items() if not weight]
SPLITS = {"train": 130, "test": 40, "heldout": 30, "validation": 20}


def generate(seed: int, families: list[str] | None = None) -> Iterator[Row]:
    """Yields endless rows without ids; deterministic in the seed."""
    rng = random.Random(f"parallel-task {seed}")
    names = families or [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    while True:
        family = rng.choice(names)
        yield {"family": family, **FAMILIES[family][0](rng)}


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no question is in two splits."""

    def rows_of(split: str, number: int) -> Iterator[Row]:
        return generate(number, HELDOUT if split == "heldout" else None)

    return draw_splits(SPLITS, rows_of)


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution: both calls in one turn."""
    calls = [
        {"type": "function", "function": {"name": name, "arguments": {"item": item}}}
        for name, item in (row["first"], row["second"])
    ]
    answers = [str(row[f"{name}s"][item]) for name, item in (row["first"], row["second"])]
    results = [
        {"role": "tool", "name": name, "content": answer}
        for (name, _), answer in zip((row["first"], row["second"]), answers, strict=True)
    ]
    said = {"role": "assistant", "content": f"Answer: {' '.join(answers)}"}
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results, said]


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """The solver, or for a share `1 - tool_rate` of the rows sequential calls."""
    both, first, second, said = solve(row)
    if rng.random() < tool_rate:
        return [both, first, second, said]
    one, other = ({**both, "tool_calls": [call]} for call in both["tool_calls"])
    return [one, first, other, second, said]


_ANSWER = re.compile(r"^Answer:[ \t]*(\d+)[ \t,]+(\d+)[ \t.]*$", re.MULTILINE)


def exact(episode: Any, ctx: Any) -> Any:
    """1 if the answer has both numbers in order (primary)."""
    found = _ANSWER.findall(ctx.final_text)
    said = " ".join(found[-1]) if found else None
    return ctx.part(
        float(said == ctx.task.data["answer"]), f"said {said}, expected {ctx.task.data['answer']}"
    )


def parallel(episode: Any, ctx: Any) -> float:
    """1 if one turn has two successful calls of different tools, else 0."""
    turns = [{call.name for call in turn.calls if call.error is None} for turn in episode.turns]
    return float(any(len(names) >= 2 for names in turns))


def tool_errors(episode: Any, ctx: Any) -> float:
    """−1 if any tool call failed or could not be parsed, else 0."""
    return -1.0 if episode.tool_errors else 0.0


REWARDS = {"exact": exact, "parallel": parallel, "tool_errors": tool_errors}


def write(folder: str) -> None:
    """Write `build()` into `folder`/data: `python task.py` makes the data again."""
    for split, rows in build().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = Path(folder) / "data" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(str(Path(__file__).parent))
