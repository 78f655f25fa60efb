"""Forty generated tools and two hundred tasks, by another seed, other words and other templates than the warm-up's."""

from __future__ import annotations

import inspect
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

THINGS = tuple(
    "turbine sensor invoice voyage clinic tenant orchid glacier violin furnace parliament satellite bakery".split()
)
MEASURES = "quota humidity voltage tariff grade lifespan backlog altitude turnout yield acidity backup".split()
PLACES = "Oslo Lima Cairo Quito Dakar Hanoi Turin Perth Osaka Leeds".split()
NOUNS = "moss quiver lattice pigeon drizzle anvil thimble walrus yarn kiosk".split()
Maker = tuple[str, type, str, Callable[[random.Random], Any]]

PARAMETERS: tuple[Maker, ...] = (
    ("place", str, "Name of the place.", lambda rng: rng.choice(PLACES)),
    ("year", int, "The year.", lambda rng: rng.randint(1900, 2090)),
    ("serial", str, "Serial number.", lambda rng: f"{rng.choice('BDFHK')}{rng.randint(100, 9999)}"),
    ("noun", str, "What it is.", lambda rng: rng.choice(NOUNS)),
    ("depth", float, "How deep, in metres.", lambda rng: round(rng.uniform(1, 400), 1)),
    ("bundle", list, "All of the readings.", lambda rng: [rng.randint(1, 90) for _ in range(3)]),
    ("slot", int, "Which slot.", lambda rng: rng.randint(1, 48)),
)
TEMPLATES = (
    "According to the records, what {what} goes with {values}?",
    "{values}. I would like to know the {what}, please.",
    "The {what} that belongs to {values}, please.",
    "Report the {what} given {values}.",
)


@dataclass(frozen=True, slots=True)
class Generated:
    """A tool with its tasks."""

    name: str
    function: Callable[..., Any]
    draw: Callable[[random.Random], dict[str, str]]
    """One more task: its prompt and its answer."""
    rows: tuple[dict[str, str], ...]

    def more(self, count: int, seed: int) -> list[dict[str, str]]:
        """Tasks to train on: other draws, none of which is in `rows`."""
        rng = random.Random(f"generated tool {self.name} {seed}")
        held = {row["prompt"] for row in self.rows}
        return [row for _ in range(4 * count) if (row := self.draw(rng))["prompt"] not in held][
            :count
        ]


def generated(count: int = 40, tasks: int = 5, seed: int = 99) -> list[Generated]:
    """So many tools, each with so many tasks; a seed gives the same ones."""
    rng = random.Random(f"generated tools {seed}")
    pairs = [(thing, measure) for thing in THINGS for measure in MEASURES]
    return [_tool(rng, thing, measure, tasks) for thing, measure in rng.sample(pairs, count)]


def _tool(rng: random.Random, thing: str, measure: str, tasks: int) -> Generated:
    name = rng.choice(
        (f"{thing}_{measure}", f"{measure}_of_{thing}", f"{thing}{measure.capitalize()}")
    )
    chosen = rng.sample(PARAMETERS, rng.choice((1, 1, 2, 2, 3)))
    template = rng.choice(TEMPLATES)
    function = _function(name, f"The {measure} of a {thing}.", chosen)

    def draw(rng: random.Random) -> dict[str, str]:
        arguments = {label: make(rng) for label, _, _, make in chosen}
        said = " and ".join(
            f"{label} {', '.join(map(str, value)) if isinstance(value, list) else value}"
            for label, value in arguments.items()
        )
        prompt = template.format(what=f"{measure} of the {thing}", values=said)
        return {"prompt": prompt[0].upper() + prompt[1:], "answer": str(function(**arguments))}

    return Generated(name, function, draw, tuple(draw(rng) for _ in range(tasks)))


def _function(name: str, about: str, parameters: list[Maker]) -> Callable[..., Any]:
    """A typed function whose result follows from its arguments alone."""

    def function(**arguments: Any) -> int:
        said = name + "".join(f"{key}={value}" for key, value in sorted(arguments.items()))
        return zlib.crc32(said.encode()) % 9973

    types = {label: list[int] if kind is list else kind for label, kind, _, _ in parameters}
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{about}\n\nArgs:\n" + "".join(
        f"    {label}: {said}\n" for label, _, said, _ in parameters
    )
    function.__annotations__ = {**types, "return": int}
    fields = [
        inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, annotation=types[one])
        for one in types
    ]
    function.__signature__ = inspect.Signature(fields, return_annotation=int)  # type: ignore[attr-defined]
    return function
