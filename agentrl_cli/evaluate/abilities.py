"""A model's share of the abilities that a task with tools needs, by a few attempts at each.

Reinforcement learning can only reinforce what happens: a model that never calls a tool that it has not seen has nothing
to begin with. The tools here are plain typed functions whose names and answers no model can know; the bundled models'
training data has none of these names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agentrl_cli.config import Config
from agentrl_cli.rewards import Reward
from agentrl_cli.rollout import Job, Rollout, seed_of
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Episode

if TYPE_CHECKING:
    from agentrl_cli.policies.load import Loaded

OFTEN, SELDOM = 0.5, 0.05
"""Shares of attempts from which a model does a thing often, and often enough to be learned from."""
ROUNDS = 6
"""Attempts at each row at most; fewer if the time is over."""
SYSTEM = "Use the tools where they help. End with a line `Answer: …`."
HOURS = {"bakery": "7 to 15", "library": "10 to 19", "pharmacy": "8 to 20", "florist": "9 to 17"}
PARCELS = {
    "KX-4821": "in Lyon",
    "RT-0937": "at the depot",
    "BW-7750": "lost",
    "MQ-1168": "on the train",
}
SEATS = {"p-lena": "14C", "p-omar": "3A", "p-ruth": "22F", "p-hugo": "9B"}
DRIVERS = {"12": "Ines", "47": "Pavel", "83": "Marta", "95": "Joao"}
BADGES = {"Ines": "6614", "Pavel": "2087", "Marta": "9351", "Joao": "4470"}


def opening_hours(shop: str) -> str:
    """Return the opening hours of a shop.

    Args:
        shop: What kind of shop.
    """
    return HOURS.get(shop, "closed")


def parcel_status(code: str) -> str:
    """Return where a parcel is.

    Args:
        code: The code of the parcel.
    """
    return PARCELS.get(code, "unknown parcel")


def seat_of(passenger: str) -> str:
    """Return the seat of a passenger.

    Args:
        passenger: Who.
    """
    if passenger not in SEATS:
        raise ValueError(f"{passenger} not found. Did you mean p-{passenger.lower()}?")
    return SEATS[passenger]


def driver_of(route: str) -> str:
    """Return the driver of a bus route.

    Args:
        route: Its number.
    """
    return DRIVERS[route]


def badge_of(driver: str) -> str:
    """Return the badge number of a driver.

    Args:
        driver: The name.
    """
    return BADGES[driver]


def ferry_fare(passengers: int, car: bool = False) -> int:
    """Return the fare of the ferry in cents.

    Args:
        passengers: How many people.
        car: Whether they bring a car.
    """
    return passengers * 370 + car * 1450


def museum_fee(age: int, day: Literal["weekday", "weekend"] = "weekday") -> int:
    """What the museum costs in cents.

    Args:
        age: Age of the visitor.
        day: When.
    """
    return (450 if age < 18 else 1100) + 200 * (day == "weekend")


Called = tuple[str, Mapping[str, Any], bool]
"""Tool, arguments, and whether it returned without an error."""


@dataclass(frozen=True, slots=True)
class Ability:
    """A thing to do, the tools and prompts that ask for it, and the test of an attempt."""

    name: str
    tools: tuple[Callable[..., Any], ...]
    rows: tuple[dict[str, str], ...]
    """Prompts, each with what `shown` compares with."""
    shown: Callable[[Sequence[Called], Mapping[str, Any]], bool]
    needed: bool = True
    """True if no task with a tool can be learned without one of these."""

    @property
    def pack(self) -> Pack:
        """As a task."""
        return Pack.of(
            self.name,
            self.rows,
            [Reward("done", lambda episode, ctx: float(bool(ctx.final_text.strip())))],
            tools=self.tools,
            system=SYSTEM,
        )


def _corrects_call(calls: Sequence[Called], row: Mapping[str, Any]) -> bool:
    failed = next((at for at, (_, _, ok) in enumerate(calls) if not ok), len(calls))
    return any(ok and row["value"] in arguments.values() for _, arguments, ok in calls[failed:])


def _two_steps(calls: Sequence[Called], row: Mapping[str, Any]) -> bool:
    done = [name for name, _, ok in calls if ok]
    return "driver_of" in done and "badge_of" in done[done.index("driver_of") :]


def _rows(wording: str, values: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    return tuple({"prompt": wording.format(said), "value": value} for said, value in values.items())


ABILITIES = (
    Ability(
        "calls a new tool",
        (opening_hours,),
        _rows("When is the {} open?", {k: k for k in HOURS}),
        lambda calls, row: any(ok for _, _, ok in calls),
    ),
    Ability(
        "copies an argument",
        (parcel_status,),
        _rows("Where is the parcel {}?", {k: k for k in PARCELS}),
        lambda calls, row: any(ok and row["value"] in given.values() for _, given, ok in calls),
    ),
    Ability(
        "corrects a call",
        (seat_of,),
        _rows("Which seat has {}?", {key[2:].capitalize(): key for key in SEATS}),
        _corrects_call,
        needed=False,
    ),
    Ability(
        "two steps",
        (driver_of, badge_of),
        _rows("What is the badge number of the driver of route {}?", DRIVERS),
        _two_steps,
        needed=False,
    ),
    Ability(
        "chooses a tool",
        (opening_hours, parcel_status, ferry_fare, museum_fee),
        (
            {"prompt": "When is the bakery open?", "value": "opening_hours"},
            {"prompt": "Where is the parcel BW-7750?", "value": "parcel_status"},
            {"prompt": "What is the fare of the ferry for 6 passengers?", "value": "ferry_fare"},
            {"prompt": "What does the museum cost at the age of 41?", "value": "museum_fee"},
        ),
        lambda calls, row: bool(calls) and calls[0][0] == row["value"],
        needed=False,
    ),
    Ability(
        "abstains",
        (parcel_status,),
        tuple(
            {"prompt": text, "value": ""}
            for text in (
                "Hello",
                "Say: blue lamp",
                "Repeat: one two three",
                "Thanks, that was all.",
            )
        ),
        lambda calls, row: not calls,
        needed=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """How often a model showed an ability."""

    name: str
    shown: int
    attempts: int
    needed: bool

    @property
    def share(self) -> float | None:
        """None if there was no time for an attempt."""
        return self.shown / self.attempts if self.attempts else None


def calls_of(episode: Episode) -> Iterator[Called]:
    """Yield every call of an episode with its fate, in order."""
    for turn, after in zip(episode.turns, [*episode.turns[1:], None], strict=True):
        results = after.results if after is not None else ()
        for number, call in enumerate(turn.calls):
            result = results[number] if number < len(results) else None
            fine = call.error is None and result is not None and result.error is None
            yield call.name, call.arguments or {}, fine


async def measure(loaded: Loaded, config: Config, seconds: float = 30.0) -> list[Found]:
    """Attempts at every ability in turn, up to ROUNDS at each row, until the time is over."""
    limits = {"max_turns": 4, "max_new_tokens": 96, "temperature": 1.0}
    settings = config.replace(rollout=limits)
    abilities = {ability.name: ability for ability in ABILITIES}
    packs = {name: ability.pack for name, ability in abilities.items()}
    rollout = Rollout(loaded.policy, loaded.chat, packs, settings)
    counts = {name: [0, 0] for name in abilities}

    def count(episode: Episode) -> None:
        if episode.outcome is None or episode.outcome.is_error:
            return
        ability = abilities[episode.pack]
        row = next(
            row
            for task, row in zip(tasks[episode.pack], ability.rows, strict=True)
            if task.id == episode.task_id
        )
        counts[episode.pack][0] += ability.shown(list(calls_of(episode)), row)
        counts[episode.pack][1] += 1

    tasks = {name: pack.tasks("train") for name, pack in packs.items()}
    order = [task for several in zip(*tasks.values(), strict=True) for task in several]
    try:
        async with asyncio.timeout(seconds):
            for number in range(ROUNDS):
                jobs = [
                    Job(task, seed_of(config.seed, task.pack, task.id, number), number)
                    for task in order
                ]
                await rollout.run(jobs, count)
    except TimeoutError:
        pass  # what was counted until now is reported
    return [
        Found(name, counts[name][0], counts[name][1], ability.needed)
        for name, ability in abilities.items()
    ]


def verdict(found: Sequence[Found]) -> str:
    """Whether reinforcement learning can begin, and what to do if not, by what there was time for."""
    tried = [one for one in found if one.attempts]
    needed = [one.name for one in tried if one.needed]
    if not needed:
        return (
            "Nothing is known: no attempt ended in time. Try again when the machine is less busy, or look at a few:"
            " agentrl rollout -n 8"
        )
    weak = [one.name for one in tried if one.shown < SELDOM * one.attempts]
    if set(needed) <= set(weak):
        return f"RL cannot begin: it never or hardly {' or '.join(needed)}, so there is nothing to reinforce"
    if weak:
        return f"RL can begin on tasks of one call; what it hardly does ({', '.join(weak)}) needs a warm start."
    return "RL can begin: all that was tried happens often enough to be reinforced."
