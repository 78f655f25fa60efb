"""Twenty real functions, written by hand, that no training data of the bundled model names."""

from __future__ import annotations

import math
from datetime import date, timedelta
from typing import Literal

WORDS = (
    "harbor candle pocket thunder garden violin mirror pepper blanket"
    " anchor cactus lizard muffin rocket saddle"
).split()
REPEATING = "banana alabama committee pepper mississippi assessment bookkeeper possession coconut cocoon papaya".split()
GOODS = {
    "mug": 7,
    "scarf": 19,
    "desk": 140,
    "bulb": 3,
    "tray": 11,
    "stool": 45,
    "clock": 28,
    "vase": 16,
}
STOCKS = {
    "mug": 120,
    "scarf": 35,
    "desk": 4,
    "bulb": 560,
    "tray": 77,
    "stool": 12,
    "clock": 41,
    "vase": 9,
}
METRES = {"km": 1000.0, "m": 1.0, "cm": 0.01, "mi": 1609.344, "ft": 0.3048, "in": 0.0254}
ZONES = {"France": 3, "Japan": 9, "Brazil": 8, "Kenya": 7, "Canada": 6}
SHELVES = {
    "mug": "S4",
    "scarf": "S9",
    "desk": "S2",
    "bulb": "S7",
    "tray": "S5",
    "stool": "S1",
    "clock": "S8",
    "vase": "S3",
}
OWNERS = {
    "boat": "Ines",
    "barn": "Omar",
    "mill": "Lena",
    "shop": "Pavel",
    "farm": "Ruth",
    "inn": "Hugo",
}
PHONES = {"Ines": 5521, "Omar": 8310, "Lena": 4477, "Pavel": 9068, "Ruth": 2254, "Hugo": 7193}
LINES = (
    "the harbor was quiet",
    "a candle burned low",
    "thunder rolled away",
    "the garden gate stood open",
    "one mirror broke",
)


def reverse(text: str) -> str:
    """Write a text backwards.

    Args:
        text: The text.
    """
    return text[::-1]


def caesar(text: str, shift: int) -> str:
    """Shift every letter of a text in the alphabet.

    Args:
        text: The text.
        shift: By how many letters.
    """
    return "".join(chr((ord(c) - 97 + shift) % 26 + 97) if "a" <= c <= "z" else c for c in text)


def count_letter(word: str, letter: str) -> int:
    """Count how often a letter is in a word.

    Args:
        word: The word.
        letter: One letter.
    """
    return word.count(letter)


def word_count(text: str) -> int:
    """Count the words of a text.

    Args:
        text: The text.
    """
    return len(text.split())


def weekday(day: str) -> str:
    """The weekday of a date.

    Args:
        day: YYYY-MM-DD.
    """
    return date.fromisoformat(day).strftime("%A")


def days_between(start: str, end: str) -> int:
    """The number of days between two dates.

    Args:
        start: The first date, YYYY-MM-DD.
        end: The second date, YYYY-MM-DD.
    """
    return (date.fromisoformat(end) - date.fromisoformat(start)).days


def add_days(day: str, days: int) -> str:
    """The date some days later.

    Args:
        day: YYYY-MM-DD.
        days: How many days.
    """
    return (date.fromisoformat(day) + timedelta(days)).isoformat()


def convert(value: float, from_unit: str, to_unit: str) -> float:
    """Convert a length to another unit.

    Args:
        value: The number.
        from_unit: Its unit: km, m, cm, mi, ft or in.
        to_unit: The unit of the result.
    """
    return float(f"{value * METRES[from_unit] / METRES[to_unit]:.4g}")


def temperature(degrees: float, to: Literal["C", "F"]) -> float:
    """Convert a temperature to Celsius or Fahrenheit.

    Args:
        degrees: The temperature in the other scale.
        to: C or F.
    """
    return round((degrees - 32) / 1.8 if to == "C" else degrees * 1.8 + 32, 1)


def price(item: str, count: int) -> int:
    """What some pieces of an item cost.

    Args:
        item: Its name.
        count: How many.
    """
    return GOODS[item] * count - (count // 10) * 3


def stock(item: str) -> int:
    """How many pieces of an item are there.

    Args:
        item: Its name.
    """
    return STOCKS[item]


def postage(grams: int, country: str) -> int:
    """The postage of a parcel in cents.

    Args:
        grams: Its weight.
        country: Where it goes.
    """
    return 90 + grams * ZONES[country] // 4


def gcd(a: int, b: int) -> int:
    """The greatest common divisor of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return math.gcd(a, b)


def next_prime(n: int) -> int:
    """The smallest prime number above a number.

    Args:
        n: The number.
    """
    found = n + 1
    while any(found % d == 0 for d in range(2, math.isqrt(found) + 1)):
        found += 1
    return found


def to_hex(n: int) -> str:
    """Write a number in hexadecimal.

    Args:
        n: The number.
    """
    return f"{n:x}"


def column_total(numbers: list[int]) -> int:
    """Add up a column of numbers.

    Args:
        numbers: The numbers.
    """
    return sum(numbers)


def checksum(code: str) -> int:
    """The checksum of a code.

    Args:
        code: Letters and digits.
    """
    return sum((n + 3) * ord(c) for n, c in enumerate(code)) % 997


def find_line(word: str) -> str:
    """Find the line of the diary that has a word.

    Args:
        word: The word.
    """
    return next((line for line in LINES if word in line.split()), "no such line")


def shelf_of(item: str) -> str:
    """The shelf that an item is on.

    Args:
        item: Its name.
    """
    return SHELVES[item]


def load_of(shelf: str) -> int:
    """The load of a shelf in kg.

    Args:
        shelf: Its name, such as S4.
    """
    return 10 + int(shelf[1:]) * 37 % 83


def owner_of(place: str) -> str:
    """Who owns a place.

    Args:
        place: What it is.
    """
    return OWNERS[place]


def phone_of(person: str) -> int:
    """The phone number of a person.

    Args:
        person: The name.
    """
    return PHONES[person]
