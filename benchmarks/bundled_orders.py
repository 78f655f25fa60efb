"""Twelve functions whose questions name their arguments, asked in every order of them.

No data of the bundled model names one of them. Some parameters are everyday quantities, others are of one subject
alone; two are optional, two are choices, one is a list, and three functions have names that say little.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bundled_subjects import Drawn, Subject


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter: how its value is drawn, and how a question says it in English and in Chinese."""

    name: str
    make: Callable[[random.Random], Any]
    english: str
    chinese: str


@dataclass(frozen=True, slots=True)
class Ordered:
    """A function, its arguments, and what a question asks for, with `{said}` where the arguments stand."""

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    english: tuple[str, str]
    chinese: tuple[str, str]

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    def draw(self, rng: random.Random) -> Drawn:
        """Draw values; what a question says of them, and the answer."""
        values = {one.name: one.make(rng) for one in self.arguments}
        said = {
            name: ", ".join(map(str, value)) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return said, self.function(**values)

    def subjects(self) -> list[Subject]:
        """Return one subject for each order of the arguments, named by their places (`10`: the second first)."""
        found = []
        for order in permutations(range(len(self.arguments))):
            english = ", ".join(self.arguments[place].english for place in order)
            chinese = "，".join(self.arguments[place].chinese for place in order)
            found.append(
                Subject(
                    f"{self.name} {''.join(map(str, order))}",
                    (self.function,),
                    self.draw,
                    tuple(frame.format(said=english) for frame in self.english),
                    tuple(frame.format(said=chinese) for frame in self.chinese),
                )
            )
        return found

    def subject(self) -> Subject:
        """Return all orders as one subject, for a training."""
        each = self.subjects()
        english = tuple(wording for one in each for wording in one.english)
        chinese = tuple(wording for one in each for wording in one.chinese)
        return Subject(self.name, (self.function,), self.draw, english, chinese)


def body_mass(height_cm: int, weight_kg: int) -> float:
    """Body mass index.

    Args:
        height_cm: Height.
        weight_kg: Weight.
    """
    return round(weight_kg / (height_cm / 100) ** 2, 1)


def clock_after(clock: str, minutes: int) -> str:
    """The clock some minutes later.

    Args:
        clock: HH:MM.
        minutes: How many minutes.
    """
    hours, past = map(int, clock.split(":"))
    later = (hours * 60 + past + minutes) % 1440
    return f"{later // 60:02d}:{later % 60:02d}"


def ferry_fare(cars: int, passengers: int, bikes: int) -> int:
    """Fare of a ferry.

    Args:
        cars: How many cars.
        passengers: How many passengers.
        bikes: How many bikes.
    """
    return cars * 31 + passengers * 7 + bikes * 3


def bill_share(bill: int, diners: int) -> float:
    """What each diner pays.

    Args:
        bill: The bill.
        diners: Number of diners.
    """
    return round(bill / diners, 2)


def locker_code(row: int, column: int, side: Literal["left", "right"]) -> str:
    """Code of a locker.

    Args:
        row: The row.
        column: The column.
        side: Which side.
    """
    return f"{side[0].upper()}{row * 40 + column}"


def candle_hours(wax: int, wicks: int, scented: bool = False) -> int:
    """How long a candle burns.

    Args:
        wax: Grams of wax.
        wicks: Number of wicks.
        scented: Whether it has a scent.
    """
    return wax * 6 // (wicks * 5) - scented * 3


def dye_tone(indigo: int, madder: int) -> int:
    """Tone of a dye.

    Args:
        indigo: Spoons of indigo.
        madder: Spoons of madder.
    """
    return indigo * 13 + madder * 4


def mean_mark(marks: list[int], bonus: int) -> float:
    """Mean of marks with a bonus.

    Args:
        marks: The marks.
        bonus: Bonus points.
    """
    return round(sum(marks) / len(marks) + bonus, 1)


def f(a: int, b: int) -> int:
    """Days for a book.

    Args:
        a: Pages of the book.
        b: Pages read a day.
    """
    return -(-a // b)


def run(p: int, q: int) -> int:
    """Debt that is left.

    Args:
        p: The loan.
        q: Repaid so far.
    """
    return p - q


def tool_7(x: str, n: int, mode: Literal["slow", "fast"] = "slow") -> str:
    """Arrival of a train.

    Args:
        x: Departure, HH:MM.
        n: Number of stops.
        mode: Kind of train.
    """
    return clock_after(x, n * (11 if mode == "slow" else 7))


def parcel_minutes(sender: str, receiver: str) -> int:
    """Minutes of a parcel on its way.

    Args:
        sender: Who sends it.
        receiver: Who gets it.
    """
    return sum(map(ord, sender.lower())) * 3 % 89 + sum(map(ord, receiver.lower())) % 61


def _between(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randint(low, high)


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def _one_of(*options: Any) -> Callable[[random.Random], Any]:
    return lambda rng: rng.choice(options)


def _marks(rng: random.Random) -> list[int]:
    return [rng.randint(20, 99) for _ in range(rng.randint(2, 4))]


NAMES = _one_of("Ines", "Omar", "Lena", "Pavel", "Ruth", "Hugo", "Mina", "Tariq")
ORDERED = (
    Ordered(
        body_mass,
        (
            Argument(
                "height_cm", _between(140, 205), "{height_cm} cm tall", "身高 {height_cm} 厘米"
            ),
            Argument("weight_kg", _between(40, 130), "{weight_kg} kg", "体重 {weight_kg} 公斤"),
        ),
        ("What is the body mass index: {said}?", "{said}. What is the body mass index?"),
        ("体重指数是多少：{said}？", "{said}，体重指数是多少？"),
    ),
    Ordered(
        clock_after,
        (
            Argument("clock", _clock, "the clock shows {clock}", "现在是 {clock}"),
            Argument("minutes", _between(1, 300), "{minutes} minutes later", "{minutes} 分钟后"),
        ),
        ("What time is it then: {said}?", "{said}: what will the clock show?"),
        ("那时几点：{said}？", "{said}，是几点？"),
    ),
    Ordered(
        ferry_fare,
        (
            Argument("cars", _between(1, 9), "{cars} cars", "{cars} 辆 cars"),
            Argument(
                "passengers",
                _between(1, 40),
                "{passengers} passengers",
                "{passengers} 位 passengers",
            ),
            Argument("bikes", _between(1, 20), "{bikes} bikes", "{bikes} 辆 bikes"),
        ),
        ("What is the ferry fare for {said}?", "{said}: how much is the ferry?"),
        ("{said} 的 ferry 多少钱？", "ferry 票价是多少：{said}？"),
    ),
    Ordered(
        bill_share,
        (
            Argument("bill", _between(20, 900), "a bill of {bill}", "bill {bill}"),
            Argument("diners", _between(2, 12), "{diners} diners", "{diners} 位 diners"),
        ),
        ("What does each one pay: {said}?", "{said}. What is the share?"),
        ("每人付多少：{said}？", "{said}，每人多少？"),
    ),
    Ordered(
        locker_code,
        (
            Argument("row", _between(1, 30), "row {row}", "row {row}"),
            Argument("column", _between(1, 30), "column {column}", "column {column}"),
            Argument("side", _one_of("left", "right"), "on the {side} side", "{side} 侧"),
        ),
        ("What is the code of the locker: {said}?", "Locker {said}: which code?"),
        ("locker 的代码是什么：{said}？", "{said}，locker 代码是多少？"),
    ),
    Ordered(
        candle_hours,
        (
            Argument("wax", _between(100, 900), "{wax} grams of wax", "{wax} 克 wax"),
            Argument("wicks", _between(1, 6), "{wicks} wicks", "{wicks} 根 wicks"),
        ),
        (
            "How long does the candle burn with {said}?",
            "A candle, {said}: for how long does it burn?",
        ),
        ("candle 能烧多久：{said}？", "{said}，candle 能烧几小时？"),
    ),
    Ordered(
        dye_tone,
        (
            Argument("indigo", _between(1, 60), "{indigo} spoons of indigo", "{indigo} 勺 indigo"),
            Argument("madder", _between(1, 60), "{madder} spoons of madder", "{madder} 勺 madder"),
        ),
        ("Which tone has the dye of {said}?", "{said}: which tone?"),
        ("dye 是什么 tone：{said}？", "{said}，tone 是多少？"),
    ),
    Ordered(
        mean_mark,
        (
            Argument("marks", _marks, "marks {marks}", "marks {marks}"),
            Argument("bonus", _between(1, 15), "a bonus of {bonus}", "bonus {bonus}"),
        ),
        ("What is the mean with {said}?", "{said}. What is the mean?"),
        ("平均是多少：{said}？", "{said}，平均多少？"),
    ),
    Ordered(
        f,
        (
            Argument("a", _between(120, 900), "a book of {a} pages", "book 有 {a} 页"),
            Argument("b", _between(5, 90), "{b} read a day", "每天读 {b} 页"),
        ),
        ("How many days does it take: {said}?", "{said}: how many days?"),
        ("需要几天：{said}？", "{said}，要读几天？"),
    ),
    Ordered(
        run,
        (
            Argument("p", _between(500, 9000), "a loan of {p}", "loan {p}"),
            Argument("q", _between(10, 499), "{q} repaid", "已还 {q}"),
        ),
        ("How much is left: {said}?", "{said}. What is still owed?"),
        ("还剩多少：{said}？", "{said}，还欠多少？"),
    ),
    Ordered(
        tool_7,
        (
            Argument("x", _clock, "departs at {x}", "{x} 出发"),
            Argument("n", _between(1, 20), "{n} stops", "{n} 站"),
            Argument("mode", _one_of("slow", "fast"), "a {mode} train", "{mode} 车"),
        ),
        ("When does the train arrive: {said}?", "{said}: when does it arrive?"),
        ("火车几点到：{said}？", "{said}，几点到？"),
    ),
    Ordered(
        parcel_minutes,
        (
            Argument("sender", NAMES, "sent by {sender}", "{sender} 寄出"),
            Argument("receiver", NAMES, "for {receiver}", "{receiver} 收"),
        ),
        (
            "How many minutes is the parcel on its way: {said}?",
            "A parcel {said}: how many minutes?",
        ),
        ("包裹要几分钟：{said}？", "{said}，包裹要几分钟？"),
    ),
)
"""With `tool_7`, `candle_hours` has an optional argument; questions of the latter leave it out."""
