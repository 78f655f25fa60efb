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

from agentrl_cli.errors import ConfigError
from agentrl_cli.tasks import load_packs
from agentrl_cli.tools import TOOLS, as_tool, tool_schema, validate_arguments
from agentrl_cli.tools.schema import type_schema

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
    found: dict[str, Any] = {f"{name}/{tool.name}": tool.schema for name in PACKS for tool in packs[name].tools}
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


@pytest.mark.parametrize("hint", [complex, bytes, date, Path, Pair, list[Pair], frozenset[int], Tree])
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
    for wrong in ({"level": 4, "to": [1, "a"]}, {"level": 2, "to": ["a", 1]}, {"level": 2, "to": [1]}):
        assert validate_arguments(schema, wrong)
