"""Questions over a small database: the query counts by what it returns."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from agentrl_cli.tools.sql import SqlTool, open_database

Row = dict[str, Any]

THINGS = ("lamp", "rope", "cup", "bell", "drum", "fork", "kite", "nail", "oar", "pan", "ring", "saw", "tent", "vase")
KINDS = ("tool", "home", "play")
SCHEMA = "CREATE TABLE items (name TEXT, kind TEXT, price INTEGER, stock INTEGER)"


def _database(rng: random.Random) -> tuple[str, list[tuple[str, str, int, int]]]:
    """(script, rows) of a table without ties, so that every question has one answer."""
    names = rng.sample(THINGS, rng.randint(5, 9))
    prices, stocks = rng.sample(range(11, 99), len(names)), rng.sample(range(11, 99), len(names))
    rows = [(name, rng.choice(KINDS), p, s) for name, p, s in zip(names, prices, stocks, strict=True)]
    values = ", ".join(str(row) for row in rows)
    return f"{SCHEMA};\nINSERT INTO items VALUES {values};", rows


def _row(rng: random.Random, script: str, question: str, query: str, ordered: bool = False) -> Row:
    prompt = f"{SCHEMA}\n{question}"
    return {"prompt": prompt, "database": script, "query": query, "answer": run(script, query), "ordered": ordered}


def _lookup(rng: random.Random) -> Row:
    script, rows = _database(rng)
    name, column = rng.choice(rows)[0], rng.choice(("price", "stock"))
    return _row(rng, script, f"What is the {column} of {name}?", f"SELECT {column} FROM items WHERE name = '{name}'")


def _count(rng: random.Random) -> Row:
    script, _ = _database(rng)
    column, than = rng.choice(("price", "stock")), rng.randint(25, 80)
    side, sign = rng.choice((("above", ">"), ("below", "<")))
    query = f"SELECT count(*) FROM items WHERE {column} {sign} {than}"
    return _row(rng, script, f"How many items have {column} {side} {than}?", query)


def _total(rng: random.Random) -> Row:
    script, rows = _database(rng)
    kind, column = rng.choice(rows)[1], rng.choice(("price", "stock"))
    query = f"SELECT sum({column}) FROM items WHERE kind = '{kind}'"
    return _row(rng, script, f"What is the total {column} of kind {kind}?", query)


def _top(rng: random.Random) -> Row:
    script, _ = _database(rng)
    column = rng.choice(("price", "stock"))
    side, order = rng.choice((("highest", " DESC"), ("lowest", "")))
    query = f"SELECT name FROM items ORDER BY {column}{order} LIMIT 1"
    return _row(rng, script, f"Which item has the {side} {column}?", query)


def _mean(rng: random.Random) -> Row:
    script, _ = _database(rng)
    column = rng.choice(("price", "stock"))
    return _row(rng, script, f"What is the average {column}?", f"SELECT avg({column}) FROM items")


def _listing(rng: random.Random) -> Row:
    script, rows = _database(rng)
    kind, column = rng.choice(rows)[1], rng.choice(("price", "stock"))
    query = f"SELECT name FROM items WHERE kind = '{kind}' ORDER BY {column}"
    return _row(rng, script, f"List the names of kind {kind}, by rising {column}.", query, ordered=True)


FAMILIES: dict[str, tuple[Callable[[random.Random], Row], int]] = {
    "lookup": (_lookup, 3),
    "count": (_count, 3),
    "total": (_total, 2),
    "top": (_top, 2),
    "mean": (_mean, 0),
    "listing": (_listing, 0),
}
"""Family → (generator, how often it is drawn for training and test; 0: held out)."""


def run(script: str, query: str) -> str:
    """What `sql` answers to a query on the database of a script."""
    with closing(open_database(script, None, 64)) as connection:
        return SqlTool().run(connection, query).text


WORLD = ("database",)
"""Fields that make two rows with one prompt two tasks."""

SPLITS = {"train": 300, "test": 100, "heldout": 40}


def generate(seed: int, families: list[str] | None = None) -> Iterator[Row]:
    """Endless rows without ids; the same seed gives the same rows."""
    rng = random.Random(f"sql-task {seed}")
    names = families or [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    while True:
        family = rng.choice(names)
        yield {"family": family, **FAMILIES[family][0](rng)}


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no task stands in two splits."""
    seen: set[str] = set()
    splits: dict[str, list[Row]] = {}
    heldout = [name for name, (_, weight) in FAMILIES.items() if not weight]
    for number, (split, count) in enumerate(SPLITS.items()):
        rows: list[Row] = []
        for row in generate(number, heldout if split == "heldout" else None):
            key = f"{row['prompt']}{row.get('setup', '')}{row.get('database', '')}"
            if key in seen:
                continue
            seen.add(key)
            rows.append({"id": f"{split}-{len(rows):04d}", **row})
            if len(rows) == count:
                break
        splits[split] = rows
    return splits


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution: the query, what it returns, and the answer in words."""
    answer = run(row["database"], row["query"])
    call = {"type": "function", "function": {"name": "sql", "arguments": {"query": row["query"]}}}
    said = ", ".join(answer.splitlines()[1:])
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "sql", "content": answer},
        {"role": "assistant", "content": f"Answer: {said}"},
    ]


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """The solver, or for a share `1 - tool_rate` of the rows a query with another column."""
    if rng.random() < tool_rate:
        return solve(row)
    wrong = row["query"].replace("price", "cost") if "price" in row["query"] else row["query"].replace("stock", "size")
    return solve({**row, "query": wrong})


def result(episode: Any, ctx: Any) -> Any:
    """1 where the last query without an error returns the rows of the reference query (primary)."""
    results = [found for turn in episode.turns for found in turn.results if found.error is None]
    if not results:
        return ctx.part(0.0, "no query was run")
    said, wanted = (text.splitlines()[1:] for text in (results[-1].text, ctx.task.data["answer"]))
    if not ctx.task.data["ordered"]:
        said, wanted = sorted(said), sorted(wanted)
    return ctx.part(float(said == wanted), f"returned {said}, expected {wanted}")


def tool_errors(episode: Any, ctx: Any) -> float:
    """−1 where any tool call failed or could not be read, else 0."""
    return -1.0 if episode.tool_errors else 0.0


REWARDS = {"result": result, "tool_errors": tool_errors}


def write(folder: str) -> None:
    """Write `build()` into `folder`/data: `python task.py` makes the data anew."""
    for split, rows in build().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = Path(folder) / "data" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(str(Path(__file__).parent))
