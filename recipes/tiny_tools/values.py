"""Values of the JSON types: how they stand in a call, how a prompt says them, and how a schema describes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .words import chinese, syllables, word

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
UNITS = tuple(
    (
        "km cm mm kg mg lb oz ft in mi ml gal min sec kB MB W kWh m g h l t yd C F K V A N Pa bar"
        " ha"
    ).split()
)
MONTHS = (
    "January February March April May June July August September October November December".split()
)


@dataclass(frozen=True, slots=True)
class Value:
    """One argument of a task."""

    kind: str
    json: Any
    said: str
    """As the prompt writes it."""
    schema: dict[str, Any] = field(default_factory=dict)
    """Its JSON schema, without a description."""


def integer(rng: random.Random) -> Value:
    """From one digit to six, seldom negative."""
    number = rng.randint(0, 10 ** rng.randint(1, 6))
    number = -number if rng.random() < 0.06 else number
    return Value("integer", number, str(number), {"type": "integer"})


def number(rng: random.Random) -> Value:
    """A decimal fraction, or a whole number where a schema says `number`."""
    whole = rng.random() < 0.3
    value = (
        rng.randint(1, 9999)
        if whole
        else round(rng.uniform(0, 10 ** rng.randint(1, 4)), rng.randint(1, 3))
    )
    return Value("number", value, str(value), {"type": "number"})


def plain(rng: random.Random) -> Value:
    """One word, or a Chinese one."""
    text = (
        chinese(rng)
        if rng.random() < 0.1
        else word(rng)
        if rng.random() < 0.8
        else word(rng) + syllables(rng, 1, 2)
    )
    return Value("word", text, text, {"type": "string"})


def letter(rng: random.Random) -> Value:
    """A single letter."""
    text = rng.choice(LETTERS) if rng.random() < 0.15 else rng.choice(LETTERS).lower()
    return Value(
        "letter", text, rng.choice(("{}", "{}", "'{}'", '"{}"')).format(text), {"type": "string"}
    )


def quoted(rng: random.Random) -> Value:
    """Several words, or one, between quotation marks, after a colon, or bare."""
    words = [chinese(rng) if rng.random() < 0.05 else word(rng) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.2:
        words[0] = words[0].capitalize()
    text = " ".join(words) + (rng.choice("!?.") if rng.random() < 0.1 else "")
    said = rng.choice(('"{}"', '"{}"', "'{}'", "`{}`", "“{}”", "{}")).format(text)
    return Value("text", text, said, {"type": "string"})


def date(rng: random.Random) -> Value:
    """An ISO date."""
    text = f"{rng.randint(1950, 2060)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    return Value("date", text, text, {"type": "string"})


def clock(rng: random.Random) -> Value:
    """A time of day."""
    text = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return Value("time", text, text, {"type": "string"})


def code(rng: random.Random) -> Value:
    """Capitals and digits, a word with a number, a file's name, an address."""
    form = rng.random()
    if form < 0.1:
        text = f"{rng.choice(LETTERS)}{rng.randint(0, 99)}"
    elif form < 0.35:
        text = "".join(rng.choice(LETTERS + "0123456789") for _ in range(rng.randint(3, 7)))
    elif form < 0.55:
        text = f"{rng.choice(LETTERS)}{rng.choice(LETTERS)}-{rng.randint(1, 9999)}"
    elif form < 0.75:
        text = f"{word(rng)}{rng.randint(0, 999)}"
    elif form < 0.85:
        text = f"{word(rng)}.{rng.choice(('txt', 'csv', 'py', 'json', 'md'))}"
    elif form < 0.93:
        text = f"{word(rng)}@{syllables(rng)}.{rng.choice(('com', 'org', 'net'))}"
    else:
        text = f"0x{rng.randint(16, 65535):x}"
    return Value("code", text, text, {"type": "string"})


def name(rng: random.Random) -> Value:
    """A person or a place: one capitalised word or two."""
    text = " ".join(syllables(rng).capitalize() for _ in range(rng.choice((1, 1, 2))))
    return Value("name", text, text, {"type": "string"})


def unit(rng: random.Random) -> Value:
    """A unit, known or made up."""
    text = (
        rng.choice(UNITS)
        if rng.random() < 0.5
        else syllables(rng, 1, 2) + ("s" if rng.random() < 0.5 else "")
    )
    return Value("unit", text, text, {"type": "string"})


def enum(rng: random.Random) -> Value:
    """One of a few words that the schema lists."""
    options = [word(rng) for _ in range(rng.randint(2, 4))]
    text = rng.choice(options)
    return Value("enum", text, text, {"type": "string", "enum": options})


def boolean(rng: random.Random) -> Value:
    """True or false, in these words or as yes and no."""
    value = rng.random() < 0.5
    said = rng.choice((("yes", "no"), ("true", "false"), ("on", "off")))[0 if value else 1]
    return Value("boolean", value, said, {"type": "boolean"})


def integers(rng: random.Random) -> Value:
    """A list of numbers."""
    values = [rng.randint(0, 10 ** rng.randint(1, 4)) for _ in range(rng.randint(2, 6))]
    return Value(
        "integers", values, listed(rng, values), {"type": "array", "items": {"type": "integer"}}
    )


def words(rng: random.Random) -> Value:
    """A list of words."""
    values = [word(rng) for _ in range(rng.randint(2, 4))]
    schema = {"type": "array", "items": {"type": "string"}}
    return Value("words", values, listed(rng, values), schema)


def record(rng: random.Random) -> Value:
    """An object of two scalar fields."""
    fields = {word(rng): rng.choice((integer, plain, code))(rng) for _ in range(2)}
    said = ", ".join(f"{key} {value.said}" for key, value in fields.items())
    properties = {key: value.schema for key, value in fields.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Value("record", {key: value.json for key, value in fields.items()}, said, schema)


def listed(rng: random.Random, values: list[Any]) -> str:
    """A list as prompts write it: `1, 2, 3`, `1 2 3`, `1, 2 and 3` or JSON."""
    texts = [str(value) for value in values]
    joined, spoken = ", ".join(texts), f"{', '.join(texts[:-1])} and {texts[-1]}"
    return rng.choice((joined, " ".join(texts), spoken, f"[{joined}]"))


Maker = Callable[[random.Random], Value]
KINDS: dict[str, tuple[Maker, float, tuple[str, ...], tuple[str, ...]]] = {
    "integer": (
        integer,
        24,
        (
            "n",
            "number",
            "count",
            "amount",
            "k",
            "x",
            "y",
            "a",
            "b",
            "size",
            "limit",
            "times",
            "quantity",
            "level",
            "id",
        ),
        (
            "A whole number.",
            "How many.",
            "The number.",
            "The first number.",
            "The second number.",
            "At least 1.",
        ),
    ),
    "number": (
        number,
        9,
        (
            "value",
            "amount",
            "rate",
            "width",
            "height",
            "weight",
            "length",
            "percent",
            "factor",
            "total",
            "cost",
        ),
        ("A number.", "The amount.", "In per cent.", "How much.", "The value."),
    ),
    "word": (
        plain,
        14,
        (
            "word",
            "item",
            "name",
            "key",
            "product",
            "term",
            "topic",
            "thing",
            "label",
            "title",
            "tag",
            "city",
        ),
        ("A word.", "Its name.", "The name.", "Name of the item.", "One word."),
    ),
    "letter": (
        letter,
        6,
        ("letter", "char", "character", "symbol", "initial"),
        ("One letter.", "A single character.", "The letter."),
    ),
    "text": (
        quoted,
        13,
        (
            "text",
            "s",
            "sentence",
            "message",
            "line",
            "phrase",
            "content",
            "string",
            "title",
            "query",
            "note",
        ),
        ("A text.", "The text.", "Some words.", "What is written.", "The sentence."),
    ),
    "date": (
        date,
        9,
        (
            "date",
            "day",
            "start",
            "end",
            "due",
            "first",
            "second",
            "since",
            "until",
            "begin",
            "when",
        ),
        ("A date, YYYY-MM-DD.", "ISO date.", "The day.", "From when.", "Until when."),
    ),
    "time": (
        clock,
        2,
        ("time", "hour", "at", "start", "end"),
        ("HH:MM.", "A time of day.", "When."),
    ),
    "code": (
        code,
        8,
        (
            "code",
            "id",
            "key",
            "sku",
            "ref",
            "serial",
            "path",
            "file",
            "email",
            "address",
            "token",
            "part",
        ),
        ("Its code.", "An identifier.", "The key.", "The reference."),
    ),
    "name": (
        name,
        6,
        (
            "person",
            "city",
            "name",
            "country",
            "place",
            "who",
            "owner",
            "author",
            "team",
            "station",
            "customer",
        ),
        ("Who.", "The place.", "A name.", "Name of the person."),
    ),
    "unit": (
        unit,
        3,
        ("unit", "units", "measure", "scale", "currency"),
        ("The unit.", "A unit such as km."),
    ),
    "enum": (
        enum,
        4,
        ("mode", "kind", "type", "style", "order", "direction", "option", "format"),
        ("Which one.", "One of the options.", "How."),
    ),
    "boolean": (
        boolean,
        2,
        ("strict", "exact", "reverse_order", "upper", "sorted", "all", "quiet", "verbose"),
        ("Yes or no.", "Whether to.", "True for all."),
    ),
    "integers": (
        integers,
        4,
        ("numbers", "values", "items", "xs", "data", "list", "scores", "sizes"),
        ("The numbers.", "A list of numbers.", "All values."),
    ),
    "words": (
        words,
        2,
        ("words", "names", "tags", "items", "keys"),
        ("The words.", "A list of names."),
    ),
    "record": (
        record,
        1.5,
        ("options", "item", "entry", "settings", "filter"),
        ("An object.", "The entry."),
    ),
}
"""Kind → (maker, how often it is drawn, usual names of such parameters, usual descriptions)."""

WEIGHTS = [weight for _, weight, _, _ in KINDS.values()]


def draw(rng: random.Random, kind: str | None = None) -> Value:
    """A value of a kind, by default of one drawn by weight."""
    chosen = kind or rng.choices(list(KINDS), WEIGHTS)[0]
    return KINDS[chosen][0](rng)


def result_text(rng: random.Random) -> str:
    """A short result of a tool: a number, a word, a code, a date, a few words, hexadecimal, Roman, yes or no."""
    form = rng.random()
    if form < 0.42:
        return str(rng.choice((integer, integer, number))(rng).json)
    if form < 0.5:
        return str(-rng.randint(1, 9999))
    if form < 0.58:
        return rng.choice(
            ("True", "False", "yes", "no", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
        )
    if form < 0.63:
        return "".join(rng.choice("IVXLCM") for _ in range(rng.randint(1, 6)))
    if form < 0.69:
        return f"{rng.randint(10, 10**6):x}"
    if form < 0.75:
        return word(rng)[::-1]
    return str(
        draw(rng, rng.choice(("word", "text", "date", "code", "name", "time", "letter"))).json
    )
