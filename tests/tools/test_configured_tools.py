"""tools.yaml in the short form and with classes, limits of what tools return, tool_choice."""

from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import ByteTokenizer, Chat, load_pack
from agentrl_cli.errors import ConfigError
from agentrl_cli.tools import validate_arguments
from agentrl_cli.tools.configured import load_tools
from agentrl_cli.types import Origin, Outcome
from tests.helpers.chat import CHAT, call
from tests.helpers.packs import answers, pack, play, row

SHORT = """
- name: plus
  description: Sum of two.
  parameters: {a: number, b: {type: number, description: Second.}}
  function: "task.py:add"
  timeout: 3
  pure: true
- name: calculator
  description: Compute.
- finish
"""


async def test_the_short_form(tmp_path: Path) -> None:
    tools = ["tools.yaml", {"name": "sql", "config": {"rows": 1}}]
    made = pack(tmp_path, {"tools": tools}, [row()], tools__yaml=SHORT)
    plus, calculator, finish, sql = made.tools
    assert plus.schema["function"] == {
        "name": "plus",
        "description": "Sum of two.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number"},
                "b": {"type": "number", "description": "Second."},
            },
            "required": ["a", "b"],
        },
    }
    assert (plus.timeout, plus.pure, finish.name, sql.name) == (3, True, "finish", "sql")
    theirs = load_pack("calc-task").tools[0].schema["function"]["description"]
    assert calculator.schema["function"]["description"] == "Compute." != theirs
    done = await play(made, [call("plus", a=2, b=3), call("calculator", expression="2+3"), "5"])
    assert answers(done) == ["5", "5"] and done.outcome is Outcome.SOLVED


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (3, "a name or a mapping"),
        ({"nme": "a"}, "unknown keys: nme"),
        ({"description": "a"}, "needs a name"),
        (
            {"name": "sql", "config": {"row": 1}},
            "config takes: anywhere, database, memory_mb, rows",
        ),
        (
            {"name": "calculator", "parameters": {"x": "number"}},
            "calculator has no parameter x; it has expression",
        ),
        (
            {"name": "calculator", "parameters": {"expression": 3}},
            "parameters.expression must be a type or a schema, not 3",
        ),
        (
            {"name": "run_python", "config": {"timeout": 5}},
            "run_python is a function and takes no config. Its limits (concurrency",
        ),
        ({"class_name": "pathlib.Path"}, "neither a Tool nor a class that a plugin reads"),
    ],
)
def test_entries_that_cannot_be(tmp_path: Path, entry: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tools([entry], tmp_path)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_parameters_with_a_default_stay_optional(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text('def roll(sides: int = 6) -> int:\n    """Roll a die."""\n')
    entry = {"name": "roll", "function": "own.py:roll", "parameters": {"sides": "integer"}}
    (made,) = load_tools([entry], tmp_path)
    assert validate_arguments(made.schema, {}) is None


def test_two_tools_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two tools are named 'finish'"):
        pack(tmp_path, {"tools": ["finish", {"name": "finish"}]}, [row()])


async def test_limits_of_user_turns_characters_and_response(tmp_path: Path) -> None:
    made = pack(tmp_path, {"tools": [{"name": "sql"}]}, [row()])
    long = call("sql", query="SELECT 'abcdefghij' || 'klmnopqrst' AS x")
    cut = await play(made, [long, "5"], observation={"chars": 10, "cut": "right"})
    assert answers(cut) == ["x\nabcdefgh[… 12 characters cut …]"]
    assert cut.turns[-2].results[0].truncated
    once = await play(made, [long, long, "5"], max_user_turns=1)
    assert once.outcome is Outcome.TRUNCATED_TURNS and len(answers(once)) == 1
    # nothing was left to answer
    assert (await play(made, [long, "wrong"], max_user_turns=1)).outcome is Outcome.FAILED
    short = await play(made, [long, long, "5"], response_tokens=150)
    prompt = next(turn.start for turn in short.turns if turn.role == "assistant")
    # and the stop token that closes the turn
    assert (short.outcome, len(short.tokens) - prompt) == (Outcome.TRUNCATED_TOKENS, 150 + 1)


# --- tool_choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("choice", "error"), [("none", "unknown_tool"), ("auto", None)])
async def test_tool_choice_none_and_auto(tmp_path: Path, choice: str, error: str | None) -> None:
    made = pack(tmp_path, {"tools": ["calculator"]}, [row(tool_choice=choice)])
    done = await play(made, [call("calculator", expression="2+3"), "5"])
    assert done.turns[-2].results[0].error == error and done.outcome is Outcome.SOLVED
    prompt = CHAT.decode(done.tokens.ids[: done.turns[0].end].tolist())
    assert ("calculator" in prompt) == (choice == "auto")
    assert Origin.FORCED not in done.tokens.origin[:-2]


@pytest.mark.parametrize(
    ("choice", "free"),
    [
        ("required", "calculator"),
        ({"type": "function", "function": {"name": "calculator"}}, '{"expression'),
    ],
)
async def test_tool_choice_forces_the_beginning_of_a_call(
    tmp_path: Path, choice: Any, free: str
) -> None:
    made = pack(tmp_path, {"tools": ["calculator", "finish"]}, [row(tool_choice=choice)])
    whole = call("calculator", expression="2+3")
    begins = whole[: whole.index(free)]
    done = await play(made, [whole.removeprefix(begins), "5"])
    assert answers(done) == ["5"] and (done.outcome, done.flags) == (Outcome.SOLVED, ())
    first, last = (turn for turn in done.turns if turn.role == "assistant")
    origin, forced = done.tokens.origin[first.start : first.end], len(CHAT.tokenizer.encode(begins))
    assert (origin[:forced] == Origin.FORCED).all() and origin[forced] == Origin.MODEL
    assert CHAT.decode(done.tokens.ids[first.start : first.start + forced].tolist()) == begins
    # The second turn is free: else an episode could not end.
    assert done.tokens.origin[last.start] == Origin.MODEL


@pytest.mark.parametrize(
    "parser", ["hermes", "llama3_json", "mistral", "qwen3_coder", "glm", "deepseek"]
)
def test_every_parser_reads_a_call_that_was_begun_for_the_model(parser: str) -> None:
    chat = Chat(ByteTokenizer(), parser=parser)
    schemas = [tool.schema for tool in load_pack("calc-task").tools]
    whole = chat.parser.example("calculator", {"expression": "2+3"})
    for choice in ("required", {"type": "function", "function": {"name": "calculator"}}):
        begun = chat.syntax.forced_text(schemas, choice)
        assert begun and whole.startswith(begun)
        assert ("calculator" in begun) == (choice != "required")
    assert chat.syntax.forced_text(schemas, "auto") == ""
    assert chat.syntax.forced_text((), "required") == ""
