"""Golden transcripts of every tool-call syntax: good, several, malformed, truncated, and an answer without calls."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from agentrl_cli.chat.arguments import validate_arguments
from agentrl_cli.chat.parse import is_malformed, parse_text
from agentrl_cli.chat.parsers import PARSERS, detect_parser, load_parser
from agentrl_cli.errors import NotFound
from tests.chat_helpers import schema

TOOLS = [schema("add", {"a": "integer", "b": "integer"}), schema("say", {"text": "string"})]
ADD = {"a": 1, "b": 2}

GOOD = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "llama3_pythonic": "[add(a=1, b=2)]",
}

SEVERAL = {
    "hermes": f"{GOOD['hermes']}\n{GOOD['hermes']}",
    "qwen3_coder": f"{GOOD['qwen3_coder']}\n{GOOD['qwen3_coder']}",
    "glm": f"{GOOD['glm']}\n{GOOD['glm']}",
    "deepseek": GOOD["deepseek"].replace("<｜tool▁calls▁end｜>", "")
    + "\n"
    + GOOD["deepseek"].replace("<｜tool▁calls▁begin｜>", ""),
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}},'
    ' {"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "llama3_json": f"{GOOD['llama3_json']}; {GOOD['llama3_json']}",
    "llama3_pythonic": "[add(a=1, b=2), add(a=1, b=2)]",
}

# parser, what the model wrote, a part of the error
BAD = [
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}\n</tool_call>',
        "Expecting ',' delimiter at its end",
    ),
    ("hermes", "<tool_call>\nadd(1, 2)\n</tool_call>", "not valid JSON"),
    ("hermes", "<tool_call>\n\n</tool_call>", "empty: there is no JSON object"),
    ("hermes", '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>', '"name" is missing'),
    (
        "hermes",
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '"name" must be a non-empty string, not an integer',
    ),
    ("hermes", '<tool_call>\n{"name": "add"}\n</tool_call>', '"arguments" is missing'),
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": [1, 2]}\n</tool_call>',
        "must be a JSON object, not an array",
    ),
    ("hermes", "<tool_call>\n[1]\n</tool_call>", "must be a JSON object"),
    ("hermes", '<tool_call>\n{"name": "say", "arguments": {"text": "a\nb"}}\n</tool_call>', r"must be written \n"),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>', "NaN is no JSON value"),
    ("hermes", '<tool_call>\n{"name": "add", "argu', "cut off: no </tool_call> before the turn ended"),
    ("hermes", f'<tool_call>\n{{"name": "add"\n{GOOD["hermes"]}', "cut off: no </tool_call> before the next"),
    ("hermes", '{"name": "add", "arguments": {}}\n</tool_call>', "</tool_call> without <tool_call>"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ("qwen3_coder", "<tool_call>\nadd\n</tool_call>", "<function=NAME> is missing"),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "</parameter> is missing",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
        "</function> is missing",
    ),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1", "cut off"),
    ("glm", "<tool_call>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "name must stand"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>", "without its <arg_value>"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_va", "cut off"),
    ("deepseek", GOOD["deepseek"].replace("```json", ""), "```json"),
    ("deepseek", GOOD["deepseek"].replace("}", ""), "not valid JSON"),
    ("deepseek", GOOD["deepseek"].replace("<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ""), "cut off"),
    ("deepseek", GOOD["deepseek"].replace("<｜tool▁calls▁end｜>", ""), "cut off"),
    ("deepseek", "<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>", "there is no"),
    ("mistral", '[TOOL_CALLS] {"name": "add", "arguments": {}}', "a JSON list of calls must follow"),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "argum', "not valid JSON"),
    ("mistral", "[TOOL_CALLS]add[ARGS]{", "not valid JSON"),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}}]', '"name" is missing'),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1', "not valid JSON"),
    ("llama3_json", '<|python_tag|>{"parameters": {"a": 1}}', '"name" is missing'),
    ("llama3_json", '{"name": "add", "parameters": "1, 2"}', "must be a JSON object, not a string"),
    ("llama3_pythonic", "[add(a=1, b=2", "not valid Python"),
    ("llama3_pythonic", "[add(1, 2)]", "with their names"),
    ("llama3_pythonic", "[add(a=open('x'))]", "plain values"),
]


def test_every_parser_has_golden_transcripts() -> None:
    assert set(GOOD) == set(SEVERAL) == set(PARSERS) == {name for name, _, _ in BAD}


@pytest.mark.parametrize("name", PARSERS)
def test_good_call(name: str) -> None:
    parsed = parse_text(GOOD[name], load_parser(name), TOOLS, turn=1)
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.error, call.id) == ("add", ADD, None, "c00010000")
    assert call.raw and call.raw in GOOD[name]
    assert parsed.content == ""
    assert parsed.message["tool_calls"][0]["function"] == {"name": "add", "arguments": ADD}


@pytest.mark.parametrize("name", PARSERS)
def test_several_calls(name: str) -> None:
    parsed = parse_text(SEVERAL[name], load_parser(name), TOOLS)
    assert [(call.name, call.arguments, call.error) for call in parsed.calls] == [("add", ADD, None)] * 2
    assert len({call.id for call in parsed.calls}) == 2


@pytest.mark.parametrize("name", PARSERS)
def test_an_answer_is_no_call(name: str) -> None:
    for text in ("", "It is 42.", "[1, 2]", '{"answer": 42}', "if a < b: return {}"):
        parsed = parse_text(text, load_parser(name), TOOLS)
        assert (parsed.content, parsed.calls) == (text, ())
        assert parsed.message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(("name", "text", "reason"), BAD)
def test_malformed_call_says_what_was_wrong_and_what_is_expected(name: str, text: str, reason: str) -> None:
    parser = load_parser(name)
    parsed = parse_text(text, parser, TOOLS)
    call = next(call for call in parsed.calls if call.error)
    assert is_malformed(call)
    assert call.error is not None and reason in call.error
    assert call.error.startswith("Malformed tool call: ")
    shown = "say" if call.name == "say" else "add"
    assert call.error.endswith(parser.example(shown, {"text": "..."} if shown == "say" else {"a": 0, "b": 0}))
    assert parsed.message == {"role": "assistant", "content": text}  # rendered again, it is what the model wrote


@pytest.mark.parametrize("name", PARSERS)
def test_the_example_parses(name: str) -> None:
    parser = load_parser(name)
    (call,) = parse_text(parser.example("say", {"text": "a 'b'"}), parser, TOOLS).calls
    assert (call.name, call.arguments, call.error) == ("say", {"text": "a 'b'"}, None)


@pytest.mark.parametrize("name", PARSERS)
def test_unknown_tool_and_bad_arguments(name: str) -> None:
    parser = load_parser(name)
    (unknown,) = parse_text(parser.example("ad", ADD), parser, TOOLS).calls
    assert unknown.error is not None and 'there is no tool "ad"; did you mean add? Expected:' in unknown.error
    assert unknown.arguments == ADD and not is_malformed(unknown)
    (missing,) = parse_text(parser.example("add", {"a": 1}), parser, TOOLS).calls
    assert missing.error is not None and 'argument "b" is missing' in missing.error
    (wrong,) = parse_text(parser.example("add", {"a": 1, "b": "two"}), parser, TOOLS).calls
    assert wrong.error is not None and 'argument "b" must be an integer, not a string ("two")' in wrong.error


def test_text_around_calls_is_content() -> None:
    parsed = parse_text(f"Let me see.\n{GOOD['hermes']}\nDone.", load_parser("hermes"), TOOLS)
    assert parsed.content == "Let me see.\nDone."
    assert parse_text(f"Hm.{GOOD['mistral']}", load_parser("mistral")).content == "Hm."


def test_calls_inside_thinking_are_no_calls() -> None:
    hermes = load_parser("hermes")
    parsed = parse_text(f"<think>\nmaybe {GOOD['hermes']}\n</think>\n\n{GOOD['hermes']}", hermes, TOOLS)
    assert len(parsed.calls) == 1
    assert parsed.content.startswith("<think>\nmaybe")
    assert parse_text(f"<think>\n{GOOD['hermes']}", hermes, TOOLS).calls == ()


def test_string_arguments_stay_strings_in_xml() -> None:
    for name in ("qwen3_coder", "glm"):
        parser = load_parser(name)
        (call,) = parse_text(parser.example("say", {"text": "12"}), parser, TOOLS).calls
        assert call.arguments == {"text": "12"}


def test_newer_mistral_and_deepseek_forms() -> None:
    (call,) = parse_text('[TOOL_CALLS]add[CALL_ID]abc123xyz[ARGS]{"a": 1, "b": 2}', load_parser("mistral"), TOOLS).calls
    assert (call.name, call.arguments, call.error) == ("add", ADD, None)
    text = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
    text = f"<｜tool▁calls▁begin｜>{text}<｜tool▁calls▁end｜>"
    (call,) = parse_text(text, load_parser("deepseek"), TOOLS).calls
    assert (call.name, call.arguments, call.error) == ("add", ADD, None)


def test_names() -> None:
    assert detect_parser("… <tool_call> …") == "hermes"
    assert detect_parser("no tools") == "hermes"
    with pytest.raises(NotFound) as caught:
        load_parser("hermse")
    assert "hermes" in caught.value.hint


def test_validate_arguments() -> None:
    wanted = {
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
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"n": 1, "mode": "a", "xs": [1, 2.5], "opt": None, "o": {"k": True}, "u": "xy"}, None),
        ({}, 'argument "n" is missing'),
        ({"n": True}, 'argument "n" must be an integer, not a boolean (true)'),
        ({"n": 3.0}, 'argument "n" must be an integer, not a number (3.0)'),
        ({"n": 0}, 'argument "n" must be at least 1'),
        ({"n": 1, "mod": "a"}, 'there is no argument "mod", did you mean "mode"?'),
        ({"n": 1, "mode": "c"}, 'argument "mode" must be one of "a", "b"'),
        ({"n": 1, "xs": [1, "2"]}, 'argument "xs[1]" must be a number, not a string ("2")'),
        ({"n": 1, "xs": [1, 2, 3]}, 'argument "xs" must have at most 2 items'),
        ({"n": 1, "o": {}}, 'argument "o.k" is missing'),
        (
            {"n": 1, "u": "y"},
            'argument "u" fits none of its types: argument "u" must be an integer, not a string ("y")',
        ),
    ]
    for arguments, problem in cases:
        assert validate_arguments(wanted, arguments) == problem
    assert validate_arguments(schema("f", {}), {"x": 1}) == 'there is no argument "x"; there are: none'


BITS = [*"\"'\\{}[]<;=\n\ta1", "b c", "  ", "é", "日本", "</x>", "```", "null"]
NESTED = schema("nest", {"s": "string", "o": "object", "a": "array", "b": "boolean"})


@pytest.mark.parametrize("name", PARSERS)
def test_nested_arguments_and_several_calls_survive_every_syntax(name: str) -> None:
    """Whatever the arguments are, what the syntax writes is read again as it was."""
    random, parser = Random(0), load_parser(name)

    def text() -> str:
        return "".join(random.choice(BITS) for _ in range(random.randint(0, 6)))

    def value(depth: int) -> Any:
        if depth == 3 or random.random() < 0.5:
            return random.choice([text(), random.randint(-9, 9), random.random(), True, None])
        count = random.randint(0, 3)
        if random.random() < 0.5:
            return [value(depth + 1) for _ in range(count)]
        return {text(): value(depth + 1) for _ in range(count)}

    one_block = {"mistral", "deepseek", "llama3_pythonic"}  # several calls stand in one list: see SEVERAL
    between = "; " if name == "llama3_json" else "\n"
    for _ in range(100):
        count = 1 if name in one_block else random.randint(1, 3)
        every = [
            {"s": text(), "o": {text(): value(1)}, "a": [value(1), value(1)], "b": random.random() < 0.5}
            for _ in range(count)
        ]
        written = between.join(parser.example("nest", arguments) for arguments in every)
        parsed = parse_text(written, parser, [NESTED])
        assert [(c.name, c.arguments, c.error) for c in parsed.calls] == [("nest", one, None) for one in every]
