"""Tools: schemas from typed functions, to the byte; checked calls, limits, and the built-in ones, in a sandbox too."""

from __future__ import annotations

import asyncio
import ctypes
import enum
import json
import re
import shlex
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict

import pytest
from pydantic import Field

from agentrl_cli.commands.init.functions import tools_in
from agentrl_cli.errors import ConfigError, EnvError, NotFound, UsageError
from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.registry import load_file
from agentrl_cli.sandbox import Sandbox, Session
from agentrl_cli.tasks import load_packs
from agentrl_cli.tools import (
    TOOLS,
    FunctionTool,
    Tool,
    ToolContext,
    as_tool,
    tool,
    tool_schema,
    validate_arguments,
)
from agentrl_cli.tools.calculator import CalculatorError, compute, show
from agentrl_cli.tools.schema import type_schema
from agentrl_cli.tools.session import LINES, MAX_TEXT
from agentrl_cli.types import Task, ToolResult
from tests.helpers.cli import Cli
from tests.helpers.processes import run_code, soon
from tests.helpers.sandbox import open_sandbox

SANDBOXED = (
    "run_python",
    "bash",
    "files",
)  # their examples run in test_the_examples_work_in_their_order
CONFIGURED = ("search",)  # nothing to look in until configured: tests/tools/test_real_tools.py


def everything(text: str, count: int, mode: str = "fast") -> str:
    """Do everything
    at once.

    More that the model does not see.

    Args:
        text: The text, over
            two lines.
        count (int): How many.

    Returns:
        Nothing of use.
    """
    return f"{text}{count}{mode}"


def test_schema_from_hints_and_docstring() -> None:
    assert tool_schema(everything)["function"] == {
        "name": "everything",
        "description": "Do everything at once.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "The text, over two lines."},
                "count": {"type": "integer", "description": "How many."},
                "mode": {"type": "string"},
            },
            "required": ["text", "count"],
        },
    }


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(x: str) -> str:\n    return x", "no docstring"),
        ('def f(x) -> str:\n    """Do."""', "x has no type"),
        ('def f(x: "a number") -> str:\n    """Do."""', "f has a type that cannot be resolved"),
        (
            "from functools import partial\n"
            'def g(x: "a number") -> str:\n    """Do."""\nf = partial(g)',
            "has a type that cannot be resolved",
        ),
        # both became a tool that lacked parameters, silently
        ('def f(*values: float) -> float:\n    """Adds."""', r"cannot fill in \*values"),
        ('def f(name: str, **given: str) -> float:\n    """Adds."""', r"cannot fill in \*\*given"),
    ],
)
def test_schema_mistakes_say_what_to_do(tmp_path: Path, code: str, reason: str) -> None:
    half = 'def half(value: float) -> float:\n    """Half."""\n'
    (tmp_path / "tool.py").write_text(f"{code}\n\n{half}")
    module, notes = load_file(tmp_path / "tool.py"), list[str]()
    with pytest.raises(ConfigError, match=reason) as caught:
        as_tool(module.f)
    if "fill" in reason:
        assert "values: list[float]" in caught.value.hint
        assert [tool.name for tool in tools_in(module, notes)] == ["half"]
        assert re.search(f"Left out: Tool f: a model {reason}", notes[0])


async def call(tool: Tool, arguments: dict[str, Any], ctx: ToolContext | None = None) -> ToolResult:
    state = await tool.create(ctx or ToolContext())
    try:
        return await tool.call(state, arguments)
    finally:
        await tool.release(state)


async def test_plain_functions_are_tools() -> None:
    def double(x: int) -> dict[str, int]:
        """Double a number."""
        return {"twice": 2 * x}

    async def seed(ctx: ToolContext) -> int:
        """The seed."""
        return ctx.seed

    made = (
        tool(double),
        tool(name="other", timeout=5, pure=True)(double),
    )  # the decorator only wraps
    assert all(isinstance(one, FunctionTool) and one.function is double for one in made)
    found = [(one.schema["function"]["name"], one.timeout, one.pure) for one in made]
    assert found == [("double", None, False), ("other", 5, True)]
    assert (await call(as_tool(double), {"x": 4})).text == '{"twice": 8}'
    assert (await call(as_tool(seed), {}, ToolContext(seed=7))).text == "7"
    assert as_tool(seed).schema["function"]["parameters"] == {"type": "object", "properties": {}}
    with pytest.raises(ConfigError, match="is not a tool"):
        as_tool(3)
    with pytest.raises(NotFound) as caught:
        as_tool("calculater")
    assert "calculator" in caught.value.hint


async def test_failures_are_observations() -> None:
    def divide(a: int, b: int) -> float:
        """Divide."""
        return a / b

    async def own_timeout() -> str:
        """Raise it."""
        raise TimeoutError("mine")

    wrong = 'Bad tool call: argument "b" must be an integer, not a string ("2").'
    for function, arguments, error, text in (
        (divide, {"a": 1, "b": "2"}, "bad_arguments", wrong),
        (divide, {"a": 1, "b": 0}, "exception", "Error: ZeroDivisionError: division by zero"),
        (own_timeout, {}, "exception", "Error: TimeoutError: mine"),
    ):
        found = await call(as_tool(function), arguments)
        assert (found.error, found.text) == (error, text)


async def test_timeout_concurrency_and_rate() -> None:
    running = most = 0

    async def slow(seconds: float) -> str:
        """Sleep."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(seconds)
        running -= 1
        return "done"

    narrow = FunctionTool(slow, concurrency=2)
    await asyncio.gather(*(call(narrow, {"seconds": 0.01}) for _ in range(6)))
    assert most == 2
    late = await call(FunctionTool(slow, timeout=0.02), {"seconds": 5})
    assert (late.error, late.text) == ("timeout", "Error: slow took longer than 0.02 s.")
    started, paced = time.perf_counter(), FunctionTool(slow, rate=100)
    await asyncio.gather(*(call(paced, {"seconds": 0}) for _ in range(5)))
    assert time.perf_counter() - started >= 0.04


def test_limits_belong_to_a_loop_and_tools_outlive_it() -> None:
    async def nap() -> str:
        """Nap."""
        await asyncio.sleep(0.001)
        return "ok"

    async def both() -> list[str]:
        return [one.text for one in await asyncio.gather(call(napping, {}), call(napping, {}))]

    napping = FunctionTool(nap, concurrency=1, rate=1000)
    assert [asyncio.run(both()) for _ in range(2)] == [["ok", "ok"]] * 2


@pytest.mark.parametrize("name", [name for name in TOOLS if name not in SANDBOXED + CONFIGURED])
async def test_examples_of_builtin_tools_work(name: str) -> None:
    tool = as_tool(name)
    assert tool.name == name == tool.schema["function"]["name"] and tool.examples
    for example in tool.examples:
        result = await call(tool, dict(example))
        assert result.error is None and result.text


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("0.1 + 0.2", "0.3"),
        ("12345678901234567890.5 - 12345678901234567890", "0.5"),
        ("1.000000000000000000001 * 10", "10.00000000000000000001"),
        ("10 / 4 * 4", "10"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("-3 // 2", "-2"),
        ("-7 % 3", "2"),
        ("2 ** -3", "0.125"),
        ("22 / 7", "3.14285714285714"),
        ("sqrt(16) + sqrt(2.25)", "5.5"),
        ("4 ** 0.5", "2"),
        ("0 ** 0.25 + 1 ** 0.3", "1"),
        ("round(2.675, 2)", "2.68"),
        ("max(1, 2.5, -3) * abs(-2)", "5"),
        ("gcd(12, 18) + lcm(4, 6) + factorial(5)", "138"),
        ("12 × 3 − 6 ÷ 2", "33"),
        ("-0.05", "-0.05"),
        ("(-1) ** 999999999999", "-1"),
        ("1e-300 * 1e300", "1"),
        ("1e-400 * 1E+400 + 1_0.5", "11.5"),
        ("-1 / 10 ** 310 / 3", "-3.33333333333333e-311"),
        ("2 ** -2000", "8.70980981621722e-603"),
        ("10 ** 400 / 3", "3.33333333333333e+399"),
        ("-" * 900 + "1", "1"),
    ],
)
def test_calculator_is_exact(expression: str, shown: str) -> None:
    assert show(compute(expression)) == shown


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "empty"),
        ("1 +", "cannot read"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("0 ** -0.5", "division by zero"),
        ("3 ^ 2", r"write \*\* for powers"),
        ("1,234 + 1", "without commas"),
        ("x + 1", "no variables"),
        ("().__class__", "not arithmetic"),
        ("__import__('os')", "not arithmetic"),
        ("open(1)", "no function open"),
        ("'a' * 9", "not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("1j", "not arithmetic"),
        ("[1] * 9", "not arithmetic"),
        ("(lambda: 1)()", "not arithmetic"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** 99999", "too large"),
        ("(10 ** 1000) ** 10", "too large"),
        ("2 ** 0.5 ** -99999", "too large|division"),
        ("factorial(401)", "0 to 400"),
        ("factorial(1.5)", "whole"),
        ("sqrt(-1)", "negative"),
        ("1e400 * 1e9000", "too large"),
        ("1e-999999999", "too close to 0"),
        ("1e99999999999999999999", "too large"),
        ("9" * 1001, "more than 1000"),
        ("(" * 400 + "1" + ")" * 400, "cannot read|nested"),
        ("1 if 1 else 2", "not arithmetic"),
        ("sqrt(1, 2)", "takes 1"),
        ("round(1, 10 ** 9)", "at most"),
        ("0.5 ** 1500.5", "too close to 0"),
        ("sqrt(2 ** -2001)", "too close to 0"),
    ],
)
def test_calculator_refuses(expression: str, reason: str) -> None:
    with pytest.raises(CalculatorError, match=reason):
        compute(expression)


def test_command_lists_shows_and_calls(cli: Cli) -> None:
    assert {row["name"] for row in cli.json("tools", "list")} >= set(TOOLS)
    shown = cli("tools", "show", "calculator")
    assert "expression (string)" in shown and "pure True" in shown
    assert cli("tools", "call", "calculator", '{"expression": "6*7"}', said="ok, ") == "42\n"
    bad = cli.json("tools", "call", "calculator", '{"expr": "6*7"}', code=1)
    assert bad["error"] == "bad_arguments"
    code = 'def shout(text: str) -> str:\n    """Shout."""\n    return text.upper()\n'
    (cli.folder / "mine.py").write_text(code)
    assert cli("tools", "call", "mine.py:shout", '{"text": "hi"}') == "HI\n"


async def test_what_a_thread_of_a_tool_raises_arrives() -> None:
    with pytest.raises(EnvError, match="SystemExit: 3"):
        await in_thread(sys.exit, 3)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(lambda: str(next(iter(()))))
    assert await in_thread(lambda a: a + 1, a=1) == 2


async def test_calls_take_idle_threads_and_never_wait_for_one() -> None:
    together = threading.Barrier(40)
    places = await asyncio.gather(*(in_thread(together.wait, 60) for _ in range(40)))
    assert sorted(places) == list(range(40)), "all of them ran at once"
    before = threading.active_count()
    kept = threading.local()
    await in_thread(lambda: setattr(kept, "seen", True))
    assert await in_thread(getattr, kept, "seen", False), "the thread that was idle last"
    assert threading.active_count() <= before


async def test_a_call_finds_no_event_loop_of_an_earlier_one() -> None:
    def use() -> int:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(asyncio.sleep(0, 3))
        finally:
            loop.close()

    assert [await in_thread(use) for _ in range(2)] == [3, 3]
    with pytest.raises(RuntimeError, match="event loop"):
        await in_thread(asyncio.get_event_loop)


async def test_an_exception_that_another_thread_set_loses_no_call() -> None:
    """As time limits in users' code do: it may arrive once the thread is idle again."""
    before = threading.active_count()
    for n in range(20):
        idle = ctypes.c_ulong(await in_thread(threading.get_ident))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(idle, ctypes.py_object(KeyboardInterrupt))
        assert await in_thread(abs, n) == n
    assert await soon(lambda: threading.active_count() <= before + 1), "the others have ended"


def test_a_tool_that_hangs_does_not_hold_the_process() -> None:
    code = """
import asyncio, time
from agentrl_cli.hooks.threads import in_thread, thread_metrics
async def go():
    for _ in range(2):
        try:
            async with asyncio.timeout(0.5):
                await in_thread(time.sleep, 3600)
        except TimeoutError:
            print("late", thread_metrics())
asyncio.run(go())
"""
    done = run_code(code)
    assert "Traceback" not in done.stderr
    assert done.stdout == "late {'threads/abandoned': 1.0}\nlate {'threads/abandoned': 2.0}\n"
    assert done.stderr.count("still runs in its thread") == 1


# Name to schema, one a line, in the order of its keys: part of the prompt that trained models
# know.
PUBLISHED = Path(__file__).with_name("schemas.jsonl")
PACKS = sorted(path.parent.name for path in Path("tasks").glob("*/task.yaml"))


class Colour(enum.Enum):
    """For programmers."""

    RED = "red"
    BLUE = "blue"


class Point(TypedDict):
    """For programmers."""

    y: int
    x: Annotated[float, "Its place."]
    title: NotRequired[str]


class Tree(TypedDict):
    children: list[Tree]


@dataclass
class Pair:
    left: int


UserId = NewType("UserId", int)
Level = Annotated[int, Field(ge=1, le=3, description="How much.")]


def test_the_schemas_of_shipped_tools_are_the_published_ones_to_the_byte() -> None:
    packs = load_packs(PACKS)
    found: dict[str, Any] = {
        f"{name}/{tool.name}": tool.schema for name in PACKS for tool in packs[name].tools
    }
    found |= {f"tools/{name}": as_tool(name).schema for name in TOOLS}
    lines = [json.dumps({name: schema}, ensure_ascii=False) for name, schema in found.items()]
    assert lines == PUBLISHED.read_text(encoding="utf-8").splitlines()


POINT = (
    '{"type": "object", "properties": {"y": {"type": "integer"}, "x": {"type": "number", "description": "Its place."},'
    ' "title": {"type": "string"}}, "required": ["x", "y"]}'
)


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (str, '{"type": "string"}'),
        (Any, "{}"),
        (Literal["b", "a"], '{"type": "string", "enum": ["b", "a"]}'),
        (Literal["a"], '{"type": "string", "enum": ["a"]}'),
        (Literal[1, "a"], '{"enum": [1, "a"]}'),
        (Colour, '{"type": "string", "enum": ["red", "blue"]}'),
        (Annotated[Colour, "Which."], '{"type": "string", "enum": ["red", "blue"], "description": "Which."}'),
        (int | str | None, '{"type": ["integer", "string", "null"]}'),
        (Colour | None, '{"anyOf": [{"type": "string", "enum": ["red", "blue"]}, {"type": "null"}]}'),
        (list, '{"type": "array"}'),
        (set[int], '{"type": "array", "items": {"type": "integer"}}'),
        (tuple[int, ...], '{"type": "array", "items": {"type": "integer"}}'),
        (dict[str, Any], '{"type": "object"}'),
        (dict[str, bool], '{"type": "object", "additionalProperties": {"type": "boolean"}}'),
        (list[Annotated[int, "One."]], '{"type": "array", "items": {"type": "integer", "description": "One."}}'),
        (Point, POINT),
        (list[Point], f'{{"type": "array", "items": {POINT}}}'),
        (UserId, '{"type": "integer"}'),
        (Level, '{"type": "integer", "maximum": 3, "minimum": 1, "description": "How much."}'),
    ],
)  # fmt: skip
def test_a_type_hint_becomes_this_schema(hint: Any, text: str) -> None:
    assert json.dumps(type_schema(hint, "parameter x")) == text


@pytest.mark.parametrize(
    "hint", [complex, bytes, date, Path, Pair, list[Pair], frozenset[int], Tree]
)
def test_a_type_that_json_cannot_carry_is_refused(hint: Any) -> None:
    with pytest.raises(ConfigError, match="of parameter x cannot be written as JSON"):
        type_schema(hint, "parameter x")


@pytest.mark.parametrize(
    ("level", "to", "right"),
    [(2, [1, "a"], True), (4, [1, "a"], False), (2, ["a", 1], False), (2, [1], False)],
)
def test_bounds_and_places_are_checked_in_calls(level: int, to: list[Any], right: bool) -> None:
    def move(level: Level, to: tuple[int, str]) -> str:
        """Move."""
        return f"{level}{to}"

    assert (validate_arguments(tool_schema(move), {"level": level, "to": to}) is None) is right


@pytest.mark.parametrize(
    "schemas",
    [
        [5],
        5,
        ["add"],
        [{}],
        [{"function": 5}],
        [{"description": "x"}],
        [{"name": "x", "parameters": 5}],
    ],
)
def test_what_describes_no_function_is_refused_with_the_form(schemas: Any) -> None:
    task = Task("t", "", "", "train", (), {"tool_schemas": schemas})
    with pytest.raises(ConfigError, match="does not describe a function") as refused:
        as_tool("declared").offer(task)
    assert '"parameters"' in refused.value.hint


def test_a_tool_is_shown_with_the_values_it_takes(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "tool.py").write_text(
        "from typing import Annotated, Literal\nfrom pydantic import Field\n\n"
        'To = Literal["km", "mile"]\nBy = Annotated[int, Field(ge=1, le=9)]\n'
        "def convert(to: To, by: By, of: list[float], x: int | None):\n"
        '    """Convert.\n\n    Args:\n        to: The unit.\n    """\n'
    )
    shown = cli("tools", "show", "tool.py:convert")
    for said in (
        'to (string, one of "km", "mile")  The unit.',
        "by (integer, from 1, to 9)",
        "of (array of number)",
        "x (integer or null)",
    ):
        assert said in shown


def test_an_example_of_a_tool_runs_in_a_shell_as_it_is_printed(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "tool.py").write_text(
        "from agentrl_cli.tools import tool\n\n"
        '@tool(examples=({"text": "it\'s"},))\n'
        'def shout(text: str) -> str:\n    """Shout."""\n    return text.upper()\n'
    )
    command = cli("tools", "show", "tool.py:shout").splitlines()[-1]
    assert cli(*shlex.split(command)[1:]) == "IT'S\n"


# --- `run_python`, `bash` and `files` in one session: what the model reads, and that links lead nowhere ---


@pytest.fixture
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    level = getattr(request, "param", "ns")
    async with await open_sandbox(
        backend=level, min_level="landlock", workers=1, wall=2.0
    ) as opened:
        yield opened


@pytest.fixture
async def ctx(sandbox: Sandbox) -> AsyncIterator[ToolContext]:
    context = ToolContext(session_factory=sandbox.session)
    yield context
    await context.close()


async def use(ctx: ToolContext, name: str, **arguments: Any) -> ToolResult:
    return await as_tool(name).call(ctx, arguments, timeout=0.01)  # they end in time by themselves


async def test_the_examples_work_in_their_order(ctx: ToolContext) -> None:
    for name in ("run_python", "bash", "files"):
        assert as_tool(name).examples
        for example in as_tool(name).examples:
            result = await use(ctx, name, **example)
            assert result.error is None and result.text and result.level == ctx.opened.level
    assert (await use(ctx, "bash", command="cat src/a.py n.txt")).text == "x = 2\n1\n2\n3"


async def test_bash_tells_exit_codes_limits_and_keeps_files_only(ctx: ToolContext) -> None:
    failed = await use(ctx, "bash", command="mkdir d; cd d; V=1; echo out; echo err >&2; exit 3")
    assert (failed.text, failed.error) == ("out\nerr\n[exited with code 3]", "exit")
    assert (await use(ctx, "bash", command="ls; echo -$V-")).text == "d\n--"
    missing = await use(ctx, "bash", command="no_such_program")
    assert "not found" in missing.text and "[exited with code 127]" in missing.text
    slow = await use(ctx, "bash", command="sleep 30")
    assert (slow.text, slow.error) == ("[timed out after 2 s]", "timeout")
    loud = await use(ctx, "bash", command="head -c 300000 /dev/zero | tr '\\0' a")
    assert loud.error is None and len(loud.text) < 70_000 and "bytes left out" in loud.text


@pytest.mark.parametrize("sandbox", ["ns", "landlock"], indirect=True)
async def test_python_bash_and_files_share_the_folder(ctx: ToolContext) -> None:
    await use(ctx, "run_python", code="open('a.txt', 'w').write('one\\ntwo\\n')")
    assert (await use(ctx, "files", action="view", path="./a.txt")).text == "1\tone\n2\ttwo"
    await use(ctx, "files", action="edit", path="a.txt", old="two", new="three")
    assert (await use(ctx, "bash", command="cat a.txt")).text == "one\nthree"


async def test_view_shows_ranges_and_says_what_is_left(ctx: ToolContext) -> None:
    async def view(path: str, **lines: int) -> str:
        return (await use(ctx, "files", action="view", path=path, **lines)).text

    texts = {
        "a": "".join(f"line {n}\n" for n in range(1, LINES + 51)),
        "wide": "x" * 600,
        "none": "",
        "feed": "a\r\n\x0cb\u2028c\n\nd",
    }
    wrote = [await use(ctx, "files", action="write", path=p, text=texts[p]) for p in texts]
    assert wrote[0].text == f"Wrote a: {LINES + 50} lines, {len(texts['a'])} bytes."
    assert await view("a", start=3, end=4) == "3\tline 3\n4\tline 4"
    first, last = (await view("a")).splitlines(), f"{LINES + 50}\tline {LINES + 50}"
    left = f"[lines 1 to {LINES} of {LINES + 50}; go on with start {LINES + 1}]"
    assert len(first) == LINES + 1 and first[-1] == left
    assert (await view("a", start=LINES + 1)).splitlines()[-1] == last
    beyond = f"Error: a has lines 1 to {LINES + 50}, not 999 to {LINES + 50}"
    assert await view("a", start=999) == beyond and await view("none") == "[none is empty]"
    assert (await view("wide")).endswith("x [… 100 more characters]")
    edited = await use(ctx, "files", action="edit", path="feed", old="d", new="e")
    assert edited.text == "Edited feed at line 4." and wrote[3].text.startswith("Wrote feed: 4 ")
    assert await view("feed") == "1\ta\n2\t\x0cb\u2028c\n3\t\n4\te", "numbered otherwise"


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"action": "view", "path": "missing"}, "missing: there is no such file."),
    ({"action": "view", "path": "bytes"}, "bytes is not text: 2 bytes that are not UTF-8"),
    ({"action": "view", "path": "../x"}, "the path has to be relative and inside the work folder"),
    (
        {"action": "view", "path": "/etc/passwd"},
        "the path has to be relative and inside the work folder",
    ),
    ({"action": "view", "path": "a/b"}, "a part of the path is not a folder"),
    ({"action": "list", "path": "missing"}, "there is no missing"),
    ({"action": "write", "path": "a"}, "write needs text"),
    ({"action": "write", "text": "x"}, "path is needed"),
    ({"action": "write", "path": "d", "text": "x"}, "it is a folder"),
    ({"action": "write", "path": "a", "text": "é" * MAX_TEXT}, f"a file may have {MAX_TEXT}"),
    ({"action": "edit", "path": "a", "old": "x"}, "edit needs new"),
    ({"action": "edit", "path": "a", "old": "q", "new": "x"}, "old does not occur in a; view it"),
    (
        {"action": "edit", "path": "a", "old": "one", "new": "x"},
        "old occurs 2 times in a (lines 1, 3); add what",
    ),
    ({"action": "edit", "path": "a", "old": "one", "new": "one"}, "old and new are the same"),
    ({"action": "edit", "path": "a", "old": "", "new": "one"}, "old is empty"),
]


async def test_what_goes_wrong_is_reported(ctx: ToolContext) -> None:
    await (await ctx.session()).write("bytes", b"\xff\xfe")
    await use(ctx, "bash", command="printf 'one\\ntwo\\none\\n' > a; mkdir d")
    for arguments, says in MISTAKES:
        result = await use(ctx, "files", **arguments)
        assert result.error == "exception" and result.text.startswith("Error: "), arguments
        assert says in result.text
    assert (await use(ctx, "bash", command="cat a")).text == "one\ntwo\none"


async def test_edits_of_one_turn_do_not_lose_each_other(ctx: ToolContext) -> None:
    await use(ctx, "files", action="write", path="a", text="".join(f"<{n}>" for n in range(6)))
    edits = [
        use(ctx, "files", action="edit", path="a", old=f"<{n}>", new=f"[{n}]") for n in range(6)
    ]
    assert [result.error for result in await asyncio.gather(*edits)] == [None] * 6
    assert (await use(ctx, "files", action="view", path="a")).text == "1\t[0][1][2][3][4][5]"


async def test_an_edit_keeps_line_ends_and_permissions(ctx: ToolContext) -> None:
    await use(ctx, "bash", command="printf '#!/bin/sh\\r\\necho 1\\r\\n' > a; chmod 755 a")
    await use(ctx, "files", action="edit", path="a", old="echo 1", new="echo 2")
    assert (await use(ctx, "bash", command="stat -c %a a")).text == "755"
    assert await (await ctx.session()).read("a") == b"#!/bin/sh\r\necho 2\r\n"


HOSTILE = """
import os
os.symlink('/etc/passwd', 'file'); os.symlink('/etc', 'folder'); os.symlink('.', 'self'); os.symlink('loop', 'loop')
os.symlink(CANARY, 'canary'); os.symlink(os.path.dirname(CANARY), 'dir'); os.mkfifo('pipe')
os.mkdir('deep'); os.symlink('../../../../../../etc/passwd', 'deep/up'); os.symlink('/proc/self/mem', 'deep/mem')
for name in ('hard', 'deep/hard'):
    try: os.link(CANARY, name)
    except OSError: pass
"""


@pytest.mark.parametrize("sandbox", ["ns", "landlock"], indirect=True)
async def test_links_lead_nowhere(ctx: ToolContext, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("a secret of the host")
    session: Session = await ctx.session()
    assert (await session.cell(f"CANARY = {str(canary)!r}{HOSTILE}")).ok
    leads = "file folder/passwd self/self/file loop canary dir/canary pipe deep/up deep/mem hard deep/hard".split()
    for path in leads:
        with pytest.raises(UsageError):
            await session.read(path)
        viewed = await use(ctx, "files", action="view", path=path)
        assert viewed.error == "exception"
        assert "root:" not in viewed.text and "secret" not in viewed.text
    for path in ("folder/new", "dir/new", "self/new", "dir/canary"):
        written = await use(ctx, "files", action="write", path=path, text="forged")
        assert written.error == "exception" and "links are not followed" in written.text
    for path in ("canary", "file", "hard", "deep/up"):  # replaced, not followed
        assert (await use(ctx, "files", action="write", path=path, text="mine")).error is None
        assert await session.read(path) == b"mine"
    assert canary.read_text() == "a secret of the host" and sorted(tmp_path.iterdir()) == [canary]
    listed = (await use(ctx, "files", action="list")).text
    assert "dir  (a link, not followed)" in listed and "pipe  (not a regular file)" in listed
    assert "passwd" not in listed


async def test_a_list_reports_that_entries_are_left_out(ctx: ToolContext) -> None:
    session = await ctx.session()
    made = await session.bash("mkdir a; cd a; touch $(seq 999)")
    assert made.ok and not (await session.list()).more and len(await session.list()) == 1000
    assert (await use(ctx, "files", action="list")).text.endswith("\n[800 more]")
    await session.write("z/late", "1")
    listed = await session.list()
    assert listed.more and len(listed) == 1000
    said = "[only 1000 entries of the working folder are looked at]"
    assert (await use(ctx, "files", action="list")).text.endswith(f"\n[800 more]\n{said}")
    assert said in (await use(ctx, "files", action="list", path="missing")).text


def test_the_commands_show_and_call_them(cli: Cli) -> None:
    assert cli("tools", "call", "bash", '{"command": "echo hi"}', said="sandbox ns") == "hi\n"
    assert cli.json("tools", "call", "bash", '{"command": "exit 4"}', code=1)["error"] == "exit"
    for name, limits in (
        ("sql", "access read-only, rows 50, seconds 2.0, memory MiB 64"),
        ("search", "passages 10, characters of a passage 600, timeout 10.0, pure True"),
        ("files", 'action (string, one of "view", "write", "edit", "list")'),
        ("files", "agentrl tools call files"),
        ("files", "sandbox: 5 s a call"),
    ):
        assert limits in cli("tools", "show", name)
    cli("init", "code-task", "p", "--yes")
    description = cli.folder / "p" / "task.yaml"
    text = re.sub(r"(?m)^sandbox:.*\n", "", description.read_text())
    description.write_text(f"{text}\nsandbox: {{wall: 0.5}}\n")
    assert "sandbox: 0.5 s a call" in cli("tools", "show", "run_python", "-p", "p")
    slow = '{"code": "import time; time.sleep(3)"}'
    assert cli.json("tools", "call", "run_python", slow, "-p", "p", code=1)["error"] == "timeout"
