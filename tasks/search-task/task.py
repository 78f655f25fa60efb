"""Questions over a corpus of made-up facts, which only a search can answer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from agentrl_cli.tasks import draw_splits
from agentrl_cli.tools.search import SearchTool, index_of

Row = dict[str, Any]

HERE = Path(__file__).parent
CORPUS = HERE / "corpus" / "facts.jsonl"
WORDS = ("bird", "stone", "river", "lamp", "cloud", "chair", "green", "north", "apple", "wheel")
HEADS = ("vel", "tar", "on", "mir", "sa", "dro", "kel", "bru", "fen", "ga", "lo", "pi")
TAILS = ("nor", "bek", "dra", "lin", "vash", "moor", "tis", "quel", "ran", "zet")


@cache
def facts() -> dict[str, list[dict[str, Any]]]:
    """The made-up world: 120 things, and 120 each of rivers, cities and people. The same at every call."""
    rng = random.Random("search-task things")
    codes = [f"{word}{number}" for word in WORDS for number in rng.sample(range(100, 999), 12)]
    rng.shuffle(codes)
    things = [
        {"name": name, "code": code, "box": box, "sold": sold}
        for name, code, box, sold in zip(
            codes,
            *(
                rng.sample(range(low, high), 120)
                for low, high in ((1000, 9999), (100, 999), (100, 999))
            ),
            strict=True,
        )
    ]
    rng = random.Random("search-task world")
    names = [(head + tail).capitalize() for head in HEADS for tail in TAILS]
    rivers = [{"name": name, "length": length} for name, length in _numbered(rng, names, 100, 999)]
    cities = [
        {"name": f"{name}{end}", "people": people}
        for (name, people), end in _ended(rng, names, 1000, 9999)
    ]
    firsts = [name[:5] for name in names]
    people = [
        {
            "name": f"{first.capitalize()} {rng.choice(HEADS).capitalize()}{rng.choice(TAILS)}",
            "city": city["name"],
        }
        for first, city in zip(firsts, rng.sample(cities, len(cities)), strict=True)
    ]
    return {"thing": things, "river": rivers, "city": cities, "person": people}


def _numbered(rng: random.Random, names: list[str], low: int, high: int) -> list[tuple[str, int]]:
    order = rng.sample(names, len(names))
    return list(zip(order, rng.sample(range(low, high), len(names)), strict=True))


def _ended(
    rng: random.Random, names: list[str], low: int, high: int
) -> list[tuple[tuple[str, int], str]]:
    return [
        (item, rng.choice(("ia", "burg", "ford", "by")))
        for item in _numbered(rng, names, low, high)
    ]


def documents() -> list[dict[str, str]]:
    """The corpus."""
    world = facts()
    lines = [f"The code of {f['name']} is {f['code']}." for f in world["thing"]]
    lines += [f"The box of {f['name']} is {f['box']}." for f in world["thing"]]
    lines += [f"Of {f['name']} were sold {f['sold']}." for f in world["thing"]]
    lines += [f"The river {f['name']} is {f['length']} km long." for f in world["river"]]
    lines += [f"{f['people']} people live in the city {f['name']}." for f in world["city"]]
    lines += [f"{f['name']} is from the city {f['city']}." for f in world["person"]]
    random.Random("search-task order").shuffle(lines)
    return [{"id": f"{n:03d}", "text": text} for n, text in enumerate(lines)]


Part = Literal["warm-up", "train", "test"]
PARTS: dict[Part, tuple[int, ...]] = {"warm-up": (0, 1, 2, 4, 5, 6), "train": (3,), "test": (7,)}
"""Maps parts of the data to their facts, by the fact's number modulo 8: no two parts share one."""
OPENINGS = ("", "Tell me: ", "Find this: ", "Look up: ")


@dataclass(frozen=True)
class Draw:
    """Draws a task's fact and wording from one part's facts."""

    rng: random.Random
    part: Part

    def fact(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = self.rng.choice(
            [f for n, f in enumerate(facts()[kind]) if n % 8 in PARTS[self.part]]
        )
        return found

    def row(self, wordings: tuple[str, str, str], searches: list[str], answer: Any) -> Row:
        """A row. Combinations of opening and wording in the test split never occur in training."""
        pairs = [
            (i, j)
            for i in range(len(OPENINGS))
            for j in range(3)
            if ((i + j) % 4 == 3) == (self.part == "test")
        ]
        i, j = self.rng.choice(pairs)
        return {"prompt": f"{OPENINGS[i]}{wordings[j]}", "search": searches, "answer": str(answer)}


@dataclass(frozen=True)
class Lookup:
    """A question for one search: three wordings and the query, with `{}` for a fact's name."""

    kind: str
    field: str
    wordings: tuple[str, str, str]
    query: str

    def __call__(self, draw: Draw) -> Row:
        fact = draw.fact(self.kind)
        first, second, third = (wording.format(fact["name"]) for wording in self.wordings)
        return draw.row((first, second, third), [self.query.format(fact["name"])], fact[self.field])


CODE = ("What is the code of {}?", "Which code has {}?", "The code of {}?")
BOX = ("Which box holds {}?", "What is the box of {}?", "{} is in which box?")
SOLD = ("How many of {} were sold?", "How many {} sold?", "The number of {} sold?")
RIVER = (
    "How long is the river {} in km?",
    "The length of the river {}?",
    "How many km is {} long?",
)
CITY = ("How many people live in {}?", "How many people has {}?", "People in the city {}?")
PERSON = ("Which city is {} from?", "The city of {}?", "Where is {} from?")


def _two_hops(draw: Draw) -> Row:
    fact = draw.fact("person")
    name = fact["name"]
    people = next(city["people"] for city in facts()["city"] if city["name"] == fact["city"])
    said = (
        f"How many people live in the city that {name} is from?",
        f"How many people has the city of {name}?",
        f"People in the city where {name} is from?",
    )
    return draw.row(said, [name, f"city {fact['city']}"], people)


FAMILIES: dict[str, tuple[Callable[[Draw], Row], int]] = {
    "code": (Lookup("thing", "code", CODE, "code {}"), 1),
    "box": (Lookup("thing", "box", BOX, "box {}"), 1),
    "sold": (Lookup("thing", "sold", SOLD, "sold {}"), 1),
    "river": (Lookup("river", "length", RIVER, "river {}"), 0),
    "city": (Lookup("city", "people", CITY, "city {}"), 0),
    "person": (Lookup("person", "city", PERSON, "{}"), 0),
    "two_hops": (_two_hops, 0),
}
"""Family → (generator, its weight in training and test; 0: held out)."""

HELDOUT = [name for name, (_, weight) in FAMILIES.items() if not weight]
SPLITS = {"train": 220, "test": 80, "heldout": 40, "validation": 40}
SHOWN = {1002: 5120}
"""Maps a seed of `generate` to the maximum number of its rows in the demonstrations of `tiny-search`."""


def generate(seed: int, families: list[str] | None = None, part: Part = "warm-up") -> Iterator[Row]:
    """Yields endless rows without ids about one part's facts, with own wordings for the test split; seeded."""
    draw = Draw(random.Random(f"search-task {seed}"), part)
    names = families or [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    while True:
        family = draw.rng.choice(names)
        yield {"family": family, **FAMILIES[family][0](draw)}


def rich(seed: int) -> Iterator[Row]:
    """The harder level: made-up names, questions of two hops. In task.yaml: `train: {generate: "task.py:rich"}`."""
    return generate(seed, [name for name, (_, weight) in FAMILIES.items() if not weight])


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no fact of the warm-up, and no fact or wording of the test split in training."""

    def rows_of(split: str, number: int) -> Iterator[Row]:
        if split == "heldout":
            return generate(number, HELDOUT)
        return generate(number, part="test" if split == "test" else "train")

    return draw_splits(SPLITS, rows_of, generate=generate, shown=SHOWN)


TOOL = SearchTool("corpus/facts.jsonl", top_k=3, width=160)
"""The tool as configured in task.yaml, for the solver's observations."""


def _found(query: str) -> str:
    return TOOL.show(index_of(CORPUS).search(query, 3))


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution: one search per hop, then the answer."""
    said: list[dict[str, Any]] = []
    for query in row["search"]:
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        said.append({"role": "tool", "name": "search", "content": _found(query)})
    return [*said, {"role": "assistant", "content": f"Answer: {row['answer']}"}]


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """The solver, or for a share `1 - tool_rate` of the rows a plausible guess."""
    if rng.random() < tool_rate:
        return solve(row)
    digits = len(row["answer"])
    known = (
        str(rng.randint(10 ** (digits - 1), 10**digits - 1)) if row["answer"].isdigit() else None
    )
    guess = known or rng.choice(facts()["city"])["name"]
    return [{"role": "assistant", "content": f"Answer: {guess}"}]


_ANSWER = re.compile(r"^Answer:[ \t]*(\S.*?)[ \t.]*$", re.MULTILINE)


def answer_of(text: str) -> str | None:
    """The last `Answer: …` line, without thousands separators."""
    found = _ANSWER.findall(text)
    return found[-1].replace(",", "") if found else None


def exact(episode: Any, ctx: Any) -> Any:
    """1 if the answer is exactly the fact (primary)."""
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
    """Write the corpus, and `build()` into `folder`/data: `python task.py` makes them again."""
    corpus = Path(folder) / "corpus" / "facts.jsonl"
    corpus.parent.mkdir(exist_ok=True)
    corpus.write_text(
        "".join(json.dumps(document) + "\n" for document in documents()), encoding="utf-8"
    )
    for split, rows in build().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = Path(folder) / "data" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(str(Path(__file__).parent))
