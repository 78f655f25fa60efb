"""Questions over a corpus of made-up facts: searching is the only way to know."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from agentrl_cli.tools.search import SearchTool, index_of

Row = dict[str, Any]

HERE = Path(__file__).parent
CORPUS = HERE / "corpus" / "facts.jsonl"
HEADS = ("vel", "tar", "on", "mir", "sa", "dro", "kel", "bru", "fen", "ga", "lo", "pi")
TAILS = ("nor", "bek", "dra", "lin", "vash", "moor", "tis", "quel", "ran", "zet")


@cache
def facts() -> dict[str, list[dict[str, Any]]]:
    """The made-up world: 120 each of rivers, cities and people. The same at every call."""
    rng = random.Random("search-task world")
    names = [(head + tail).capitalize() for head in HEADS for tail in TAILS]
    rivers = [{"name": name, "length": length} for name, length in _numbered(rng, names, 100, 999)]
    cities = [{"name": f"{name}{end}", "people": people} for (name, people), end in _ended(rng, names, 1000, 9999)]
    firsts = [name[:5] for name in names]
    people = [
        {"name": f"{first.capitalize()} {rng.choice(HEADS).capitalize()}{rng.choice(TAILS)}", "city": city["name"]}
        for first, city in zip(firsts, rng.sample(cities, len(cities)), strict=True)
    ]
    return {"river": rivers, "city": cities, "person": people}


def _numbered(rng: random.Random, names: list[str], low: int, high: int) -> list[tuple[str, int]]:
    order = rng.sample(names, len(names))
    return list(zip(order, rng.sample(range(low, high), len(names)), strict=True))


def _ended(rng: random.Random, names: list[str], low: int, high: int) -> list[tuple[tuple[str, int], str]]:
    return [(item, rng.choice(("ia", "burg", "ford", "by"))) for item in _numbered(rng, names, low, high)]


def documents() -> list[dict[str, str]]:
    """The corpus."""
    world = facts()
    lines = [(f["name"], f"The river {f['name']} is {f['length']} km long.") for f in world["river"]]
    lines += [(f["name"], f"{f['people']} people live in the city {f['name']}.") for f in world["city"]]
    lines += [(f["name"], f"{f['name']} is from the city {f['city']}.") for f in world["person"]]
    return [{"id": f"{n:03d}", "text": text} for n, (_, text) in enumerate(lines)]


def _row(prompt: str, searches: list[str], answer: Any) -> Row:
    return {"prompt": prompt, "search": searches, "answer": str(answer)}


def _river(rng: random.Random) -> Row:
    fact = rng.choice(facts()["river"])
    return _row(f"How long is the river {fact['name']} in km?", [f"river {fact['name']}"], fact["length"])


def _city(rng: random.Random) -> Row:
    fact = rng.choice(facts()["city"])
    return _row(f"How many people live in {fact['name']}?", [f"city {fact['name']}"], fact["people"])


def _person(rng: random.Random) -> Row:
    fact = rng.choice(facts()["person"])
    return _row(f"Which city is {fact['name']} from?", [fact["name"]], fact["city"])


def _two_hops(rng: random.Random) -> Row:
    fact = rng.choice(facts()["person"])
    people = next(city["people"] for city in facts()["city"] if city["name"] == fact["city"])
    prompt = f"How many people live in the city that {fact['name']} is from?"
    return _row(prompt, [fact["name"], f"city {fact['city']}"], people)


FAMILIES: dict[str, tuple[Callable[[random.Random], Row], int]] = {
    "river": (_river, 1),
    "city": (_city, 1),
    "person": (_person, 1),
    "two_hops": (_two_hops, 0),
}
"""Family → (generator, how often it is drawn for training and test; 0: held out)."""


SPLITS = {"train": 220, "test": 80, "heldout": 40}


def generate(seed: int, families: list[str] | None = None) -> Iterator[Row]:
    """Endless rows without ids; the same seed gives the same rows."""
    rng = random.Random(f"search-task {seed}")
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


TOOL = SearchTool("corpus/facts.jsonl", top_k=3, width=160)
"""The tool as task.yaml configures it, for the solver's observations."""


def _found(query: str) -> str:
    return TOOL.shown(index_of(CORPUS).search(query, 3))


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution: one search a hop, then the answer."""
    said: list[dict[str, Any]] = []
    for query in row["search"]:
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        said.append({"role": "tool", "name": "search", "content": _found(query)})
    return [*said, {"role": "assistant", "content": f"Answer: {row['answer']}"}]


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """The solver, or for a share `1 - tool_rate` of the rows a guess that looks like an answer."""
    if rng.random() < tool_rate:
        return solve(row)
    digits = len(row["answer"])
    known = str(rng.randint(10 ** (digits - 1), 10**digits - 1)) if row["answer"].isdigit() else None
    guess = known or rng.choice(facts()["city"])["name"]
    return [{"role": "assistant", "content": f"Answer: {guess}"}]


_ANSWER = re.compile(r"^Answer:[ \t]*(\S.*?)[ \t.]*$", re.MULTILINE)


def answer_of(text: str) -> str | None:
    """The last `Answer: …` line, thousands separators taken out."""
    found = _ANSWER.findall(text)
    return found[-1].replace(",", "") if found else None


def exact(episode: Any, ctx: Any) -> Any:
    """1 where the answer is exactly the fact (primary)."""
    said = answer_of(ctx.final_text)
    return ctx.part(float(said == ctx.task.data["answer"]), f"said {said}, expected {ctx.task.data['answer']}")


def format(episode: Any, ctx: Any) -> float:
    """1 where the final turn has an `Answer:` line."""
    return float(answer_of(ctx.final_text) is not None)


def tool_errors(episode: Any, ctx: Any) -> float:
    """−1 where any tool call failed or could not be read, else 0."""
    return -1.0 if episode.tool_errors else 0.0


REWARDS = {"exact": exact, "format": format, "tool_errors": tool_errors}


def write(folder: str) -> None:
    """Write the corpus, and `build()` into `folder`/data: `python task.py` makes them anew."""
    corpus = Path(folder) / "corpus" / "facts.jsonl"
    corpus.parent.mkdir(exist_ok=True)
    corpus.write_text("".join(json.dumps(document) + "\n" for document in documents()), encoding="utf-8")
    for split, rows in build().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = Path(folder) / "data" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(str(Path(__file__).parent))
