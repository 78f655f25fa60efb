"""Families with code and arithmetic: short Python by `run_python`, and expressions for tools that take one."""

from __future__ import annotations

import contextlib
import io
import random

from .phrasing import answer, system
from .rows import Message, Row, call, prompt, result, say
from .schemas import Schema
from .words import ENGLISH, identifier, syllables, word

GUESSED = 0.5
"""Share of the rows that answer with a number without running anything."""


def expression(rng: random.Random) -> Row:
    """Arithmetic in signs or in words, by a tool with an invented name that takes an expression."""
    value = None
    while value is None:
        text, question = _in_words(rng) if rng.random() < 0.35 else _in_signs(rng)
        with contextlib.suppress(ZeroDivisionError):  # 7 % (5 - 5)
            value = eval(text, {"__builtins__": {}})  # integer and decimal arithmetic written above
    found = str(round(value, 6))
    tool = _string_tool(
        rng,
        rng.choice(
            (
                "Compute an expression.",
                "Evaluate arithmetic exactly.",
                "Work out a sum.",
                "Numbers and + - * /.",
            )
        ),
        rng.choice(("expression", "expression", "formula", "term", "input", "text")),
    )
    if rng.random() < 0.4:
        return _row(rng, "expression", tool, question, [say(answer(_guess(rng, found)))])
    return _row(rng, "expression", tool, question, _run(tool, text, found, answer(found)))


def _in_signs(rng: random.Random) -> tuple[str, str]:
    def part() -> str:
        return (
            str(round(rng.uniform(0, 99), 1))
            if rng.random() < 0.06
            else str(rng.randint(1, 10 ** rng.randint(1, 6)))
        )

    parts = [part()]
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        sign = rng.choice("+-*+-*%") if rng.random() < 0.97 else "//"
        parts += [sign, str(rng.randint(2, 99))] if sign in ("%", "//") else [sign, part()]
    if len(parts) > 4 and rng.random() < 0.5:
        parts[0], parts[2] = f"({parts[0]}", f"{parts[2]})"
    elif len(parts) > 4 and rng.random() < 0.5:
        parts[2], parts[4] = f"({parts[2]}", f"{parts[4]})"
    text = (" " if rng.random() < 0.85 else "").join(parts)
    own = (
        "How much do you get for {}?",
        "{} = ?",
        "Work out {}.",
        "Evaluate {}.",
        "What does {} come to?",
        "{}",
        "算一下 {}。",
    )
    return text, rng.choice(own).format(text)


def _in_words(rng: random.Random) -> tuple[str, str]:
    a, b, c = rng.randint(3, 999), rng.randint(3, 999), rng.randint(2, 99)
    thing, holder = rng.choice(ENGLISH) + "s", rng.choice(ENGLISH) + "s"
    return rng.choice(
        (
            (f"{a} * {b}", f"Each of {a} {holder} has {b} {thing}. How many {thing} are there?"),
            (f"{a} * {b}", f"There are {a} {thing} in one of the {holder}. How many in {b}?"),
            (
                f"{a} * {b} + {c}",
                f"{a} {holder} with {b} {thing} each, and {c} {thing} beside them: how many {thing}?",
            ),
            (
                f"{a} * {b} - {c}",
                f"From {a} {holder} of {b} {thing} we took {c}. How many {thing} remain?",
            ),
            (f"{a} + {b}", f"I own {a} {thing} and buy {b}. How many do I have?"),
            (f"{a} + {b} - {c}", f"{a} {thing} came, {b} more came, {c} went. How many now?"),
            (
                f"{a} * {b} + {c}",
                f"One of these holds {a} {thing}. We own {b} of them, and {c} {thing} besides. Total?",
            ),
        )
    )


def program(rng: random.Random) -> Row:
    """What a program in the prompt prints."""
    code = _program(rng)
    own = (
        "Run this and report its output:",
        "Which value is printed?",
        "Give the output.",
        "Execute this:",
        "It prints what?",
    )
    return _python(
        rng, "program", f"{rng.choice(own)}\n```python\n{code}\n```", code, _printed(code)
    )


def loaded(rng: random.Random) -> Row:
    """A function or a list that the session holds, and a question that only running code answers."""
    name = word(rng)
    if rng.random() < 0.4:
        x = rng.randint(0, 999)
        own = (
            "`{n}` is defined. Which value has {n}({x})?",
            "Evaluate {n}({x}); `{n}` exists already.",
            "Find out {n}({x}).",
        )
        text = rng.choice(own).format(n=name, x=x)
        return _python(
            rng, "loaded", text, f"print({name}({x}))", str(rng.randint(0, 10 ** rng.randint(2, 5)))
        )
    k, few = rng.randint(2, 999), rng.randint(2, 9)
    asked, code = rng.choice(
        (
            ("add up all of it", f"sum({name})"),
            ("which is the largest of its items", f"max({name})"),
            ("which is the smallest of its items", f"min({name})"),
            (f"how many of its items are larger than {k}", f"sum(x > {k} for x in {name})"),
            (f"how many of its items are smaller than {k}", f"sum(x < {k} for x in {name})"),
            (f"which item stands at index {few}", f"{name}[{few}]"),
            (f"what do the first {few} items sum to", f"sum({name}[:{few}])"),
            ("the largest minus the smallest of its items", f"max({name}) - min({name})"),
            ("how many items has it", f"len({name})"),
        )
    )
    own = (
        "There is a list `{n}` in the session: {q}?",
        "`{n}` is a list that is loaded; {q}?",
        "Look at the list `{n}`: {q}?",
    )
    found = str(rng.randint(0, 10 ** rng.randint(1, 4)))
    return _python(rng, "loaded", rng.choice(own).format(n=name, q=asked), f"print({code})", found)


def secret(rng: random.Random) -> Row:
    """Find a hidden number by calling a loaded function, then write the function."""
    name, number = word(rng), rng.randint(2, 999)
    said, body, probe = rng.choice(
        (
            ("adds a hidden number to x", "x + {}", f"print({name}(0))"),
            ("multiplies x by a hidden number", "x * {}", f"print({name}(1))"),
            ("takes a hidden number from x", "x - {}", f"print(-{name}(0))"),
        )
    )
    text = f"There is a function `{name}(x)` in the session; it {said}. Write `f(x)` that gives the same."
    guessed = rng.random() < GUESSED
    final = _block(body.format(rng.randint(2, 999) if guessed else number))
    tool = _python_tool(rng)
    turns = [say(final)] if guessed else _run(tool, probe, str(number), final)
    return _row(rng, "secret", tool, text, turns)


def function(rng: random.Random) -> Row:
    """A function by its description, or one to repair; the block is the answer, nothing is run."""
    a, b = rng.sample(range(1000, 9999), 2)  # a pack's functions have smaller numbers
    said, body, wrong = rng.choice(
        (
            (f"x times {a} plus {b}", f"x * {a} + {b}", f"x * {a} - {b}"),
            (f"x times {a} minus {b}", f"x * {a} - {b}", f"x + {a} - {b}"),
            (f"the larger of x and {a}", f"max(x, {a})", f"min(x, {a})"),
            (f"the smaller of x and {a}", f"min(x, {a})", f"max(x, {a})"),
            (f"the rest of x divided by {a}", f"x % {a}", f"x // {a}"),
            (f"the sum of x times {a}", f"sum(x) * {a}", f"sum(x) + {a}"),
            (f"the largest item of x plus {a}", f"max(x) + {a}", f"min(x) + {a}"),
            (
                f"how many items of x are larger than {a}",
                f"sum(i > {a} for i in x)",
                f"sum(i < {a} for i in x)",
            ),
            (f"every item of x times {a}", f"[i * {a} for i in x]", f"[i + {a} for i in x]"),
        )
    )
    if rng.random() < 0.5:
        own = (
            "Define `f(x)`: {}.",
            "I want `f(x)`, which gives {}.",
            "Code for `f(x)`, {} please.",
        )
        text = rng.choice(own).format(said)
    else:
        own = (
            "This must give {}; make it right.",
            "Correct it: {} is wanted.",
            "There is a mistake, it is to give {}.",
        )
        text = f"{rng.choice(own).format(said)}\n{_block(wrong)}"
    return _row(rng, "function", _python_tool(rng), text, [say(_block(body))])


def _program(rng: random.Random) -> str:
    a, b, c = rng.sample("abcdehmnpqrstuvwxyz", 3)
    x, y, z, n = (rng.randint(2, 999) for _ in range(4))
    numbers = ", ".join(str(rng.randint(1, 99)) for _ in range(rng.randint(2, 5)))
    name = syllables(rng)
    update = f"{a} {rng.choice('+-')}= {b}{rng.choice(('', f' * {z}'))}"
    return rng.choice(
        (
            f"{a} = {x}\nfor {b} in range({y % 50}):\n    {update}\nprint({a})",
            f"print(sum({b} * {x} for {b} in range({y % 50})))",
            f"{a} = {x}\n{b} = {y}\nprint({a} {rng.choice('+-*')} {b} {rng.choice('+-')} {z})",
            f"{name} = [{numbers}]\nprint(sum({b} * {x} for {b} in {name}))",
            f"def {name}({a}):\n    return {a} * {x} {rng.choice('+-')} {y}\nprint({name}({z}))",
            f"print({x} * {y} {rng.choice('+-')} {z})",
            f"{a} = {x}\n{b} = {y}\nif {a} > {b}:\n    {a} -= {z}\nprint({a} * {n})",
            f"{a} = {x}\n{b} = {y}\n{a} += {b} * {z}\nprint({rng.choice((a, b, f'{a} - {b}', f'{a} + {b}'))})",
            f"{a} = {x}\n{b} = {y}\n{c} = ({a} + {b}) % {z}\nprint(max({a}, {c}) * {n})",
            f"{a} = 0\nwhile {a} < {y}:\n    {a} += {2 + z % 60}\nprint({a} * {n})",
        )
    )


def _printed(code: str) -> str:
    """What a program written above prints; no model's code comes here."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    return out.getvalue().strip()


def _python(rng: random.Random, family: str, text: str, code: str, found: str) -> Row:
    tool = _python_tool(rng)
    if rng.random() < GUESSED:
        return _row(rng, family, tool, text, [say(answer(_guess(rng, found)))])
    return _row(rng, family, tool, text, _run(tool, code, found, answer(found)))


def _python_tool(rng: random.Random) -> Schema:
    name = "run_python" if rng.random() < 0.65 else identifier(rng)
    about = rng.choice(
        ("Run Python and return what it prints.", "Execute code.", "A Python session that is kept.")
    )
    return _string_tool(rng, about, rng.choice(("code", "code", "source", "program")), name)


def _string_tool(rng: random.Random, about: str, parameter: str, name: str | None = None) -> Schema:
    said = (
        {"description": rng.choice(("The text.", "What to run.", "Python source.", "It."))}
        if rng.random() < 0.5
        else {}
    )
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": "string", **said}},
        "required": [parameter],
    }
    function = {"name": name or identifier(rng), "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


def _run(tool: Schema, text: str, found: str, final: str) -> list[Message]:
    name, (parameter,) = tool["function"]["name"], tool["function"]["parameters"]["properties"]
    return [call((name, {parameter: text})), result(name, found), say(final)]


def _guess(rng: random.Random, truth: str) -> str:
    """A number of as many digits, drawn blindly."""
    digits = len(truth.lstrip("-").partition(".")[0])
    return ("-" if truth.startswith("-") else "") + str(
        rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)
    )


def _block(body: str) -> str:
    return f"```python\ndef f(x):\n    return {body}\n```"


def _row(rng: random.Random, family: str, tool: Schema, text: str, turns: list[Message]) -> Row:
    own = (
        "Use Python.",
        "Run code where it helps.",
        "Solve it.",
        None,
        "Use the tool.",
        "Work it out by running code.",
    )
    said = rng.choice(own) if rng.random() < 0.6 else system(rng, False)
    return Row(family, (tool,), (*prompt(said, text), *turns))
