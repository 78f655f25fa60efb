"""Conversations in which each turn picks one of a few options that the prompt, or the last result, lists."""

from __future__ import annotations

import random
from dataclasses import replace

from .rows import Message, Row, call, result
from .schemas import Parameter, Tool, invent
from .task_row import CHINESE, make_row
from .values import Value
from .words import chinese, word

NAMES = ("action", "move", "choice", "option", "command", "direction", "step", "pick", "answer")
LISTED = (
    "Call {tool} with {name}: {options}.",
    "{name}: {options}",
    "Options: {options}.",
    "You may: {options}.",
    "Choose one of {options}.",
    "Available: [{options}]",
)
CHINESE_LISTED = ("用 {tool} 选一个：{options}。", "可选：{options}", "{name}：{options}")
REFUSED = (
    "Error: '{bad}' is not an action.",
    "{bad} is not possible here.",
    "Error: no {bad}.",
    'Bad tool call: argument "{name}" must be one of {options}.',
)


def play(rng: random.Random) -> Row:
    """A few turns of a game; none is better than another, but only the options that are listed are played.

    Now and then one that is not listed was played: it is refused, not learned, and followed by one that is.
    """
    zh = rng.random() < CHINESE
    options = _options(rng)
    fixed = rng.random() < 0.6  # else each turn lists others of them
    tool = _tool(rng, options if fixed and rng.random() < 0.7 else [])
    name = tool.parameters[0].name
    listed = rng.choice(CHINESE_LISTED if zh else LISTED)
    if "enum" in tool.parameters[0].schema and rng.random() < 0.2:
        listed = ""  # the schema alone has them

    def show(now: list[str]) -> str:
        said = rng.choice((", ", ", ", " / ", " | ")).join(now)
        return listed.format(tool=tool.name, name=name, options=said)

    now, turns, muted = _some(rng, options, fixed), list[Message](), set[int]()
    question = f"{_state(rng, zh)}\n{show(now)}"
    for number in range(rng.randint(2, 5)):
        played = rng.choice(now)
        if rng.random() < 0.15:
            muted.add(number)
            played = word(rng)
            refused = rng.choice(REFUSED).format(bad=played, name=name, options=", ".join(now))
            text = f"{refused} {show(now)}"
        else:
            now = _some(rng, options, fixed)
            text = f"{_state(rng, zh)}\n{show(now)}"
        turns += [call((tool.name, {name: played})), result(tool.name, text)]
    turns.append(call((tool.name, {name: rng.choice(now)})))
    row = make_row(rng, "play", [tool], zh, question, turns, alone=rng.random() < 0.7)
    return replace(row, muted=frozenset(muted))


def _options(rng: random.Random) -> list[str]:
    form, count = rng.random(), rng.randint(2, 6)
    if form < 0.2:
        first = rng.randint(0, 9)
        return [str(first + place) for place in range(count)]
    if form < 0.4:
        return list(dict.fromkeys(f"{word(rng)} {word(rng)}" for _ in range(count)))
    if form < 0.5:
        return rng.choice((["Yes", "No"], ["left", "right", "up", "down"], ["hit", "stick"]))
    return list(dict.fromkeys(word(rng) for _ in range(count)))


def _tool(rng: random.Random, options: list[str]) -> Tool:
    """A tool of one argument, with the options in its schema if there are any."""
    tool = invent(rng, ["word"])
    name = rng.choice((*NAMES, tool.parameters[0].name))
    schema = {"type": "string", **({"enum": options} if options else {})}
    value = Value("enum", "", "", schema)
    parameter = Parameter(name, value, rng.choice(("", f"The {name}.", "One of those listed.")))
    short = rng.choice((tool.name, tool.name, "act", "play", "go", "do"))
    return replace(tool, name=short, parameters=(parameter,))


def _some(rng: random.Random, options: list[str], fixed: bool) -> list[str]:
    return options if fixed else rng.sample(options, rng.randint(1, len(options)))


def _state(rng: random.Random, zh: bool) -> str:
    form = rng.random()
    if form < 0.35:
        width = rng.randint(2, 5)
        cells = [[rng.choice("SFHG.#_XO ") for _ in range(width)] for _ in range(rng.randint(1, 5))]
        return "\n".join("".join(line) for line in cells)
    if form < 0.5:
        return f"Reward {rng.choice((0, 0, 1, -1, 0.5))}."
    if zh:
        return "，".join(chinese(rng) for _ in range(rng.randint(1, 4))) + "。"
    words = " ".join(word(rng) for _ in range(rng.randint(2, 14)))
    return words.capitalize() + rng.choice((".", ".", "!", f" {rng.randint(0, 99)}."))
