"""Golden transcripts of the core's tool-call syntaxes: good, several, malformed, cut off, and answers without calls."""

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.agents.gateway.messages import assistant_message, without_echo
from agentrl_cli.agents.gateway.request import RequestError, read_tools
from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.parsers import PARSERS, detect_parser, load_parser
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.thinking import drop_empty, drop_empty_lines
from agentrl_cli.chat.tokenizer import Tokenizer
from agentrl_cli.errors import NotFound
from agentrl_cli.paths import bundled_model
from agentrl_cli.types import Message, ToolSchema
from tests.helpers.growth import exponent
from tests.helpers.parsers import (
    ADD,
    NESTED,
    TOOLS,
    check_bad_arguments,
    check_calls,
    check_malformed,
    check_nested,
    check_time,
    doubled,
    inside,
)

TABLE = PARSERS
OWN_IDS = {"kimi_k2": "functions.add:0"}  # the model writes the id, and the result names it
# What separates calls; those without stand in one list: see SEVERAL.
BETWEEN = {"llama3_json": "; ", "llama4": "; "} | dict.fromkeys(
    ("mistral", "llama3_pythonic", "harmony"), ""
)

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
    "llama4": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "lfm2": "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>'
    '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
    '<|open|>argument key="b" type="number"<|sep|>2<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "harmony": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}',
    "gemma4": "<|tool_call>call:add{a:1,b:2}<tool_call|>",
    "gemma3_function": "<start_function_call>call:add{a:1,b:2}<end_function_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="add">]<]minimax[>[<a>1]<]minimax[>[</a>'
    "]<]minimax[>[<b>2]<]minimax[>[</b>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
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
    "llama4": "[add(a=1, b=2), add(a=1, b=2)]",
    "lfm2": doubled(GOOD["lfm2"], "add(a=1, b=2)", ", "),
    "kimi_k2": doubled(
        GOOD["kimi_k2"], inside(GOOD["kimi_k2"], "<|tool_call_begin|>", "<|tool_call_end|>")
    ),
    "kimi_k3": doubled(
        GOOD["kimi_k3"], inside(GOOD["kimi_k3"], "<|open|>call", "<|close|>call<|sep|>")
    ),
    "harmony": f"{GOOD['harmony']}<|call|><|start|>assistant{GOOD['harmony']}",
    "gemma4": f"{GOOD['gemma4']}{GOOD['gemma4']}",
    "gemma3_function": f"{GOOD['gemma3_function']}{GOOD['gemma3_function']}",
    "deepseek_v32": doubled(
        GOOD["deepseek_v32"],
        inside(GOOD["deepseek_v32"], "<｜DSML｜invoke", "</｜DSML｜invoke>"),
        "\n",
    ),
    "minimax_m2": doubled(
        GOOD["minimax_m2"], inside(GOOD["minimax_m2"], "<invoke", "</invoke>"), "\n"
    ),
    "minimax_m3": doubled(
        GOOD["minimax_m3"], inside(GOOD["minimax_m3"], "]<]minimax[>[<invoke", "</invoke>"), "\n"
    ),
}

# parser, what the model wrote, a part of the error
TWICE = f"<think>\nIs </think> the end?\n{GOOD['hermes']}\n</think>\n\nYes."
K3_END = "<|close|>response<|sep|><|close|>message<|sep|>"


BAD = [
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}\n</tool_call>',
        "Expecting ',' delimiter at its end",
    ),
    ("hermes", "<tool_call>\nadd(1, 2)\n</tool_call>", "not valid JSON"),
    ("hermes", "<tool_call>\n\n</tool_call>", "empty: a JSON object is missing"),
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
    (
        "hermes",
        '<tool_call>\n{"name": "say", "arguments": {"text": "a\nb"}}\n</tool_call>',
        r"must be written \n",
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>',
        "NaN is not a JSON value",
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "say", "arguments": {"text": "\\ud83d"}}\n</tool_call>',
        "half of a character",
    ),
    (
        "qwen3_coder",
        GOOD["qwen3_coder"].replace("\n1\n", "\n{1, 2}\n"),
        "plain values",
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "add", "argu',
        "cut off: no </tool_call> before the turn ended",
    ),
    (
        "hermes",
        f'<tool_call>\n{{"name": "add"\n{GOOD["hermes"]}',
        "cut off: no </tool_call> before the next",
    ),
    (
        "hermes",
        '{"name": "add", "arguments": {}}\n</tool_call>',
        "</tool_call> without <tool_call>",
    ),
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
    (
        "glm",
        "<tool_call>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "name must stand",
    ),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>", "without its <arg_value>"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_va", "cut off"),
    ("deepseek", GOOD["deepseek"].replace("```json", ""), "```json"),
    ("deepseek", GOOD["deepseek"].replace("}", ""), "not valid JSON"),
    (
        "deepseek",
        GOOD["deepseek"].replace("<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ""),
        "cut off",
    ),
    ("deepseek", GOOD["deepseek"].replace("<｜tool▁calls▁end｜>", ""), "cut off"),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>",
        "no <｜tool▁call▁begin｜> in the list",
    ),
    (
        "mistral",
        '[TOOL_CALLS] {"name": "add", "arguments": {}}',
        "a JSON list of calls must follow",
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "argum', "string starting at character"),
    ("mistral", '[TOOL_CALLS] [{"name": "say", "arguments": {"text": "add"', "not valid JSON"),
    ("mistral", "[TOOL_CALLS]add[ARGS]{", "not valid JSON"),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}}]', '"name" is missing'),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1', "not valid JSON"),
    ("llama3_json", '<|python_tag|>{"parameters": {"a": 1}}', '"name" is missing'),
    ("llama3_json", '{"name": "add", "parameters": "1, 2"}', "must be a JSON object, not a string"),
    ("llama3_json", '{"name": "add", "parameters": {"a": NaN, "b": 2}}', "finite numbers"),
    ("hermes", GOOD["hermes"].replace("1", "1e999", 1), "finite numbers"),
    ("llama3_pythonic", "[add(a=1, b=2", "not valid Python"),
    ("llama3_pythonic", "[add(1, 2)]", "with their names"),
    ("llama3_pythonic", "[add(a=open('x'))]", "plain values"),
    ("llama3_pythonic", "[add(a=b'x')]", "plain values"),
    ("llama3_pythonic", "[add(a={(1, 2): 3})]", "plain values"),
    (
        "llama4",
        '<|python_start|>Hm.<|python_end|>{"name": "add", "parameters": {"a": 1',
        "not valid JSON",
    ),
    ("llama4", "[add(a=1, b=2", "not valid Python"),
    ("lfm2", "<|tool_call_start|>[add(a=1, b=2)]", "cut off: no <|tool_call_end|>"),
    ("lfm2", "[add(a=1, b=2)]<|tool_call_end|>", "without <|tool_call_start|>"),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "the list of calls is empty"),
    (
        "kimi_k2",
        GOOD["kimi_k2"].replace("<|tool_calls_section_end|>", ""),
        "cut off: no <|tool_calls_section_end|>",
    ),
    (
        "kimi_k2",
        GOOD["kimi_k2"].replace("<|tool_call_argument_begin|>", ""),
        "must stand before the arguments",
    ),
    ("kimi_k2", GOOD["kimi_k2"].replace("}", ""), "not valid JSON"),
    ("kimi_k3", GOOD["kimi_k3"].replace("1<|close|>argument<|sep|>", "1"), 'value of "a"'),
    (
        "kimi_k3",
        GOOD["kimi_k3"].replace("2<|close|>argument<|sep|>", "2"),
        "without its key, type and end",
    ),
    (
        "kimi_k3",
        GOOD["kimi_k3"].replace('type="number"<|sep|>1', 'type="number"<|sep|>one'),
        'value of "a"',
    ),
    ("kimi_k3", GOOD["kimi_k3"].replace('add" index="1"<|sep|>', ""), "must begin a call"),
    (
        "kimi_k3",
        GOOD["kimi_k3"].replace("<|close|>call<|sep|><|close|>tools<|sep|>", ""),
        "cut off",
    ),
    ("harmony", " to=functions.add<|channel|>commentary js", "cut off: no <|message|>"),
    ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1', "not valid JSON"),
    (
        "harmony",
        ' to=functions.<|channel|>commentary json<|message|>{"a": 1}',
        "the tool's name must follow",
    ),
    ("gemma4", "<|tool_call>call:add{a:1,b:2", "cut off: no <tool_call|>"),
    ("gemma4", "<|tool_call>add(1, 2)<tool_call|>", "call:NAME"),
    ("gemma4", "<|tool_call>call:add{a:one,b:2}<tool_call|>", 'text must stand between two <|"|>'),
    ("gemma4", "<|tool_call>call:add{a:1 b:2}<tool_call|>", "Expecting ',' delimiter at"),
    ("gemma4", "<|tool_call>call:add{a:[1,b:2}<tool_call|>", "Expecting ',' delimiter at"),
    ("gemma4", "<|tool_call>call:add{a:1,,b:2}<tool_call|>", "Expecting property name at"),
    ("gemma4", "<|tool_call>call:add{a}<tool_call|>", "text must stand between"),
    ("gemma4", "<|tool_call>call:add{a:}<tool_call|>", "Expecting value at"),
    ("gemma4", '<|tool_call>call:say{text:<|"|>ab}<tool_call|>', 'not closed by <|"|>'),
    ("gemma4", "<|tool_call>call:add{a:1}}<tool_call|>", "Extra data at"),
    ("gemma4", f"<|tool_call>call:add{{a:{'[' * 10**5}}}<tool_call|>", "recursion"),
    (
        "gemma3_function",
        "<start_function_call>call:say{text:ab}<end_function_call>",
        "between two <escape>",
    ),
    ("deepseek_v32", GOOD["deepseek_v32"].replace("</｜DSML｜function_calls>", ""), "cut off"),
    (
        "deepseek_v32",
        GOOD["deepseek_v32"].replace(">1</｜DSML｜parameter>", ">1"),
        'the value of "a"',
    ),
    (
        "deepseek_v32",
        GOOD["deepseek_v32"].replace(">2</｜DSML｜parameter>", ">2"),
        "</｜DSML｜parameter> is missing",
    ),
    (
        "deepseek_v32",
        GOOD["deepseek_v32"].replace(">1<", ">one<"),
        'the value of "a" is not valid JSON',
    ),
    (
        "minimax_m2",
        GOOD["minimax_m2"].replace('name="add"', "add"),
        "</invoke> without <invoke name=",
    ),
    ("minimax_m2", GOOD["minimax_m2"].replace('name="add"', 'name="add'), "must begin a call"),
    ("minimax_m2", GOOD["minimax_m2"].replace("</invoke>", ""), "cut off"),
    (
        "minimax_m3",
        GOOD["minimax_m3"].replace("]<]minimax[>[</b>", ""),
        "]<]minimax[>[</b> is missing",
    ),
    ("minimax_m3", GOOD["minimax_m3"].replace("</a>", "</b>"), "must come before"),
    (
        "minimax_m3",
        GOOD["minimax_m3"].replace("]<]minimax[>[<a>", "so ]<]minimax[>[<a>"),
        "text beside elements",
    ),
]


def test_every_parser_has_golden_transcripts() -> None:
    assert set(GOOD) == set(SEVERAL) == set(TABLE) == {name for name, _, _ in BAD}


@pytest.mark.parametrize("name", GOOD)
def test_calls_and_answers(name: str) -> None:
    check_calls(name, GOOD[name], SEVERAL[name], OWN_IDS.get(name, "c00010000"))
    check_bad_arguments(name)
    check_time(name)


@pytest.mark.parametrize("name", sorted({*GOOD} - {"minimax_m3"}))
def test_nested_arguments_and_several_calls_survive_every_syntax(name: str) -> None:
    check_nested(name, BETWEEN.get(name, "\n"))


@pytest.mark.parametrize(("name", "text", "reason"), BAD)
def test_malformed_call_says_what_was_wrong_and_what_is_expected(
    name: str, text: str, reason: str
) -> None:
    check_malformed(name, text, reason)


@pytest.mark.parametrize(
    ("name", "head", "repeated", "tail"),
    [
        ("llama3_json", GOOD["llama3_json"], "9" * 5, ""),
        ("llama3_pythonic", "[f", ".a.a", "()]"),
        ("llama3_pythonic", "[", "f(),f(),", "]"),
        ("lfm2", "<|tool_call_start|>[f(", "x='" * 4, "<|tool_call_end|>"),
        ("qwen3_coder", "<tool_call><function=f>", "<parameter=x>" * 4, "</function></tool_call>"),
        ("minimax_m2", "<minimax:tool_call>" * 2, "</minimax:tool_call>" * 8, ""),
    ],
)
def test_an_absurdly_long_call_is_a_named_error(
    name: str, head: str, repeated: str, tail: str
) -> None:
    def read(count: int) -> None:
        assert parse_text(head + repeated * count + tail, load_parser(name), TOOLS).calls[-1].error

    assert exponent(read, 125) < 1.5


Call = tuple[str, dict[str, Any], None]
ONE: Call = ("add", ADD, None)


def nest(**arguments: Any) -> Call:
    return ("nest", arguments, None)


# parser, what the model wrote, the calls, the content
READ: list[tuple[str, str, list[Call], str]] = [
    ("hermes", f"Let me see.\n{GOOD['hermes']}\nDone.", [ONE], "Let me see.\nDone."),
    ("mistral", f"Hm.{GOOD['mistral']}", [ONE], "Hm."),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123xyz[ARGS]{"a": 1, "b": 2}', [ONE], ""),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        [ONE],
        "",
    ),
    (
        "lfm2",  # quotes and lines that its template does not escape
        "<|tool_call_start|>[say(text='it's\nhers, x='), add(a=1, b=2)]<|tool_call_end|>",
        [("say", {"text": "it's\nhers, x="}, None), ONE],
        "",
    ),
    (
        "qwen3_coder",  # Python's constants, where a template writes them
        "<tool_call>\n<function=nest>\n<parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{'k': None}\n</parameter>\n"
        "<parameter=s>\nTrue\n</parameter>\n<parameter=a>\n[1, 'x']\n</parameter>\n</function>\n</tool_call>",
        [nest(b=True, o={"k": None}, s="True", a=[1, "x"])],
        "",
    ),
    # thinking ends at its last closing tag, and calls inside of it do not count
    ("hermes", f"<think>\nmaybe {GOOD['hermes']}\n</think>\n\n{GOOD['hermes']}", [ONE],
     f"<think>\nmaybe {GOOD['hermes']}\n</think>\n\n"),
    ("hermes", f"<think>\n{GOOD['hermes']}", [], f"<think>\n{GOOD['hermes']}"),
    ("hermes", TWICE, [], TWICE),
    ("gemma4", f"<|channel>thought\nhm\n{GOOD['gemma4']}", [], ""),  # unfinished
    # markup around an answer is not content
    ("kimi_k3", f"42{K3_END}", [], "42"),
    ("kimi_k3", f"Hm.<|close|>think<|sep|><|open|>response<|sep|>42{K3_END}", [], "42"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls", "content"), READ)
def test_calls_are_read(name: str, text: str, calls: list[Call], content: str) -> None:
    parsed = parse_text(text, load_parser(name), [*TOOLS, NESTED])
    assert [(call.name, call.arguments, call.error) for call in parsed.calls] == calls
    assert parsed.content == content


@pytest.mark.parametrize(
    ("name", "tool", "arguments", "read"),
    [
        *(
            (name, "say", {"text": "12"}, {"text": "12"})
            for name in ("qwen3_coder", "glm", "minimax_m2", "minimax_m3")
        ),
        (
            "minimax_m3",
            "nest",
            {"s": "12", "o": {"k": [1, {"x": "y"}], "e": True}, "a": ["1", "two"], "b": False},
            {"s": "12", "o": {"k": [1, {"x": "y"}], "e": True}, "a": [1, "two"], "b": False},
        ),
        (
            "minimax_m3",
            "nest",
            {"s": "", "o": {}, "a": [], "b": True},
            {"s": "", "o": {}, "a": [], "b": True},
        ),
    ],
)
def test_types_are_taken_from_the_schema(
    name: str, tool: str, arguments: dict[str, Any], read: dict[str, Any]
) -> None:
    parser = load_parser(name)
    written = f"Hm.\n{parser.example(tool, arguments)}"
    (call,) = parse_text(written, parser, [*TOOLS, NESTED]).calls
    assert (call.arguments, call.error) == (read, None)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_schema_may_be_true_where_any_value_will_do(name: str) -> None:
    parameters = {"type": "object", "properties": {"v": True}, "required": ["v"]}
    tool: ToolSchema = {"function": {"name": "put", "parameters": parameters}}
    parser = load_parser(name)
    (call,) = parse_text(parser.example("put", {"v": [1]}), parser, [tool]).calls
    assert (call.arguments, call.error) == ({"v": [1]}, None)
    (bad,) = parse_text(parser.example("put", {}), parser, [tool]).calls
    assert bad.error is not None and parser.example("put", {"v": "..."}) in bad.error


def test_a_text_beside_other_types_stays_a_text_unless_it_is_one_of_them() -> None:
    text, null = {"type": "string"}, {"type": "null"}
    properties: dict[str, Any] = {
        "a": {"type": ["string", "null"]},
        "b": {"anyOf": [text, null]},
        "c": {"type": ["string", "number"]},
        "d": {"anyOf": [text, {"$ref": "#/$defs/n"}]},
        "e": {"anyOf": [text, True]},
        "f": {"enum": ["2024", "true"]},
    }
    parameters = {"type": "object", "properties": properties, "$defs": {"n": {"type": "integer"}}}
    tool: ToolSchema = {"function": {"name": "put", "parameters": parameters}}
    for name in ("qwen3_coder", "glm", "minimax_m2"):
        parser = load_parser(name)
        for written, read in (
            ("2024", ["2024", "2024", 2024, 2024, 2024, "2024"]),
            ("true", ["true", "true", "true"]),
            ("null", [None, None]),
            ("None", [None, None]),
            ("[1]", ["[1]", "[1]", "[1]"]),
            ('"7"', ["7", "7", "7", "7", "7"]),
            ("so", ["so", "so", "so", "so", "so"]),
        ):
            given = parser.example("put", dict.fromkeys("abcdef"[: len(read)], "qq"))
            (call,) = parse_text(given.replace("qq", written), parser, [tool]).calls
            assert (call.arguments, call.error) == (dict(zip("abcdef", read, strict=False)), None)


def test_an_id_of_mistral_is_kept_where_templates_take_it() -> None:
    text = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "ID"}]'
    kept = {
        text.replace("ID", "abc123xyz"): "abc123xyz",
        text.replace("ID", "short"): "c00000000",  # templates reject all but nine letters
        '[TOOL_CALLS]add[CALL_ID]abc123xyz[ARGS]{"a": 1, "b": 2}': "abc123xyz",
    }
    for written, own in kept.items():
        parsed = parse_text(written, load_parser("mistral"), TOOLS)
        assert parsed.calls[0].id == parsed.message["tool_calls"][0]["id"] == own


def test_parser_names_and_detection() -> None:
    assert detect_parser("… <tool_call> …") == "hermes"
    assert detect_parser("no tools") == "hermes"
    with pytest.raises(NotFound) as caught:
        load_parser("hermse")
    assert "hermes" in caught.value.hint


def test_a_turn_with_half_of_a_character_is_rendered_again() -> None:
    chat, name = Chat(Tokenizer.load(bundled_model())), r'"\ud83d"'
    text = f'<tool_call>\n{{"name": {name}, "arguments": {{"a": {name}}}}}\n</tool_call>'
    parsed = chat.parse([*chat.tokenizer.encode(text), chat.stop_ids[0]], TOOLS)
    assert parsed.calls[0].name == "" and parsed.calls[0].arguments is None
    turn: list[Message] = [{"role": "user", "content": "hi"}, parsed.message]
    assert text in chat.decode(chat.rendered_ids(turn, TOOLS))


def test_ids_that_a_model_writes_twice_are_replaced() -> None:
    one = inside(GOOD["kimi_k2"], "<|tool_call_begin|>", "<|tool_call_end|>")
    calls = parse_text(SEVERAL["kimi_k2"], load_parser("kimi_k2"), TOOLS, turn=2).calls
    assert [call.id for call in calls] == ["c00020000", "c00020001"]
    other = GOOD["kimi_k2"].replace(one, one + one.replace("add:0", "add:1"))
    assert [c.id for c in parse_text(other, load_parser("kimi_k2"), TOOLS).calls] == [
        "functions.add:0",
        "functions.add:1",
    ]


# --- hostile and absurd texts are read in time proportional to their length ---


def echo(text: str) -> object:
    return without_echo(assistant_message(text, (), None))


@pytest.mark.parametrize("work", [drop_empty, drop_empty_lines, echo])
def test_white_space_is_read_in_linear_time(work: Callable[[str], object]) -> None:
    assert exponent(lambda n: work(" " * n + "x"), 1000) < 1.5


def test_names_of_tools_are_compared_in_linear_time() -> None:
    tools = [{"name": f"t{n}"} for n in range(16 * 400)]
    assert exponent(lambda n: read_tools(tools[:n]), 400) < 1.5
    with pytest.raises(RequestError, match="two functions named 't3'"):
        read_tools([*tools[:9], tools[3]])


LISTED = "Calling tools:\n[{'id': '1', 'function': {}}]"
EMPTY = "a \n<think> \n</think>\n\n</think> b <think>c</think>"


@pytest.mark.parametrize(
    ("work", "text", "wanted"),
    [
        (
            *(echo, f"I add.\n \n{LISTED} \n"),
            {**assistant_message("", (), None), "content": "I add."},
        ),
        *((echo, text, None) for text in (LISTED, "I add.", f"I add.\n{LISTED} and more")),
        (drop_empty, EMPTY, "ab <think>c"),
        (drop_empty_lines, EMPTY, "a\nb <think>c\n"),
    ],
)
def test_an_echo_of_calls_and_empty_thinking_are_taken_off(
    work: Callable[[str], object], text: str, wanted: object
) -> None:
    assert work(text) == wanted
