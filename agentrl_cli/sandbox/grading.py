"""Split grading: the solution runs in one box and receives calls; the expected values never enter that box.

A test is `{"call": "f", "args": [...], "kwargs": {...}, "expect": value}` with optional `"close": 1e-6` (tolerance of
floats) and `"raises": "ValueError"` instead of `expect`; or `{"stdin": text, "stdout": text}` for a program. Values are
plain ones; tuples, sets, bytes… of Python are compared type for type, and in JSON rows are written `{"$tuple": [...]}`.

`{"call": ..., "check": "def check(answer, *args): ..."}` judges by code of the pack: it runs in a third box, which gets
the answer as a plain value and never holds text of the model.

A test that is a text, or `{"code": text}`, is executed beside the solution, which can forge its result: the grade is
then marked `fakeable`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.config.models import LimitsConfig
from agentrl_cli.errors import DataError
from agentrl_cli.sandbox.channel import guest_module
from agentrl_cli.sandbox.results import ExecResult, GradeResult, Status
from agentrl_cli.sandbox.session import Answer, Session

KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("call", "raises", "check", "stdin", "stdout", "code"), str),
    **{"args": list | tuple, "kwargs": Mapping, "close": int | float},
}
"""Types of the values in a test."""
COMPARED_KB = 8 * 1024
"""At most so many KiB of a program's output are kept for comparison."""


async def grade(
    session: Session,
    solution: str,
    tests: Sequence[Any],
    *,
    setup: str = "",
    wall: float | None = None,
    budget: float | None = None,
) -> GradeResult:
    """Runs `setup`, then `solution`, then every test, in a fresh box with the limits and imports of `session`.

    Each program starts without the files of the others. `wall`: seconds of one test, as is the CPU limit. `budget`:
    seconds of all tests of a kind (calls, programs, code) together, by default three times `wall`, or half of the
    tests' maximum if that is more; a test without time left fails for that reason. Raises DataError for an invalid
    test and for a `setup` or a check that does not load, SandboxFault if the sandbox failed twice.
    """
    checked = [_check(test, number) for number, test in enumerate(tests, 1)]
    limits = session.limits
    own = {
        **limits.model_dump(),
        "wall": wall or limits.wall,
        "output_kb": _output_kb(limits, checked),
    }
    fresh = await session.sandbox.session(imports=session.imports, seed=0, grading=True, **own)
    try:
        return await _grade(
            fresh, solution, checked, setup, budget or own["wall"] * max(3, len(tests) / 2)
        )
    finally:
        await fresh.close()


def _output_kb(limits: LimitsConfig, tests: list[Mapping[str, Any]]) -> int:
    """Return the KiB of output to compare: enough for the longest expected one, spaces at line ends included."""
    longest = max(
        (len(test["stdout"].encode("utf-8", "replace")) for test in tests if "stdin" in test),
        default=0,
    )
    return max(limits.output_kb, min(COMPARED_KB, (2 * longest >> 10) + limits.output_kb))


def _check(test: Any, number: int) -> Mapping[str, Any]:
    """Return a test in its long form."""
    if isinstance(test, str):
        return {"code": test}
    if isinstance(test, Mapping) and all(
        isinstance(test[key], KINDS[key]) for key in test.keys() & KINDS
    ):
        if "call" in test and test.keys() & {"expect", "raises", "check"}:
            return test
        if "code" in test or {"stdin", "stdout"} <= test.keys():
            return test
    raise DataError(
        f"Test {number} is not a test: {test!r:.200}",
        hint='A test is {"call": name, "args": [...], "kwargs": {...}, "expect": value}, '
        '{"stdin": text, "stdout": text} or {"code": text}.',
    )


async def _grade(
    session: Session, solution: str, tests: list[Mapping[str, Any]], setup: str, budget: float
) -> GradeResult:
    failures: dict[int, str] = {}
    status, seconds = Status.OK, 0.0
    programs = [number for number, test in enumerate(tests) if "stdin" in test]
    if programs:
        if setup:
            # Alone and before the solution, which could break it: a failure here is not the model's.
            _require_loaded(
                "setup", await session.run(setup, tests[programs[0]]["stdin"], reset=True)
            )
        program = f"{setup}\n{solution}" if setup else solution
        failures, seconds = await _run_each(session, tests, programs, budget, program)
    rest = [number for number in range(len(tests)) if number not in programs]
    if rest:
        if setup:
            seconds += _require_loaded("setup", await session.cell(setup)).seconds
        loaded = await session.cell(solution)
        status, seconds = loaded.status, seconds + loaded.seconds
        if status is not Status.OK:
            last = loaded.text().splitlines()[-1]
            failures |= dict.fromkeys(rest, f"the solution does not load: {last}")
        else:
            calls = [number for number in rest if "call" in tests[number]]
            failures |= await _calls(session, tests, calls, budget)
            codes = [number for number in rest if "code" in tests[number]]
            failures |= (await _run_each(session, tests, codes, budget))[0]
    lines = tuple(f"test {number + 1}: {failures[number]}" for number in sorted(failures))
    fakeable = any("code" in test for test in tests)
    return GradeResult(
        len(tests) - len(failures), len(tests), lines, status, session.level, fakeable, seconds
    )


async def _run_each(
    session: Session,
    tests: list[Mapping[str, Any]],
    numbers: list[int],
    budget: float,
    program: str = "",
) -> tuple[dict[int, str], float]:
    """Runs tests that are programs or code one after the other; returns failures and seconds.

    A program runs in a folder without the files of the others. Code runs beside the solution, for values that cannot
    be passed as plain ones, and is marked as fakeable.
    """
    failures: dict[int, str] = {}
    left = budget
    for number in numbers:
        test, wall = tests[number], min(session.limits.wall, left)
        if left <= 0:
            failures[number] = _spent(budget)
            continue
        if "stdin" in test:
            result = await session.run(program, test["stdin"], wall=wall, reset=True)
        else:
            result, wall = await session.cell(test["code"]), session.limits.wall
        left -= result.seconds
        if result.status is Status.TIMEOUT and wall < session.limits.wall:
            failures[number] = _spent(budget)
        elif text := _explain_failure(test, result):
            failures[number] = text
    return failures, budget - left


def _spent(budget: float) -> str:
    return f"the {budget:g} s that all tests have together were over"


def _require_loaded(what: str, result: ExecResult) -> ExecResult:
    """Return the result of the pack's code, run before the model's. Raises DataError if it failed."""
    if not result.ok:
        raise DataError(f"The {what} does not load: {result.text()[-300:]}")
    return result


def _explain_failure(test: Mapping[str, Any], result: ExecResult) -> str:
    """Return why a program or code failed, empty if it passed; lines are compared without trailing spaces."""
    if not result.ok:
        return f"{result.status}: {result.text().splitlines()[-1]}"
    if "stdin" not in test:
        return ""
    lines = [
        [line.rstrip() for line in text.rstrip().splitlines()]
        for text in (result.stdout, test["stdout"])
    ]
    if lines[0] != lines[1] and result.truncated:
        return f"printed more than the {result.limits.output_kb} KiB of output that are compared"
    return (
        ""
        if lines[0] == lines[1]
        else f"printed {result.stdout!r:.200}, expected {test['stdout']!r:.200}"
    )


async def _calls(
    session: Session, tests: list[Mapping[str, Any]], numbers: list[int], budget: float
) -> dict[int, str]:
    """Sends the calls in random order and compares the answers in this process, which never runs model text."""
    if not numbers:
        return {}
    # In another order each time, so that a solution cannot tell from its number which test a call is.
    order = random.sample(numbers, len(numbers))
    calls = [
        [
            tests[n]["call"],
            _to_tags(tests[n].get("args", [])),
            _to_tags(dict(tests[n].get("kwargs", {}))),
        ]
        for n in order
    ]
    answers, data = await session.calls(calls, budget=budget)
    failures: dict[int, str] = {}
    to_check: dict[int, Any] = {}
    at = 0
    for number, answer in zip(order, answers, strict=True):
        body, at = data[at : at + answer.size], at + answer.size
        value, wrong = _value(tests[number], answer, body)
        if (answer.status, answer.detail) == ("timeout", "budget"):
            wrong = _spent(budget)
        if not wrong and "check" in tests[number]:
            to_check[number] = value
        elif wrong or (wrong := _wrong(tests[number], value)):
            failures[number] = f"{_describe(tests[number])} {wrong}"
    return failures | await _checks(session, tests, to_check)


def _describe(test: Mapping[str, Any]) -> str:
    return f"{test['call']}({', '.join(map(repr, test.get('args', [])))})"[:200]


def _value(test: Mapping[str, Any], answer: Answer, body: bytes) -> tuple[Any, str]:
    """Return the tagged value that a call returned, and why it cannot be right (empty if it can)."""
    values = guest_module("protocol/values")
    if "raises" in test:
        raised = answer.error.partition(":")[0]
        right = answer.status != "ok" and raised == test["raises"]
        return None, "" if right else f"raised {raised or 'nothing'}, expected {test['raises']}"
    if answer.status != "ok":
        return None, f"gave {answer.status} {answer.error or answer.detail}".rstrip()
    try:
        return values.loads(body), ""
    except values.NotPlain as problem:
        return None, f"answered something other than a plain value: {problem}"


def _wrong(test: Mapping[str, Any], value: Any) -> str:
    """Return why a value is not the expected one; empty if it is."""
    if "raises" in test:
        return ""
    if guest_module("protocol/values").same(
        value, _to_tags(test["expect"]), float(test.get("close", 0.0))
    ):
        return ""
    return f"answered {json.dumps(value):.200}, expected {test['expect']!r:.200}"


async def _checks(
    session: Session, tests: list[Mapping[str, Any]], values: dict[int, Any]
) -> dict[int, str]:
    """Return the pack's own code judges answers, in a box apart from the solution and from this process.

    An answer on which the check fails is wrong: otherwise a model could choose to stay unscored.
    """
    if not values:
        return {}
    failures: dict[int, str] = {}
    judge = await session.sandbox.session(
        imports=session.imports, seed=0, **session.limits.model_dump()
    )
    try:
        for check, number in {
            tests[number]["check"]: number for number in reversed(values)
        }.items():
            _require_loaded(f"check of test {number + 1}", await judge.cell(check))
        for number, value in values.items():
            if wrong := await _judge(judge, tests[number], value):
                failures[number] = (
                    f"{_describe(tests[number])} answered {json.dumps(value):.200}, {wrong}"
                )
    finally:
        await judge.close()
    return failures


async def _judge(judge: Session, test: Mapping[str, Any], value: Any) -> str:
    """Return why the check does not accept an answer; empty if it does."""
    if _holds_object(value):
        return "which is not a plain value"
    loaded = await judge.cell(test["check"])
    if not loaded.ok:
        return f"after which the check does not load: {loaded.status}"
    arguments = [value, *map(_to_tags, test.get("args", []))]
    (answer,), body = await judge.calls([["check", arguments, {}]])
    if answer.status != "ok":
        return f"on which the check failed: {answer.error or f'{answer.status} {answer.detail}'.rstrip()}"
    return "" if body == b"true" else "which the check refuses"


def _holds_object(tagged: Any) -> bool:
    """Whether a tagged value holds an `$object`. It is not decoded here: colliding keys would take unbounded time."""
    left = [tagged]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            if "$object" in item:
                return True
            left += item.values()
        elif isinstance(item, list):
            left += item
    return False


def _to_tags(value: Any) -> Any:
    """Return the tagged form of a test's value: Python's own types are encoded, tags written in a row stay."""
    values = guest_module("protocol/values")
    tagged = values.decode(json.loads(json.dumps(value))) if _written_as_json(value) else value
    return values.encode(tagged)


def _written_as_json(value: Any) -> bool:
    """Whether a value came from a JSON row with tags in it."""
    if isinstance(value, dict):
        return any(
            str(key).startswith("$") or _written_as_json(item) for key, item in value.items()
        )
    return isinstance(value, list) and any(_written_as_json(item) for item in value)
