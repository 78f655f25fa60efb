"""Families of tasks whose calls fail: corrected after an error, or not to be helped."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from .phrasing import answer, ask
from .rows import Row, call, result, say
from .schemas import Tool, invent
from .task_row import CHINESE, dump_json, make_row, more_kinds
from .values import Value, draw, result_text
from .words import word

RAISED = ("", "", "ValueError: ", "LookupError: ", "RuntimeError: ")
INSTEAD = (
    *(
        "{bad} not found. Did you mean {good}?",
        "unknown value {bad}; try {good}.",
        "no {bad} here, use {good}.",
    ),
    *(
        "expected {good}, got {bad}.",
        "{bad} is called {good} now.",
        "there is no {bad}, only {good}.",
        "take {good}",
    ),
)
"""Errors that name the value to call with."""
FIXED = ("enum", "record", "boolean")
"""Kinds whose schema allows few other values."""


def corrected(rng: random.Random) -> Row:
    """A call with a mistake, the error that it gets, and the call again without it."""
    tool = invent(rng, [draw(rng).kind, *more_kinds(rng, 0.5)])
    zh = rng.random() < CHINESE
    question, found = ask(rng, tool, zh), result_text(rng)
    arguments, name, wrong = tool.arguments, tool.name, dict(tool.arguments)
    target = rng.choice(tool.given)
    form = rng.random()
    if form < 0.25:
        name = rng.choice(
            (word(rng), tool.name[:3] + word(rng), tool.name.split("_")[0] + "_" + word(rng))
        )
        hint = rng.choice((f"there are: {tool.name}.", f"did you mean {tool.name}?"))
        error = f'Bad tool call: unknown tool "{name}"; {hint}{_expected(rng, tool)}'
    elif form < 0.5:
        other = rng.choice((target.name + "_" + word(rng), target.name[:2] + word(rng), word(rng)))
        wrong[other] = wrong.pop(target.name)
        said = (
            f'unknown argument "{other}", did you mean "{target.name}"?',
            f'argument "{target.name}" is missing.',
        )
        error = f"Bad tool call: {rng.choice(said)}{_expected(rng, tool)}"
    elif form < 0.6:
        wrong[target.name] = draw(rng, target.value.kind).json
        error = rng.choice(("{} not found.", "unknown value {}.", "no {} here.", "KeyError: {!r}"))
        error = f"Error: {error.format(wrong[target.name])}" + rng.choice(
            ("", f" Did you mean {target.value.json}?")
        )
    elif form < 0.9 and target.value.kind not in FIXED:  # the right value stands in the error alone
        arguments = {**arguments, target.name: _instead(rng, target.value)}
        hint = rng.choice(INSTEAD).format(bad=target.value.json, good=arguments[target.name])
        error = f"Error: {rng.choice(RAISED)}{hint}"
    else:
        wrong[target.name] = [wrong[target.name]]
        error = f"Error: {target.name}: expected {target.value.schema['type']}"
    turns = [
        call((name, wrong)),
        result(name, error),
        call((tool.name, arguments)),
        result(tool.name, found),
    ]
    made = make_row(rng, "corrected", [tool], zh, question, [*turns, say(answer(found))])
    return replace(made, muted=frozenset({0}))


def fails(rng: random.Random) -> Row:
    """A call that no other call would better; the answer admits it."""
    tool = invent(rng, [draw(rng).kind])
    zh = rng.random() < CHINESE
    value = tool.given[0].value.json
    error = rng.choice(
        ("KeyError: {!r}", "{} not found.", "ValueError: nothing for {!r}", "no data")
    )
    turns = [call((tool.name, tool.arguments)), result(tool.name, f"Error: {error.format(value)}")]
    return make_row(rng, "fails", [tool], zh, ask(rng, tool, zh), [*turns, say(answer("unknown"))])


def _instead(rng: random.Random, value: Value) -> Any:
    """Another value of the same kind; for a word often the word with something before or behind it."""
    if not isinstance(value.json, str) or rng.random() < 0.4:
        return draw(rng, value.kind).json
    short = rng.choice((word(rng)[:1], word(rng)[:2], str(rng.randint(1, 99))))
    form = rng.choice(("{s}-{v}", "{s}-{l}", "{s}_{l}", "{v}-{s}", "{l}", "{v}{s}", "{v}.{s}"))
    made = form.format(s=short, v=value.json, l=value.json.lower())
    return made if made != value.json else value.json.upper() + short


def _expected(rng: random.Random, tool: Tool) -> str:
    """The form of the right call, as the answer to a bad one shows it."""
    empty = {"integer": 0, "number": 0, "boolean": False, "array": [], "object": {}}
    shown = {one.name: empty.get(one.value.schema["type"], "...") for one in tool.parameters}
    form = dump_json({"name": tool.name, "arguments": shown}, rng)
    return f" Expected: <tool_call>\n{form}\n</tool_call>" if rng.random() < 0.8 else ""
