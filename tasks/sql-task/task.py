"""Questions over a small database: a query is graded by its result."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.tasks import draw_splits
from agentrl_cli.tools.sql import SqlTool, open_database

Row = dict[str, Any]


@dataclass(frozen=True)
class Words:
    """Names of tables and columns."""

    tables: tuple[str, ...]
    key: str
    groups: tuple[str, ...]
    numbers: tuple[str, ...]
    keys: tuple[Any, ...]
    """Values of the key column, one per row."""
    kinds: tuple[Any, ...]
    """Values of the group column, shared by rows."""


PLAIN = Words(
    tables=("stone", "lamp", "glass", "items"),
    key="id",
    groups=("box",),
    numbers=("apple", "bird", "chair", "wheel", "river", "cloud", "green", "north"),
    keys=tuple(range(11, 99)),
    kinds=(2, 3, 4),
)
"""Words that the bundled model can copy, as it was trained on few."""

RICH = Words(
    tables=("items", "goods", "parts", "things", "sales", "boxes", "wares", "orders"),
    key="name",
    groups=("kind", "type", "class", "sort"),
    numbers=("price", "stock", "size", "mass", "age", "cost", "rank", "score"),
    keys=(
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
    ),
    kinds=("tool", "home", "play", "work"),
)
"""The harder level, for real models."""

OPENINGS = ("", "Tell me: ", "Find this: ", "Run: ")


@dataclass(frozen=True)
class World:
    """The database of one task, and the wording of its question."""

    rng: random.Random
    words: Words
    table: str
    group: str
    numbers: tuple[str, str]
    rows: list[tuple[Any, Any, int, int]]
    held: bool
    """Worded as in the test split."""

    @property
    def schema(self) -> str:
        kind = "int" if isinstance(self.rows[0][0], int) else "text"
        first, second = self.numbers
        return f"create table {self.table} ({self.words.key} {kind}, {self.group} {kind}, {first} int, {second} int)"

    @property
    def script(self) -> str:
        return f"{self.schema};\ninsert into {self.table} values {', '.join(map(str, self.rows))};"

    def number(self) -> str:
        """One of the columns of numbers."""
        return self.rng.choice(self.numbers)

    def task(self, wordings: tuple[str, str, str], query: str, ordered: bool = False) -> Row:
        """A row. Combinations of opening and wording in the test split never occur in training."""
        pairs = [
            (i, j)
            for i in range(len(OPENINGS))
            for j in range(3)
            if ((i + j) % 4 == 3) == self.held
        ]
        i, j = self.rng.choice(pairs)
        answer = run(self.script, query)
        prompt = f"{self.schema}\n{OPENINGS[i]}{wordings[j]}"
        return {
            "prompt": prompt,
            "database": self.script,
            "query": query,
            "answer": answer,
            "ordered": ordered,
        }


def _world(rng: random.Random, held: bool, words: Words) -> World:
    """A table without ties, so that every question has one answer."""
    keys = rng.sample(words.keys, rng.randint(5, 9))
    firsts, seconds = rng.sample(range(11, 99), len(keys)), rng.sample(range(11, 99), len(keys))
    rows = [
        (key, rng.choice(words.kinds), a, b)
        for key, a, b in zip(keys, firsts, seconds, strict=True)
    ]
    first, second = rng.sample(words.numbers, 2)
    return World(
        rng, words, rng.choice(words.tables), rng.choice(words.groups), (first, second), rows, held
    )


def _lookup(w: World) -> Row:
    value, x, key = w.rng.choice(w.rows)[0], w.number(), w.words.key
    said = (
        f"What is the {x} of {key} {value}?",
        f"Which {x} has {key} {value}?",
        f"The {x} of {key} {value}?",
    )
    return w.task(said, f"select {x} from {w.table} where {key} = {value!r}")


def _count(w: World) -> Row:
    x, than = w.number(), w.rng.randint(25, 80)
    side, sign = w.rng.choice((("larger", ">"), ("smaller", "<")))
    said = (
        f"How many have {x} {side} than {than}?",
        f"How many of {x} {side} than {than}?",
        f"{x} {side} than {than}?",
    )
    return w.task(said, f"select count(*) from {w.table} where {x} {sign} {than}")


def _total(w: World) -> Row:
    value, x, group = w.rng.choice(w.rows)[1], w.number(), w.group
    said = (
        f"What is the sum of {x} in {group} {value}?",
        f"The sum of {x} for {group} {value}?",
        f"Add {x} of {group} {value}.",
    )
    return w.task(said, f"select sum({x}) from {w.table} where {group} = {value!r}")


def _top(w: World) -> Row:
    x, key = w.number(), w.words.key
    side, order = w.rng.choice((("largest", " desc"), ("smallest", "")))
    said = (
        f"Which {key} has the {side} {x}?",
        f"The {key} of the {side} {x}?",
        f"What {key} has the {side} {x}?",
    )
    return w.task(said, f"select {key} from {w.table} order by {x}{order} limit 1")


def _mean(w: World) -> Row:
    x = w.number()
    said = (f"What is the average {x}?", f"The mean of {x}?", f"How much {x} on average?")
    return w.task(said, f"select avg({x}) from {w.table}")


def _listing(w: World) -> Row:
    value, x, key, group = w.rng.choice(w.rows)[1], w.number(), w.words.key, w.group
    said = (
        f"List every {key} of {group} {value}, by rising {x}.",
        f"Each {key} of {group} {value}, {x} rising?",
        f"Every {key} of {group} {value}, least {x} first.",
    )
    query = f"select {key} from {w.table} where {group} = {value!r} order by {x}"
    return w.task(said, query, ordered=True)


FAMILIES: dict[str, tuple[Callable[[World], Row], int]] = {
    "lookup": (_lookup, 3),
    "count": (_count, 3),
    "total": (_total, 2),
    "top": (_top, 2),
    "mean": (_mean, 0),
    "listing": (_listing, 0),
}
"""Family → (generator, its weight in training and test; 0: held out)."""


def run(script: str, query: str) -> str:
    """The answer of `sql` to a query on a script's database."""
    with closing(open_database(script, None, 64)) as connection:
        return SqlTool().run(connection, query).text


WORLD = ("database",)
"""Fields that make two rows with the same prompt different tasks."""

HELDOUT = [name for name, (_, weight) in FAMILIES.items() if not weight]
SPLITS = {"train": 300, "test": 100, "heldout": 40, "validation": 50}
SHOWN = {1002: 5120}
"""Maps a seed of `generate` to the maximum number of its rows in the demonstrations of `tiny-sql`."""


def generate(
    seed: int, families: list[str] | None = None, held: bool = False, words: Words = PLAIN
) -> Iterator[Row]:
    """Yields endless rows without ids, worded as in training or (`held`) as in the test split; seeded."""
    rng = random.Random(f"sql-task {seed}")
    names = families or [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    while True:
        family = rng.choice(names)
        yield {"family": family, **FAMILIES[family][0](_world(rng, held, words))}


def rich(seed: int) -> Iterator[Row]:
    """The harder level: all families, texts as keys, more words. In task.yaml: `train: {generate: "task.py:rich"}`."""
    return generate(seed, list(FAMILIES), words=RICH)


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no question is in two splits, and no prompt of the test split in training."""

    def rows_of(split: str, number: int) -> Iterator[Row]:
        return generate(number, HELDOUT if split == "heldout" else None, held=split == "test")

    return draw_splits(SPLITS, rows_of, world=WORLD, generate=generate, shown=SHOWN)


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution: the query, its result, and the answer in words."""
    answer = run(row["database"], row["query"])
    call = {"type": "function", "function": {"name": "sql", "arguments": {"query": row["query"]}}}
    said = ", ".join(answer.splitlines()[1:]) or "unknown"
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "sql", "content": answer},
        {"role": "assistant", "content": f"Answer: {said}"},
    ]


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """The solver, or for a share `1 - tool_rate` of the rows a mistake made without reading the schema.

    Half of those answer a number without any query, half query a table or a column that this database does not have.
    """
    if rng.random() < tool_rate:
        return solve(row)
    if rng.random() < 0.5:
        return [{"role": "assistant", "content": f"Answer: {rng.randint(11, 98)}"}]
    words = PLAIN.tables if rng.random() < 0.5 else PLAIN.numbers
    other = rng.choice([word for word in words if word not in row["prompt"]])
    said = next(word for word in words if word in row["query"])
    return solve({**row, "query": row["query"].replace(said, other)})


def result(episode: Any, ctx: Any) -> Any:
    """1 if the last successful query returns the rows of the reference query (primary)."""
    results = [found for turn in episode.turns for found in turn.results if found.error is None]
    if not results:
        return ctx.part(0.0, "no query was run")
    said, wanted = (text.splitlines()[1:] for text in (results[-1].text, ctx.task.data["answer"]))
    if not ctx.task.data["ordered"]:
        said, wanted = sorted(said), sorted(wanted)
    return ctx.part(float(said == wanted), f"returned {said}, expected {wanted}")


def tool_errors(episode: Any, ctx: Any) -> float:
    """−1 if any tool call failed or could not be parsed, else 0."""
    return -1.0 if episode.tool_errors else 0.0


REWARDS = {"result": result, "tool_errors": tool_errors}


def write(folder: str) -> None:
    """Write `build()` into `folder`/data: `python task.py` makes the data again."""
    for split, rows in build().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = Path(folder) / "data" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(str(Path(__file__).parent))
