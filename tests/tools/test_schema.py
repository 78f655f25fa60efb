"""Schemas from typed functions: what models were trained on to the byte, and what type hints may say."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict

import pytest
from pydantic import Field

from agentrl_cli.commands.init.functions import tools_in
from agentrl_cli.errors import ConfigError
from agentrl_cli.registry import load_file
from agentrl_cli.tasks import load_packs
from agentrl_cli.tools import TOOLS, as_tool, tool_schema, validate_arguments
from agentrl_cli.tools.schema import type_schema
from tests.helpers.cli import Cli

PUBLISHED = Path(__file__).with_name("schemas.jsonl")
"""Name to schema, one a line, in the order of its keys: part of the prompt that trained models know."""
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


def test_bounds_and_places_are_checked_in_calls() -> None:
    def move(level: Level, to: tuple[int, str]) -> str:
        """Move."""
        return f"{level}{to}"

    schema = tool_schema(move)
    assert schema["function"]["parameters"]["properties"]["level"]["description"] == "How much."
    assert validate_arguments(schema, {"level": 2, "to": [1, "a"]}) is None
    for wrong in (
        {"level": 4, "to": [1, "a"]},
        {"level": 2, "to": ["a", 1]},
        {"level": 2, "to": [1]},
    ):
        assert validate_arguments(schema, wrong)


def test_a_function_without_named_parameters_is_no_tool(tmp_path: Path) -> None:
    """Both became a tool that lacked parameters, silently."""

    def many(*values: float) -> float:
        """Adds."""
        return sum(values)

    def options(name: str, **given: str) -> str:
        """Looks a name up."""
        return f"{name}{given}"

    for function, what in ((many, r"\*values"), (options, r"\*\*given")):
        with pytest.raises(ConfigError, match=f"cannot fill in {what}") as caught:
            as_tool(function)
        assert "values: list[float]" in caught.value.hint
    (tmp_path / "tool.py").write_text(
        'def many(*values: float) -> float:\n    """Adds."""\n    return sum(values)\n\n'
        'def half(value: float) -> float:\n    """Half."""\n    return value / 2\n'
    )
    notes: list[str] = []
    assert [tool.name for tool in tools_in(load_file(tmp_path / "tool.py"), notes)] == ["half"]
    assert "Left out: Tool many: a model cannot fill in *values" in notes[0]


def test_a_tool_is_shown_with_the_values_it_takes(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "tool.py").write_text(
        "from typing import Annotated, Literal\nfrom pydantic import Field\n\n"
        'To = Literal["km", "mile"]\nBy = Annotated[int, Field(ge=1, le=9)]\n'
        "def convert(to: To, by: By, of: list[float], x: int | None):\n"
        '    """Convert.\n\n    Args:\n        to: The unit.\n    """\n'
    )
    shown = cli("tools", "show", "tool.py:convert")
    assert (
        'to (string, one of "km", "mile")  The unit.' in shown
        and "by (integer, from 1, to 9)" in shown
    )
    assert "of (array of number)" in shown and "x (integer or null)" in shown
