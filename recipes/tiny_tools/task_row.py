"""A task's row from its tools, question and turns."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from .phrasing import system
from .rows import Message, Row, prompt
from .schemas import Tool, invent
from .values import draw
from .words import chinese, word

CHINESE = 0.22
"""Share of prompts in Chinese."""


def more_kinds(rng: random.Random, chance: float = 0.35) -> list[str]:
    """Return the kind of one further value, or none."""
    return [draw(rng).kind] if rng.random() < chance else []


def dump_json(value: dict[str, Any], rng: random.Random) -> str:
    """Return a value as a model would write it."""
    return json.dumps(value, ensure_ascii=False, indent=1 if rng.random() < 0.2 else None)


def make_row(
    rng: random.Random,
    family: str,
    tools: Sequence[Tool],
    zh: bool,
    question: str,
    turns: Sequence[Message],
    *,
    alone: bool = False,
) -> Row:
    """Return a row, with up to four other tools beside those that it needs; `alone` adds none."""
    extra = 0 if alone else rng.choices((0, 1, 2, 3, 4), (50, 22, 14, 9, 5))[0]
    names = [one.name for one in tools]
    found = list(tools)
    for _ in range(max(0, min(extra, 5 - len(tools)))):
        found.append(invent(rng, None, names))
        names.append(found[-1].name)
    rng.shuffle(found)
    if rng.random() < 0.06:
        question = (
            f"{chinese(rng)}。{question}"
            if zh
            else f"{word(rng).capitalize()} {word(rng)}. {question}"
        )
    messages = [*prompt(system(rng, zh), question), *turns]
    return Row(family, tuple(one.schema for one in found), tuple(messages))
