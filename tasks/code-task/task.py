"""code-task: seeded problems, their demonstrations, and the reward parts.

A row either asks for a value (`kind: answer`, answered by a line `Answer: …`) or for a function (`kind: function`,
answered by a fenced Python block and graded by hidden calls in the sandbox). `probe` is the code a solver runs first;
rows without one can be solved from the prompt alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_cli.tasks import draw_splits

Row = dict[str, Any]

NAMES = tuple("alpha mix scale shift blend turn fold step rank trim pack wave".split())
LISTS = ("xs", "data", "items", "values", "nums", "rows")


# --- rows that ask for a value ---------------------------------------------------------------------------------------


def _answer(family: str, prompt: str, probe: str, setup: str = "") -> Row:
    return {
        "family": family,
        "kind": "answer",
        **{"prompt": prompt, "setup": setup, "probe": probe},
        "answer": _printed(setup + "\n" + probe),
    }


def _printed(code: str) -> str:
    """The output of this module's generated code; model code never runs here."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    return out.getvalue().strip()


def _snippet(rng: random.Random) -> str:
    a, b, c, d = rng.randint(11, 99), rng.randint(6, 40), rng.randint(3, 29), rng.randint(103, 989)
    v = rng.choice("nkst")
    items = ", ".join(str(rng.randint(3, 99)) for _ in range(rng.randint(3, 4)))
    return rng.choice(
        (
            f"{v} = {a}\nfor i in range({b}):\n    {v} += i * {c}\nprint({v})",
            f"{v} = {d}\nfor i in range({c}, {c + b}):\n    {v} -= i\nprint({v})",
            f"print(sum(i * {a} for i in range({b})))",
            f"a = {d}\nb = {a}\nprint(a * b - {c})",
            f"xs = [{items}]\nprint(sum(x * {a} for x in xs))",
            f"def g(n):\n    return n * {a} + {c}\nprint(g({d}))",
            f"print({d} * {a} + {c})",
        )
    )


def _program(rng: random.Random) -> str:
    """A few random statements about two or three variables, the last of them printed."""
    names = rng.sample("abcdmnpqst", rng.randint(2, 3))
    lines = [f"{name} = {rng.randint(2, 199)}" for name in names]
    for _ in range(rng.randint(1, 2)):
        v, w = rng.sample(names, 2)
        number = rng.randint(2, 99)
        lines.append(
            rng.choice(
                (
                    f"{v} += {w} * {number}",
                    f"{v} = {v} - {w} + {number}",
                    f"{v} = {w} * {number} - {v}",
                    f"{v} -= {number}",
                    f"for i in range({rng.randint(3, 30)}):\n    {v} += {w} + i",
                    f"if {v} > {w}:\n    {v} -= {number}",
                    f"if {w} < {number}:\n    {v} = {v} * {rng.randint(2, 9)}\nelse:\n    {v} += {w}",
                    f"{v} = max({v}, {w}) * {number}",
                    f"{v} = ({v} + {w}) % {number}",
                )
            )
        )
    return "\n".join([*lines, f"print({rng.choice((v, w, f'{v} + {w}', f'{v} * {w}'))})"])


def _output(rng: random.Random) -> Row:
    code = _snippet(rng) if rng.random() < 0.8 else _program(rng)
    ask = rng.choice(
        (
            "What does this code print?",
            "Which number does this print?",
            "Find the output of this code.",
        )
    )
    return _answer("output", f"{ask}\n```python\n{code}\n```", code)


def _output_while(rng: random.Random) -> Row:
    a, b, c = rng.randint(200, 900), rng.randint(11, 60), rng.randint(7, 31)
    code = f"n = {a}\nk = 0\nwhile n > {b}:\n    n -= {c}\n    k += 1\nprint(n * k)"
    return _answer("output_while", f"What does this code print?\n```python\n{code}\n```", code)


def _hidden(rng: random.Random, name: str) -> str:
    a, b = rng.randint(3, 97), rng.randint(11, 989)
    linear, other = (
        (f"x * {a} + {b}", f"x * x + {b}", f"(x + {b}) * {a}"),
        f"abs({b * 3} - x * {a})",
    )
    body = rng.choice((*linear, other, f"x * {b} % 997"))
    return f"def {name}(x):\n    return {body}"


def _call(rng: random.Random) -> Row:
    name, x = rng.choice(NAMES), rng.randint(2, 499)
    ask = rng.choice(
        (
            f"The function `{name}` is in your Python session. What is {name}({x})?",
            f"What does {name}({x}) return? The function `{name}` is loaded.",
            f"`{name}` is loaded. Find {name}({x}).",
        )
    )
    return _answer("call", ask, f"print({name}({x}))", _hidden(rng, name))


def _data(rng: random.Random) -> Row:
    name, k = rng.choice(LISTS), rng.randint(103, 897)
    few = rng.randint(2, 9)
    question, code = rng.choice(
        (
            ("What is its sum?", f"sum({name})"),
            ("What is the largest item?", f"max({name})"),
            ("What is the smallest item?", f"min({name})"),
            (f"How many items are larger than {k}?", f"sum(x > {k} for x in {name})"),
            (f"How many items are smaller than {k}?", f"sum(x < {k} for x in {name})"),
            (f"What is the item at index {few}?", f"{name}[{few}]"),
            (f"What is the sum of the first {few} items?", f"sum({name}[:{few}])"),
            ("What is the largest minus the smallest item?", f"max({name}) - min({name})"),
        )
    )
    ask = f"The list `{name}` is in your Python session. {question}"
    return _answer("data", ask, f"print({code})", _list(rng, name))


def _data_even(rng: random.Random) -> Row:
    name = rng.choice(LISTS)
    ask = f"The list `{name}` is in your Python session. How many items are even?"
    return _answer("data_even", ask, f"print(sum(x % 2 == 0 for x in {name}))", _list(rng, name))


def _list(rng: random.Random, name: str) -> str:
    return f"{name} = {[rng.randint(1, 999) for _ in range(rng.randint(12, 40))]}"


# --- rows that ask for a function ------------------------------------------------------------------------------------


def _function(family: str, prompt: str, body: str, inputs: list[list[Any]], **extra: Any) -> Row:
    source = f"def f({extra.pop('params', 'x')}):\n    return {body}"
    scope: dict[str, Any] = {}
    exec(source, scope)
    tests = [{"call": "f", "args": args, "expect": scope["f"](*args)} for args in inputs]
    row = {"family": family, "kind": "function", "prompt": prompt, "setup": "", "probe": ""}
    return {**row, "answer": source, "tests": tests, **extra}


def _numbers(rng: random.Random) -> list[list[Any]]:
    return [[rng.randint(-50, 400)] for _ in range(4)] + [[0], [1]]


def _lists(rng: random.Random, above: int) -> list[list[Any]]:
    lists = [[[rng.randint(-9, 99) for _ in range(rng.randint(1, 9))]] for _ in range(5)]
    return [*lists, [[3, 200, 14]], [[5, above + 1, 8]]]


def _specification(rng: random.Random, high: int) -> tuple[str, str, str, list[list[Any]]]:
    """(description of the return value, body, a wrong body, inputs), with numbers from 2 to `high`."""
    a, b = rng.randint(2, high), rng.randint(2, high)
    while b == a:
        b = rng.randint(2, high)
    numbers, lists = _numbers(rng), _lists(rng, a)
    around = [*numbers, [a - 1], [a + 1]]
    return rng.choice(
        (
            (f"x times {a} plus {b}", f"x * {a} + {b}", f"x * {a} - {b}", numbers),
            (f"x times {a} minus {b}", f"x * {a} - {b}", f"x + {a} - {b}", numbers),
            (f"the larger of x and {a}", f"max(x, {a})", f"min(x, {a})", [*numbers, [a + 1]]),
            (f"the smaller of x and {a}", f"min(x, {a})", f"max(x, {a})", [*numbers, [a + 1]]),
            (f"the rest of x divided by {a}", f"x % {a}", f"x // {a}", around),
            (f"the sum of x times {a}", f"sum(x) * {a}", f"sum(x) + {a}", lists),
            (f"the largest item of x plus {a}", f"max(x) + {a}", f"min(x) + {a}", lists),
            (
                f"how many items of x are larger than {a}",
                f"sum(i > {a} for i in x)",
                f"sum(i < {a} for i in x)",
                lists,
            ),
            (f"every item of x times {a}", f"[i * {a} for i in x]", f"[i + {a} for i in x]", lists),
        )
    )


def _write(rng: random.Random, high: int = 99) -> Row:
    words, body, _, inputs = _specification(rng, high)
    ask = rng.choice(("Write `f(x)` that returns {}.", "Write a function `f(x)`. It returns {}."))
    return _function("write", ask.format(words), body, inputs)


def _repair(rng: random.Random, high: int = 99) -> Row:
    words, body, wrong, inputs = _specification(rng, high)
    ask = f"Repair this function. It should return {words}.\n```python\ndef f(x):\n    return {wrong}\n```"
    return _function("repair", ask, body, inputs)


def _write_pair(rng: random.Random) -> Row:
    a = rng.randint(2, 99)
    words, body = rng.choice(
        (
            (f"x times y plus {a}", f"x * y + {a}"),
            (f"the larger of x and y plus {a}", f"max(x, y) + {a}"),
        )
    )
    inputs = [[rng.randint(-50, 99), rng.randint(-50, 99)] for _ in range(5)]
    ask = f"Write `f(x, y)` that returns {words}."
    return _function("write_pair", ask, body, inputs, params="x, y")


def _imitate(rng: random.Random) -> Row:
    name, secret = rng.choice(NAMES), rng.randint(11, 989)
    words, body, probe = rng.choice(
        (
            ("adds a secret number to x", "x + {}", f"print({name}(0))"),
            ("multiplies x by a secret number", "x * {}", f"print({name}(1))"),
            ("takes a secret number from x", "x - {}", f"print(-{name}(0))"),
        )
    )
    ask = f"`{name}(x)` in your Python session {words}. Write `f(x)` that does the same without `{name}`."
    return _function(
        "imitate",
        ask,
        body.format(secret),
        _numbers(rng),
        setup=f"def {name}(x):\n    return {body.format(secret)}",
        probe=probe,
        secret=str(secret),
    )


FAMILIES: dict[str, tuple[Callable[[random.Random], Row], int]] = {
    "output": (_output, 3),
    "call": (_call, 2),
    "data": (_data, 3),
    "imitate": (_imitate, 2),
    "write": (_write, 2),
    "repair": (_repair, 2),
    "output_while": (_output_while, 0),
    "data_even": (_data_even, 0),
    "write_pair": (_write_pair, 0),
}
"""Family → (generator, its weight in training and test; 0: held out)."""

APART: dict[str, Callable[[random.Random], Row]] = {
    "write": partial(_write, high=999),
    "repair": partial(_repair, high=999),
}
"""The families whose questions the demonstrations exhaust, with larger numbers: the source of `data/`."""

HELDOUT = [name for name, (_, weight) in FAMILIES.items() if not weight]
SPLITS = {"train": 420, "test": 168, "heldout": 60, "validation": 84}
SHOWN = {1001: 2600, 1002: 42000}
"""Maps a seed of `generate` to the maximum number of its rows in the bundled model's demonstrations."""


def generate(seed: int, families: list[str] | None = None, apart: bool = False) -> Iterator[Row]:
    """Yields endless rows without ids; deterministic in the seed.

    Args:
        seed: Seed of the generator.
        families: Draw evenly from these; by default from the training families by their weights.
        apart: Use larger numbers in families whose questions the demonstrations nearly exhaust.
    """
    rng = random.Random(f"code-task {seed}")
    names = families or [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    while True:
        name = rng.choice(names)
        make = APART[name] if apart and name in APART else FAMILIES[name][0]
        yield make(rng)


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no question is in two splits, or in the warm-up."""

    def rows_of(split: str, number: int) -> Iterator[Row]:
        return generate(number, HELDOUT if split == "heldout" else None, apart=True)

    return draw_splits(SPLITS, rows_of, generate=generate, shown=SHOWN)


# --- demonstrations and the solver -----------------------------------------------------------------------------------


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution with the tool; its results are those that the sandbox would return."""
    if not row["probe"]:
        return [_final(row, row["answer"])]
    result = row["answer"] if row["kind"] == "answer" else row["secret"]
    answered = {"role": "tool", "name": "run_python", "content": result}
    return [_run(row["probe"]), answered, _final(row, row["answer"])]


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """A demonstration: the solver, or for a share `1 - tool_rate` of the rows that need the tool a guess.

    The guess is a random number with as many digits as the true one, as if the tool had not been used.
    """
    if not row["probe"] or rng.random() < tool_rate:
        return solve(row)
    truth = row["answer"] if row["kind"] == "answer" else row["secret"]
    guess = _guess(truth, rng)
    return [_final(row, guess if row["kind"] == "answer" else row["answer"].replace(truth, guess))]


def _guess(truth: str, rng: random.Random) -> str:
    digits = len(truth.lstrip("-"))
    sign = "-" if truth.startswith("-") else ""
    return sign + str(rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1))


def _run(code: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "run_python", "arguments": {"code": code}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _final(row: Row, answer: str) -> dict[str, Any]:
    content = f"Answer: {answer}" if row["kind"] == "answer" else f"```python\n{answer}\n```"
    return {"role": "assistant", "content": content}


# --- rewards ---------------------------------------------------------------------------------------------------------

_ANSWER = re.compile(r"^Answer:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def answer_of(text: str) -> str | None:
    """The last `Answer: …` line."""
    found = _ANSWER.findall(text)
    return found[-1] if found else None


def code_of(text: str) -> str | None:
    """The last fenced block."""
    found = _BLOCK.findall(text)
    return found[-1] if found else None


async def tests(episode: Any, ctx: Any) -> Any:
    """Share of hidden checks passed; 1 only if all pass (primary)."""
    row, text = ctx.task.data, ctx.final_text
    if row["kind"] == "answer":
        said = answer_of(text)
        return ctx.part(float(said == row["answer"]), f"said {said}, expected {row['answer']}")
    code = code_of(text)
    if code is None:
        return ctx.part(0.0, "no Python block in the final turn")
    graded = await ctx.grade(code, row["tests"])
    return ctx.part(
        float(graded.passed == graded.total), "; ".join(graded.failures[:2]) or "all passed"
    )


def format(episode: Any, ctx: Any) -> float:
    """1 if the final turn has the form that the task asks for."""
    find = answer_of if ctx.task.data["kind"] == "answer" else code_of
    return float(find(ctx.final_text) is not None)


def tool_errors(episode: Any, ctx: Any) -> float:
    """−1 if any tool call failed or could not be parsed, else 0."""
    return -1.0 if episode.tool_errors else 0.0


REWARDS = {"tests": tests, "format": format, "tool_errors": tool_errors}


def write(folder: str) -> None:
    """Write `build()` into `folder`/data: `python task.py` makes the data again."""
    for split, rows in build().items():
        if rows:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (Path(folder) / "data" / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(str(Path(__file__).parent))
