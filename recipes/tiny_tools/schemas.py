"""Invented tools: a name, a description, and up to four parameters with the values that a task gives them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .values import KINDS, Value, draw
from .words import HELD_OUT, Naming, chinese, identifier, word, words_in

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a tool, and its value in this task."""

    name: str
    value: Value
    description: str = ""
    default: Any = None
    """Its default; the task then does not mention it, and the call leaves it out."""

    @property
    def schema(self) -> Schema:
        """Its JSON schema."""
        more: Schema = {"description": self.description} if self.description else {}
        return {
            **self.value.schema,
            **more,
            **({} if self.default is None else {"default": self.default}),
        }


@dataclass(frozen=True, slots=True)
class Tool:
    """A typed function that does not exist."""

    name: str
    description: str
    about: tuple[str, ...]
    """The words of its description: what a question about it may say."""
    parameters: tuple[Parameter, ...]

    @property
    def given(self) -> tuple[Parameter, ...]:
        """The parameters that a task mentions."""
        return tuple(one for one in self.parameters if one.default is None)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the right call passes."""
        return {one.name: one.value.json for one in self.given}

    @property
    def schema(self) -> Schema:
        """As chat templates expect it."""
        properties = {one.name: one.schema for one in self.parameters}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": [one.name for one in self.given],
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def again(self, rng: random.Random) -> Tool:
        """The same tool with other values of the same kinds; enums and records keep theirs."""
        fixed = ("enum", "record")
        parameters = [
            one
            if one.value.kind in fixed or one.default is not None
            else replace(one, value=draw(rng, one.value.kind))
            for one in self.parameters
        ]
        return replace(self, parameters=tuple(parameters))


def invent(
    rng: random.Random,
    kinds: Sequence[str] | None = None,
    taken: Sequence[str] = (),
    naming: Naming | None = None,
) -> Tool:
    """A tool with parameters of these kinds, by default of up to four that are drawn; `taken` names are avoided."""
    name = ""
    while not name or name in taken or name.lower() in HELD_OUT:
        name = naming(word(rng), word(rng)) if naming else identifier(rng)
    if kinds is None:
        count = rng.choices((0, 1, 2, 3, 4), (2, 50, 30, 13, 5))[0]
        kinds = [draw(rng).kind for _ in range(count)]
    parameters: list[Parameter] = []
    for kind in kinds:
        parameters.append(_parameter(rng, kind, [one.name for one in parameters]))
    if len(parameters) > 1 and rng.random() < 0.08:
        last = parameters[-1]
        if last.value.kind in ("integer", "word", "enum", "boolean", "number"):
            parameters[-1] = replace(last, default=last.value.json)
    if rng.random() < 0.15:
        rng.shuffle(parameters)
    about, description = _description(rng, name)
    return Tool(name, description, about, tuple(parameters))


def _parameter(rng: random.Random, kind: str, taken: Sequence[str]) -> Parameter:
    _, _, names, descriptions = KINDS[kind]
    while True:
        form = rng.random()
        name = (
            rng.choice(names)
            if form < 0.6
            else word(rng)
            if form < 0.9
            else f"{word(rng)}_{rng.choice(names)}"
        )
        if name not in taken:
            break
    form = rng.random()
    said = (
        "" if form < 0.3 else rng.choice(descriptions) if form < 0.7 else _random_words(rng, 1, 4)
    )
    return Parameter(name, draw(rng, kind), said)


def _description(rng: random.Random, name: str) -> tuple[tuple[str, ...], str]:
    """(the words that questions draw on, the description); in Chinese now and then, seldom empty."""
    if rng.random() < 0.1:
        parts = tuple(chinese(rng) for _ in range(rng.randint(1, 3)))
        return parts, rng.choice(("查询{}。", "计算{}。", "返回{}。", "{}")).format(
            "的".join(parts)
        )
    about = [word(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.6:
        about.insert(rng.randrange(len(about) + 1), words_in(name)[-1])
    text = " ".join(about)
    opening = (
        "{}",
        "{}",
        "The {}",
        "Look up the {}",
        "Return the {}",
        "How many {}",
        "Compute the {}",
        "Tell the {}",
    )
    text = rng.choice(opening).format(text)
    if rng.random() < 0.12:
        text += rng.choice((" of a ", " for the ", " by ", " in ")) + word(rng)
    if rng.random() < 0.07:
        return tuple(words_in(name)), ""
    return tuple(about), text[0].upper() + text[1:] + rng.choice((".", ".", ""))


def _random_words(rng: random.Random, low: int, high: int) -> str:
    text = " ".join(word(rng) for _ in range(rng.randint(low, high)))
    return text[0].upper() + text[1:] + "."
