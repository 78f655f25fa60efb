"""Validation of a call's arguments: the answers to the model, and schemas that cannot be used."""

import logging
import socket
from typing import Any

import pytest

from agentrl_cli.chat.parse import validate_arguments
from tests.helpers.chat import schema

TYPES = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 1, "maximum": 9},
        "mode": {"enum": ["a", "b"]},
        "xs": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        "opt": {"type": ["string", "null"]},
        "o": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]},
        "u": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^x"}]},
    },
    "required": ["n"],
}


# References, and all keywords of the standard.
STANDARD = {
    "type": "object",
    "$defs": {
        "Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    },
    "properties": {
        "at": {"$ref": "#/$defs/Point"},
        "n": {"type": "integer", "multipleOf": 5},
        "tags": {"type": "array", "uniqueItems": True},
        "one": {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
        "by": {
            "type": "object",
            "patternProperties": {"^a": {"type": "integer"}},
            "additionalProperties": False,
        },
    },
}


def test_a_value_that_fits_two_of_which_one_may_is_named() -> None:
    both = validate_arguments(STANDARD, {"one": 5})
    assert both is not None and both.startswith('argument "one": 5 is valid under each of')


PAIR = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
EITHER: dict[str, Any] = {"anyOf": [{**PAIR, "required": [name]} for name in ("a", "b")]}


@pytest.mark.parametrize(
    ("schema", "arguments", "problem"),
    [
        *(
            (TYPES, *case)
            for case in [
                (
                    {"n": 1, "mode": "a", "xs": [1, 2.5], "opt": None, "o": {"k": True}, "u": "xy"},
                    None,
                ),
                ({}, 'argument "n" is missing'),
                ({"n": True}, 'argument "n" must be an integer, not a boolean (true)'),
                ({"n": 3.0}, 'argument "n" must be an integer, not a number (3.0)'),
                ({"n": 0}, 'argument "n" must be at least 1'),
                ({"n": 1, "mod": "a"}, 'unknown argument "mod", did you mean "mode"?'),
                ({"n": 1, "mode": "c"}, 'argument "mode" must be one of "a", "b"'),
                ({"n": 1, "xs": [1, "2"]}, 'argument "xs[1]" must be a number, not a string ("2")'),
                ({"n": 1, "xs": [1, 2, 3]}, 'argument "xs" must have at most 2 items'),
                ({"n": 1, "o": {}}, 'argument "o.k" is missing'),
                (
                    {"n": 1, "u": "y"},
                    'argument "u" fits none of its types: argument "u" must be an integer, not a string ("y")',
                ),
            ]
        ),
        *(
            (STANDARD, *case)
            for case in [
                ({"at": {"x": 1}, "n": 10, "tags": ["a"], "one": 1, "by": {"ab": 1}}, None),
                ({"at": {}}, 'argument "at.x" is missing'),
                ({"at": {"x": "1"}}, 'argument "at.x" must be an integer, not a string ("1")'),
                ({"n": 7}, 'argument "n": 7 is not a multiple of 5'),
                ({"tags": ["a", "a"]}, "argument \"tags\": ['a', 'a'] has non-unique elements"),
                ({"by": {"b": 1}}, 'unknown argument "by.b"; there are: none'),
                ({"by": {"ab": "x"}}, 'argument "by.ab" must be an integer, not a string ("x")'),
            ]
        ),
        (schema("f", {}), {"x": 1}, 'unknown argument "x"; there are: none'),
        # that of the first argument
        (PAIR, {"b": "x", "a": "y"}, 'argument "b" must be an integer, not a string ("x")'),
        # arguments that a part of the schema names
        *(
            ({"function": {"name": "f", "parameters": parts}}, {"b": 1}, None)
            for parts in (EITHER, {"$ref": "#/$defs/p", "$defs": {"p": PAIR}})
        ),
        # a type that JSON does not have accepts anything
        ({"properties": {"a": {"type": "str"}}}, {"a": 1}, None),
    ],
)
def test_the_first_error_is_worded_for_the_model(
    schema: dict[str, Any], arguments: dict[str, Any], problem: str | None
) -> None:
    assert validate_arguments(schema, arguments) == problem


@pytest.mark.parametrize(
    "broken",
    [{"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}, {"type": "object", "required": 1}],
)
def test_a_schema_that_cannot_be_used_is_logged_and_checks_nothing(
    broken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    value = {} if "required" in broken else "x"
    with caplog.at_level(logging.WARNING):
        assert validate_arguments({"properties": {"a": broken}}, {"a": value}) is None
    assert "arguments are not checked" in caplog.text


def test_no_schema_is_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        assert validate_arguments({"properties": {"a": {"$ref": address}}}, {"a": 1}) is None
        with pytest.raises(BlockingIOError):  # no client has connected
            server.accept()


def test_arguments_nested_too_deeply_are_an_error() -> None:
    reference = {"$ref": "#/$defs/list"}
    wanted = {
        "properties": {"a": reference},
        "$defs": {"list": {"type": "array", "items": reference}},
    }
    value: list[Any] = []
    for _ in range(900):
        value = [value]
    assert validate_arguments(wanted, {"a": value}) == "the arguments are nested too deeply"
