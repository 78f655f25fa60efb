"""Golden transcripts of every tool-call syntax: good, several, malformed, truncated, and an answer without calls."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from agentrl_cli.chat.arguments import example_arguments
from agentrl_cli.chat.parse import is_malformed, parse_text
from agentrl_cli.chat.parsers import PARSERS, detect_parser, load_parser
from agentrl_cli.errors import NotFound
from tests.helpers.chat import schema
from tests.helpers.growth import exponent

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
    "muse_glimmer": ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n'
    '<atem:parameter name="a">1</atem:parameter>\n<atem:parameter name="b">2</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "hunyuan": "<tool_calls:opensource>\n<tool_call:opensource>add<tool_sep:opensource>\n"
    "<arg_key:opensource>a</arg_key:opensource>\n<arg_value:opensource>1</arg_value:opensource>\n"
    "<arg_key:opensource>b</arg_key:opensource>\n<arg_value:opensource>2</arg_value:opensource>\n"
    "</tool_call:opensource>\n</tool_calls:opensource>",
    "seed_oss": "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>2</parameter>\n"
    "</function>\n</seed:tool_call>",
    "minicpm": '<function name="add"><param name="a">1</param><param name="b">2</param></function>',
    "functionary_v31": '<function=add>{"a": 1, "b": 2}</function>',
    "functionary_v32": 'add\n{"a": 1, "b": 2}',
    "gigachat3": 'function call<|role_sep|>\n{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "gigachat3_1": '<|function_call|>{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "solar": "<|tool_calls|><|tool_call:begin|>x1<|tool_call:name|>add<|tool_call:args|>"
    '{"a": 1, "b": 2}<|tool_call:end|>',
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1, "b": 2}}\n]'
    "<|END_ACTION|>",
    "command_r": 'Action:\n```json\n[{"tool_name": "add", "parameters": {"a": 1, "b": 2}}]```',
    "tool_calls": '<tool_calls>[{"name": "add", "arguments": {"a": 1, "b": 2}}]</tool_calls>',
    "nemotron_v2": '<TOOLCALL>[{"name": "add", "arguments": {"a": 1, "b": 2}}]</TOOLCALL>',
    "apertus": '<|tools_prefix|>[{"add": {"a": 1, "b": 2}}]<|tools_suffix|>',
    "functools": 'functools[{"name": "add", "arguments": {"a": 1, "b": 2}}]',
}


def doubled(name: str, inner: str, between: str = "") -> str:
    """The good transcript with its part `inner` twice."""
    assert inner in GOOD[name]
    return GOOD[name].replace(inner, f"{inner}{between}{inner}")


def inside(name: str, opening: str, closing: str) -> str:
    """The part of a good transcript between two texts, these included."""
    text = GOOD[name]
    return text[text.index(opening) : text.index(closing) + len(closing)]


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
    "lfm2": doubled("lfm2", "add(a=1, b=2)", ", "),
    "kimi_k2": doubled("kimi_k2", inside("kimi_k2", "<|tool_call_begin|>", "<|tool_call_end|>")),
    "kimi_k3": doubled("kimi_k3", inside("kimi_k3", "<|open|>call", "<|close|>call<|sep|>")),
    "harmony": f"{GOOD['harmony']}<|call|><|start|>assistant{GOOD['harmony']}",
    "gemma4": f"{GOOD['gemma4']}{GOOD['gemma4']}",
    "gemma3_function": f"{GOOD['gemma3_function']}{GOOD['gemma3_function']}",
    "deepseek_v32": doubled(
        "deepseek_v32", inside("deepseek_v32", "<｜DSML｜invoke", "</｜DSML｜invoke>"), "\n"
    ),
    "minimax_m2": doubled("minimax_m2", inside("minimax_m2", "<invoke", "</invoke>"), "\n"),
    "minimax_m3": doubled(
        "minimax_m3", inside("minimax_m3", "]<]minimax[>[<invoke", "</invoke>"), "\n"
    ),
    "muse_glimmer": f"{GOOD['muse_glimmer']}<|eom|><|start|>assistant{GOOD['muse_glimmer']}",
    "hunyuan": doubled(
        "hunyuan", inside("hunyuan", "<tool_call:opensource>", "</tool_call:opensource>"), "\n"
    ),
    "seed_oss": f"{GOOD['seed_oss']}\n{GOOD['seed_oss']}",
    "minicpm": f"{GOOD['minicpm']}\n{GOOD['minicpm']}",
    "functionary_v31": f"{GOOD['functionary_v31']}{GOOD['functionary_v31']}",
    "functionary_v32": f"{GOOD['functionary_v32']}>>>{GOOD['functionary_v32']}",
    "gigachat3": f"{GOOD['gigachat3']}<|message_sep|>\n\n{GOOD['gigachat3']}",
    "gigachat3_1": f"{GOOD['gigachat3_1']}{GOOD['gigachat3_1']}",
    "solar": doubled("solar", inside("solar", "<|tool_call:begin|>", "<|tool_call:end|>")),
    "cohere": doubled("cohere", inside("cohere", "{", "}}"), ",\n"),
    "command_r": doubled("command_r", inside("command_r", "{", "}}"), ",\n"),
    "tool_calls": '<tool_calls>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
    '{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_calls>',
    "nemotron_v2": doubled("nemotron_v2", inside("nemotron_v2", "{", "}}"), ", "),
    "apertus": doubled("apertus", inside("apertus", "{", "}}"), ", "),
    "functools": doubled("functools", inside("functools", "{", "}}"), ", "),
}

# parser, what the model wrote, a part of the error
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
    ("mistral", '[TOOL_CALLS] [{"name": "add", "argum', "not valid JSON"),
    ("mistral", "[TOOL_CALLS]add[ARGS]{", "not valid JSON"),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}}]', '"name" is missing'),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1', "not valid JSON"),
    ("llama3_json", '<|python_tag|>{"parameters": {"a": 1}}', '"name" is missing'),
    ("llama3_json", '{"name": "add", "parameters": "1, 2"}', "must be a JSON object, not a string"),
    ("llama3_pythonic", "[add(a=1, b=2", "not valid Python"),
    ("llama3_pythonic", "[add(1, 2)]", "with their names"),
    ("llama3_pythonic", "[add(a=open('x'))]", "plain values"),
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
    ("gemma4", "<|tool_call>call:add{a:1 b:2}<tool_call|>", "text must stand between"),
    ("gemma4", "<|tool_call>call:add{a:[1,b:2}<tool_call|>", "text must stand between"),
    ("gemma4", "<|tool_call>call:add{a:1,}<tool_call|>", "an argument's name is missing"),
    ("gemma4", "<|tool_call>call:add{a}<tool_call|>", "a colon and its value must follow"),
    ("gemma4", "<|tool_call>call:add{a:}<tool_call|>", "a value is missing"),
    ("gemma4", '<|tool_call>call:say{text:<|"|>ab}<tool_call|>', 'not closed by <|"|>'),
    ("gemma4", "<|tool_call>call:add{a:1}}<tool_call|>", "there is text after the arguments"),
    ("gemma4", f"<|tool_call>call:add{{a:{'[' * 5000}}}<tool_call|>", "nested deeper than"),
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
    ("muse_glimmer", GOOD["muse_glimmer"].replace("</atem:invoke>", ""), "cut off"),
    ("hunyuan", GOOD["hunyuan"].replace("<tool_sep:opensource>", ""), "must stand right after"),
    (
        "hunyuan",
        GOOD["hunyuan"].replace("2</arg_value:opensource>", "2"),
        "a key without its value",
    ),
    ("seed_oss", GOOD["seed_oss"].replace("</function>", ""), "</function> is missing"),
    ("minicpm", GOOD["minicpm"].replace("2</param>", "2 "), "</param> is missing"),
    (
        "minicpm",
        GOOD["minicpm"].replace("</param></function>", "</param>so</function>"),
        "unexpected text 'so'",
    ),
    ("minicpm", '<function name="add><param name="a">1</param></function>', "must begin a call"),
    ("functionary_v31", '<function=add>{"a": 1, "b": 2}', "cut off: no </function>"),
    ("functionary_v31", "<function=>{}</function>", "must begin a call"),
    ("functionary_v32", 'add\n{"a": 1', "not valid JSON"),
    ("gigachat3", 'function call<|role_sep|>\n{"name": "add"}', '"arguments" is missing'),
    ("gigachat3_1", '<|function_call|>{"name": "add", "argum', "not valid JSON"),
    ("solar", GOOD["solar"].replace("<|tool_call:end|>", ""), "cut off"),
    ("solar", GOOD["solar"].replace("<|tool_call:name|>", ""), "must stand before the arguments"),
    ("cohere", GOOD["cohere"].replace("<|END_ACTION|>", ""), "cut off: no <|END_ACTION|>"),
    ("cohere", GOOD["cohere"].replace("tool_name", "name"), '"tool_name" is missing'),
    ("cohere", "<|START_ACTION|>[]<|END_ACTION|>", "the list of calls is empty"),
    ("command_r", GOOD["command_r"].replace("}}", "}"), "not valid JSON"),
    (
        "tool_calls",
        '{"name": "add", "arguments": {}}</tool_calls>',
        "</tool_calls> without <tool_calls>",
    ),
    (
        "nemotron_v2",
        '<TOOLCALL>["add"]</TOOLCALL>',
        'must be a JSON object with "name" and "arguments"',
    ),
    (
        "apertus",
        '<|tools_prefix|>[{"add": 1}]<|tools_suffix|>',
        "must be a JSON object, not an integer",
    ),
    ("apertus", "<|tools_prefix|>[{}]<|tools_suffix|>", "of one name and its arguments"),
    ("functools", 'functools[{"name": "add", "arguments": {"a": 1, "b": 2}', "not valid JSON"),
]


def test_every_parser_has_golden_transcripts() -> None:
    assert set(GOOD) == set(SEVERAL) == set(PARSERS) == {name for name, _, _ in BAD}


@pytest.mark.parametrize("name", PARSERS)
def test_good_call(name: str) -> None:
    parsed = parse_text(GOOD[name], load_parser(name), TOOLS, turn=1)
    (call,) = parsed.calls
    own = {
        "kimi_k2": "functions.add:0",
        "solar": "x1",
    }  # the model writes the id, and the result names it
    assert (call.name, call.arguments, call.error, call.id) == (
        "add",
        ADD,
        None,
        own.get(name, "c00010000"),
    )
    assert call.raw and call.raw in GOOD[name]
    assert parsed.content == ""
    assert parsed.message["tool_calls"][0]["function"] == {"name": "add", "arguments": ADD}


@pytest.mark.parametrize("name", PARSERS)
def test_several_calls(name: str) -> None:
    parsed = parse_text(SEVERAL[name], load_parser(name), TOOLS)
    assert [(call.name, call.arguments, call.error) for call in parsed.calls] == [
        ("add", ADD, None)
    ] * 2
    assert len({call.id for call in parsed.calls}) == 2


@pytest.mark.parametrize("name", PARSERS)
def test_an_answer_is_not_a_call(name: str) -> None:
    for text in ("", "It is 42.", "[1, 2]", '{"answer": 42}', "if a < b: return {}"):
        parsed = parse_text(text, load_parser(name), TOOLS)
        assert (parsed.content, parsed.calls) == (text, ())
        assert parsed.message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(("name", "text", "reason"), BAD)
def test_malformed_call_says_what_was_wrong_and_what_is_expected(
    name: str, text: str, reason: str
) -> None:
    parser = load_parser(name)
    parsed = parse_text(text, parser, TOOLS)
    call = next(call for call in parsed.calls if call.error)
    assert is_malformed(call)
    assert call.error is not None and reason in call.error
    assert call.error.startswith("Malformed tool call: ")
    shown = "say" if call.name == "say" else "add"
    assert call.error.endswith(
        parser.example(shown, {"text": "..."} if shown == "say" else {"a": 0, "b": 0})
    )
    assert parsed.message == {
        "role": "assistant",
        "content": text,
    }  # rendered again, it is what the model wrote


@pytest.mark.parametrize("name", PARSERS)
def test_the_example_parses(name: str) -> None:
    parser = load_parser(name)
    (call,) = parse_text(parser.example("say", {"text": "a 'b'"}), parser, TOOLS).calls
    assert (call.name, call.arguments, call.error) == ("say", {"text": "a 'b'"}, None)


@pytest.mark.parametrize("name", PARSERS)
def test_a_model_that_repeats_itself_is_read_in_time_and_never_raises(name: str) -> None:
    """Thousands of openings, none of them closed: no search to the text's end for each, and no recursion."""
    parser = load_parser(name)
    example = parser.example("say", {"text": "1"})
    start, _, end = example.rpartition("1")
    for marker in (*parser.markers, "".join(parser.markers[:2]), example):
        for head, tail in (("", ""), (start, ""), (start, end)):

            def read(count: int, marker: str = marker, head: str = head, tail: str = tail) -> None:
                for call in parse_text(head + marker * count + tail, parser, TOOLS).calls:
                    assert call.arguments is not None or call.error

            assert exponent(read, 200) < 1.5, (head, marker, tail)


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


def test_a_word_in_an_answer_is_not_a_call() -> None:
    text = "import functools\nfunctools.reduce(add, [1, 2])"
    assert parse_text(text, load_parser("functools"), TOOLS).calls == ()


@pytest.mark.parametrize("name", PARSERS)
def test_unknown_tool_and_bad_arguments(name: str) -> None:
    parser = load_parser(name)
    (unknown,) = parse_text(parser.example("ad", ADD), parser, TOOLS[::-1]).calls
    expected = parser.example("add", example_arguments(TOOLS[0]))
    assert (
        unknown.error == f'Bad tool call: unknown tool "ad"; did you mean add? Expected: {expected}'
    )
    assert unknown.arguments == ADD and not is_malformed(unknown)
    (missing,) = parse_text(parser.example("add", {"a": 1}), parser, TOOLS).calls
    assert missing.error is not None and 'argument "b" is missing' in missing.error
    (wrong,) = parse_text(parser.example("add", {"a": 1, "b": "two"}), parser, TOOLS).calls
    assert (
        wrong.error is not None
        and 'argument "b" must be an integer, not a string ("two")' in wrong.error
    )


def test_text_around_calls_is_content() -> None:
    parsed = parse_text(f"Let me see.\n{GOOD['hermes']}\nDone.", load_parser("hermes"), TOOLS)
    assert parsed.content == "Let me see.\nDone."
    assert parse_text(f"Hm.{GOOD['mistral']}", load_parser("mistral")).content == "Hm."


def test_calls_inside_thinking_do_not_count() -> None:
    hermes = load_parser("hermes")
    parsed = parse_text(
        f"<think>\nmaybe {GOOD['hermes']}\n</think>\n\n{GOOD['hermes']}", hermes, TOOLS
    )
    assert len(parsed.calls) == 1
    assert parsed.content.startswith("<think>\nmaybe")
    assert parse_text(f"<think>\n{GOOD['hermes']}", hermes, TOOLS).calls == ()


def test_string_arguments_stay_strings_in_xml() -> None:
    for name in (
        "qwen3_coder",
        "glm",
        "minimax_m2",
        "minimax_m3",
        "muse_glimmer",
        "hunyuan",
        "seed_oss",
        "minicpm",
    ):
        parser = load_parser(name)
        (call,) = parse_text(parser.example("say", {"text": "12"}), parser, TOOLS).calls
        assert call.arguments == {"text": "12"}


def test_newer_mistral_and_deepseek_forms() -> None:
    (call,) = parse_text(
        '[TOOL_CALLS]add[CALL_ID]abc123xyz[ARGS]{"a": 1, "b": 2}', load_parser("mistral"), TOOLS
    ).calls
    assert (call.name, call.arguments, call.error, call.id) == ("add", ADD, None, "abc123xyz")
    for id_, own in (
        ("abc123xyz", "abc123xyz"),
        ("short", "c00000000"),
    ):  # templates reject all but nine letters
        text = f'[TOOL_CALLS] [{{"name": "add", "arguments": {{"a": 1, "b": 2}}, "id": "{id_}"}}]'
        parsed = parse_text(text, load_parser("mistral"), TOOLS)
        assert parsed.calls[0].id == parsed.message["tool_calls"][0]["id"] == own
    text = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
    text = f"<｜tool▁calls▁begin｜>{text}<｜tool▁calls▁end｜>"
    (call,) = parse_text(text, load_parser("deepseek"), TOOLS).calls
    assert (call.name, call.arguments, call.error) == ("add", ADD, None)


def test_parser_names_and_detection() -> None:
    assert detect_parser("… <tool_call> …") == "hermes"
    assert detect_parser("no tools") == "hermes"
    with pytest.raises(NotFound) as caught:
        load_parser("hermse")
    assert "hermes" in caught.value.hint


BITS = [*"\"'\\{}[]<;=\n\ta1", "b c", "  ", "é", "日本", "</x>", "```", "null"]
NESTED = schema("nest", {"s": "string", "o": "object", "a": "array", "b": "boolean"})


@pytest.mark.parametrize("name", PARSERS)
def test_nested_arguments_and_several_calls_survive_every_syntax(name: str) -> None:
    """Any arguments that a syntax writes are read back unchanged."""
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

    if name == "minimax_m3":
        pytest.skip("it writes neither types nor empty values: it has a test of its own")
    one_block = {
        "mistral",
        "llama3_pythonic",
        "harmony",
    }  # several calls stand in one list: see SEVERAL
    between = {"llama3_json": "; ", "llama4": "; ", "functionary_v32": ">>>"}.get(name, "\n")
    for _ in range(100):
        count = 1 if name in one_block else random.randint(1, 3)
        every = [
            {
                "s": text(),
                "o": {text(): value(1)},
                "a": [value(1), value(1)],
                "b": random.random() < 0.5,
            }
            for _ in range(count)
        ]
        written = between.join(parser.example("nest", arguments) for arguments in every)
        parsed = parse_text(written, parser, [NESTED])
        assert [(c.name, c.arguments, c.error) for c in parsed.calls] == [
            ("nest", one, None) for one in every
        ]


def test_ids_that_a_model_writes_twice_are_replaced() -> None:
    one = inside("kimi_k2", "<|tool_call_begin|>", "<|tool_call_end|>")
    calls = parse_text(SEVERAL["kimi_k2"], load_parser("kimi_k2"), TOOLS, turn=2).calls
    assert [call.id for call in calls] == ["c00020000", "c00020001"]
    other = GOOD["kimi_k2"].replace(one, one + one.replace("add:0", "add:1"))
    assert [c.id for c in parse_text(other, load_parser("kimi_k2"), TOOLS).calls] == [
        "functions.add:0",
        "functions.add:1",
    ]


def test_lfm2_reads_quotes_and_lines_that_its_template_does_not_escape() -> None:
    text = "<|tool_call_start|>[say(text='it's\nhers, x='), add(a=1, b=2)]<|tool_call_end|>"
    calls = parse_text(text, load_parser("lfm2"), TOOLS).calls
    assert [(c.name, c.arguments, c.error) for c in calls] == [
        ("say", {"text": "it's\nhers, x="}, None),
        ("add", ADD, None),
    ]


def test_minimax_m3_takes_types_from_the_schema() -> None:
    arguments = {"s": "12", "o": {"k": [1, {"x": "y"}], "e": True}, "a": ["1", "two"], "b": False}
    parser = load_parser("minimax_m3")
    (call,) = parse_text(f"Hm.\n{parser.example('nest', arguments)}", parser, [NESTED]).calls
    assert (call.arguments, call.error) == ({**arguments, "a": [1, "two"]}, None)
    (call,) = parse_text(
        parser.example("nest", {"s": "", "o": {}, "a": [], "b": True}), parser, [NESTED]
    ).calls
    assert call.arguments == {"s": "", "o": {}, "a": [], "b": True}


def test_markup_around_an_answer_is_not_content() -> None:
    for name, text in (
        ("kimi_k3", "42<|close|>response<|sep|><|close|>message<|sep|>"),
        (
            "kimi_k3",
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>42<|close|>response<|sep|><|close|>message<|sep|>",
        ),
        ("muse_glimmer", " to=user<|message|>42"),
        ("solar", "<|content|>42"),
        ("functionary_v32", "all\n42"),
    ):
        parsed = parse_text(text, load_parser(name), TOOLS)
        assert (parsed.content, parsed.calls) == ("42", ())


def test_python_constants_are_read_where_a_template_writes_them() -> None:
    text = "<tool_call>\n<function=nest>\n<parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{'k': None}\n</parameter>\n"
    text += "<parameter=s>\nTrue\n</parameter>\n<parameter=a>\n[1, 'x']\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse_text(text, load_parser("qwen3_coder"), [NESTED]).calls
    assert (call.arguments, call.error) == (
        {"b": True, "o": {"k": None}, "s": "True", "a": [1, "x"]},
        None,
    )


@pytest.mark.parametrize(
    ("name", "thought", "answer"),
    [
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
            "<|channel|>final<|message|>Yes.",
        ),
        ("gemma4", "<|channel>thought\nhm\n<channel|>", "Yes."),
    ],
)
def test_thinking_with_markup_of_its_own_is_not_content(
    name: str, thought: str, answer: str
) -> None:
    parser = load_parser(name)
    called = parse_text(thought + GOOD[name], parser, TOOLS)
    assert [(call.name, call.arguments) for call in called.calls] == [("add", ADD)]
    assert (
        (called.content, called.thinking) == ("", "hm") == ("", called.message["reasoning_content"])
    )
    said = parse_text(thought + answer, parser, TOOLS)
    assert (said.content, said.thinking, said.calls) == ("Yes.", "hm", ())
    unended = parse_text(thought[:-4] + GOOD["gemma4"], parser, TOOLS) if name == "gemma4" else None
    assert unended is None or not unended.calls, "a call inside unfinished thinking does not count"
    assert "reasoning_content" not in parse_text(answer, parser, TOOLS).message
