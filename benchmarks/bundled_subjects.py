"""Twenty small tasks around the functions of bundled_functions.py, with prompts in English and Chinese."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bundled_functions import (
    GOODS,
    LINES,
    METRES,
    OWNERS,
    PHONES,
    REPEATING,
    SHELVES,
    STOCKS,
    WORDS,
    ZONES,
    add_days,
    caesar,
    checksum,
    column_total,
    convert,
    count_letter,
    days_between,
    find_line,
    gcd,
    load_of,
    next_prime,
    owner_of,
    phone_of,
    postage,
    price,
    reverse,
    shelf_of,
    stock,
    temperature,
    to_hex,
    weekday,
    word_count,
)

Drawn = tuple[dict[str, Any], Any]
"""What the prompt's fields say, and the answer."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A task with tools that the model has never seen."""

    name: str
    tools: tuple[Callable[..., Any], ...]
    draw: Callable[[random.Random], Drawn]
    english: tuple[str, ...]
    chinese: tuple[str, ...]
    steps: int = 1

    def rows(
        self, seed: int, count: int, language: Literal["english", "chinese"] = "english"
    ) -> list[dict[str, str]]:
        """Rows with a prompt and the answer; those of both languages have the same values."""
        rng = random.Random(f"bundled functions {self.name} {seed}")
        found = []
        for number in range(count):
            fields, answer = self.draw(rng)
            wordings = self.english if language == "english" else self.chinese
            found.append(
                {"prompt": wordings[number % len(wordings)].format(**fields), "answer": str(answer)}
            )
        return found


def _phrase(rng: random.Random) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(1, 3)))


def _day(rng: random.Random) -> str:
    return (date(2000, 1, 1) + timedelta(rng.randint(0, 20000))).isoformat()


def _one(
    function: Callable[..., Any], **makers: Callable[[random.Random], Any]
) -> Callable[[random.Random], Drawn]:
    """Draws arguments by parameter, and calls the function with them."""

    def draw(rng: random.Random) -> Drawn:
        arguments = {name: make(rng) for name, make in makers.items()}
        return arguments, function(**arguments)

    return draw


def _number(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randint(low, high)


def _from(options: Sequence[Any]) -> Callable[[random.Random], Any]:
    return lambda rng: rng.choice(options)


def _letters(rng: random.Random) -> Drawn:
    """Every count alike often: if most answers are 1, the model learns to count a word in itself."""
    word = rng.choice(REPEATING)
    count = rng.choice(sorted({word.count(letter) for letter in word}))
    letter = rng.choice([letter for letter in sorted(set(word)) if word.count(letter) == count])
    return {"word": word, "letter": letter}, count_letter(word, letter)


def _dates(rng: random.Random) -> Drawn:
    start, end = sorted((_day(rng), _day(rng)))
    return {"start": start, "end": end}, days_between(start, end)


def _lengths(rng: random.Random) -> Drawn:
    source, target = rng.sample(list(METRES), 2)
    value = rng.choice((rng.randint(2, 900), round(rng.uniform(1, 90), 1)))
    return {"value": value, "a": source, "b": target}, convert(value, source, target)


def _degrees(rng: random.Random) -> Drawn:
    to = rng.choice(("C", "F"))
    degrees = rng.randint(-20, 110)
    answer = temperature(degrees, to)  # type: ignore[arg-type]
    return {"degrees": degrees, "from": "F" if to == "C" else "C", "to": to}, answer


def _column(rng: random.Random) -> Drawn:
    numbers = [rng.randint(2, 400) for _ in range(rng.randint(3, 5))]
    return {"numbers": ", ".join(map(str, numbers))}, sum(numbers)


def _code(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(rng.randint(4, 7)))


def _load(rng: random.Random) -> Drawn:
    item = rng.choice(list(SHELVES))
    return {"item": item}, load_of(SHELVES[item])


def _phone(rng: random.Random) -> Drawn:
    place = rng.choice(list(OWNERS))
    return {"place": place}, PHONES[OWNERS[place]]


SUBJECTS = (
    Subject(
        "reverse",
        (reverse,),
        _one(reverse, text=_phrase),
        ('Write "{text}" backwards.', 'What is "{text}" in reverse?', "Reverse this: {text}"),
        ("把“{text}”倒过来写。", '"{text}" 反过来是什么？'),
    ),
    Subject(
        "caesar",
        (caesar,),
        _one(caesar, text=_phrase, shift=_number(1, 25)),
        (
            'Shift "{text}" by {shift} letters.',
            'What is "{text}" with every letter moved {shift} on?',
        ),
        ('把 "{text}" 的字母移动 {shift} 位。', "“{text}”移动 {shift} 位是什么？"),
    ),
    Subject(
        "count_letter",
        (count_letter,),
        _letters,
        (
            "How many {letter} are in {word}?",
            'How often is "{letter}" in "{word}"?',
            "Count the letter {letter} in {word}.",
        ),
        ("{word} 里有几个 {letter}？", '"{word}" 中字母 "{letter}" 出现几次？'),
    ),
    Subject(
        "word_count",
        (word_count,),
        _one(word_count, text=_phrase),
        ('How many words has "{text}"?', 'Count the words: "{text}"'),
        ("“{text}”有几个单词？", '数一数 "{text}" 的单词。'),
    ),
    Subject(
        "weekday",
        (weekday,),
        _one(weekday, day=_day),
        ("Which weekday was {day}?", "What day of the week is {day}?", "{day}: which weekday?"),
        ("{day} 是星期几？", "请问 {day} 那天是星期几？"),
    ),
    Subject(
        "days_between",
        (days_between,),
        _dates,
        ("How many days are between {start} and {end}?", "How many days from {start} to {end}?"),
        ("{start} 到 {end} 有多少天？", "从 {start} 到 {end} 相隔几天？"),
    ),
    Subject(
        "add_days",
        (add_days,),
        _one(add_days, day=_day, days=_number(2, 400)),
        ("Which date is {days} days after {day}?", "What is {day} plus {days} days?"),
        ("{day} 之后 {days} 天是哪一天？", "{day} 加 {days} 天是几号？"),
    ),
    Subject(
        "convert",
        (convert,),
        _lengths,
        (
            "What is {value} {a} in {b}?",
            "Convert {value} {a} to {b}.",
            "How many {b} are {value} {a}?",
        ),
        ("{value} {a} 是多少 {b}？", "把 {value} {a} 换算成 {b}。"),
    ),
    Subject(
        "temperature",
        (temperature,),
        _degrees,
        ("What is {degrees} {from} in {to}?", "Give {degrees} degrees {from} in {to}."),
        ("{degrees} {from} 等于多少 {to}？", "把 {degrees} 度 {from} 换成 {to}。"),
    ),
    Subject(
        "price",
        (price,),
        _one(price, item=_from(list(GOODS)), count=_number(2, 60)),
        (
            "What do {count} pieces of {item} cost?",
            "How much is {item}, {count} of them?",
            "The price of {count} {item}?",
        ),
        ("{count} 个 {item} 多少钱？", "{item} 买 {count} 个要多少钱？"),
    ),
    Subject(
        "stock",
        (stock,),
        _one(stock, item=_from(list(STOCKS))),
        ("How many {item} are there?", "How many pieces of {item} do we have?"),
        ("{item} 有多少件？", "还剩几个 {item}？"),
    ),
    Subject(
        "postage",
        (postage,),
        _one(postage, grams=_number(20, 4000), country=_from(list(ZONES))),
        (
            "What is the postage for {grams} g to {country}?",
            "A parcel of {grams} grams to {country}: what postage?",
        ),
        ("{grams} 克寄到 {country} 邮费多少？", "寄 {country}，{grams} 克，邮费是多少？"),
    ),
    Subject(
        "gcd",
        (gcd,),
        _one(gcd, a=_number(12, 900), b=_number(12, 900)),
        ("What is the greatest common divisor of {a} and {b}?", "Find the gcd of {a} and {b}."),
        ("{a} 和 {b} 的最大公约数是多少？", "求 {a} 与 {b} 的最大公约数。"),
    ),
    Subject(
        "next_prime",
        (next_prime,),
        _one(next_prime, n=_number(20, 9000)),
        ("Which prime comes after {n}?", "What is the next prime above {n}?"),
        ("{n} 之后的下一个质数是多少？", "比 {n} 大的最小质数？"),
    ),
    Subject(
        "to_hex",
        (to_hex,),
        _one(to_hex, n=_number(30, 99999)),
        ("Write {n} in hexadecimal.", "What is {n} in hex?"),
        ("{n} 的十六进制是什么？", "把 {n} 写成十六进制。"),
    ),
    Subject(
        "column_total",
        (column_total,),
        _column,
        (
            "What is the total of {numbers}?",
            "Add up: {numbers}",
            "A column has {numbers}. What is its sum?",
        ),
        ("{numbers} 的总和是多少？", "请把 {numbers} 加起来。"),
    ),
    Subject(
        "checksum",
        (checksum,),
        _one(checksum, code=_code),
        ("What is the checksum of {code}?", "Give the checksum for the code {code}."),
        ("{code} 的校验和是多少？", "请算 {code} 的校验和。"),
    ),
    Subject(
        "find_line",
        (find_line,),
        _one(find_line, word=_from([line.split()[1] for line in LINES])),
        ("Which line of the diary has {word}?", 'What line is "{word}" in?'),
        ("日记里哪一行有 {word}？", "找出有 {word} 的那一行。"),
    ),
    Subject(
        "load_of_shelf",
        (shelf_of, load_of),
        _load,
        (
            "What is the load of the shelf that {item} is on?",
            "How heavy is the load of the shelf of {item}?",
        ),
        ("{item} 所在货架的负荷是多少？", "放 {item} 的货架负荷多少？"),
        steps=2,
    ),
    Subject(
        "phone_of_owner",
        (owner_of, phone_of),
        _phone,
        (
            "What is the phone number of the owner of the {place}?",
            "The phone of who owns the {place}?",
        ),
        ("{place} 的主人的电话是多少？", "请查 {place} 主人的电话。"),
        steps=2,
    ),
)
"""The twenty, two of them with two steps."""
