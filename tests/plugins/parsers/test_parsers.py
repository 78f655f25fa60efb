"""Golden transcripts of the rarer tool-call syntaxes: good, several, malformed, cut off, answers without calls."""

import pytest

from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.parsers import all_parsers, load_parser
from agentrl_cli.plugins.parsers import OFFERS
from tests.chat import test_chat_families as families
from tests.chat import test_template_sweep as sweep
from tests.helpers.parsers import (
    TOOLS,
    check_bad_arguments,
    check_calls,
    check_malformed,
    check_nested,
    check_time,
    doubled,
    inside,
)

TABLE = OFFERS["syntaxes"]
OWN_IDS = {"solar": "x1"}  # the model writes the id, and the result names it
BETWEEN = {"functionary_v32": ">>>"}

GOOD = {
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


SEVERAL = {
    "muse_glimmer": f"{GOOD['muse_glimmer']}<|eom|><|start|>assistant{GOOD['muse_glimmer']}",
    "hunyuan": doubled(
        GOOD["hunyuan"],
        inside(GOOD["hunyuan"], "<tool_call:opensource>", "</tool_call:opensource>"),
        "\n",
    ),
    "seed_oss": f"{GOOD['seed_oss']}\n{GOOD['seed_oss']}",
    "minicpm": f"{GOOD['minicpm']}\n{GOOD['minicpm']}",
    "functionary_v31": f"{GOOD['functionary_v31']}{GOOD['functionary_v31']}",
    "functionary_v32": f"{GOOD['functionary_v32']}>>>{GOOD['functionary_v32']}",
    "gigachat3": f"{GOOD['gigachat3']}<|message_sep|>\n\n{GOOD['gigachat3']}",
    "gigachat3_1": f"{GOOD['gigachat3_1']}{GOOD['gigachat3_1']}",
    "solar": doubled(
        GOOD["solar"], inside(GOOD["solar"], "<|tool_call:begin|>", "<|tool_call:end|>")
    ),
    "cohere": doubled(GOOD["cohere"], inside(GOOD["cohere"], "{", "}}"), ",\n"),
    "command_r": doubled(GOOD["command_r"], inside(GOOD["command_r"], "{", "}}"), ",\n"),
    "tool_calls": '<tool_calls>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
    '{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_calls>',
    "nemotron_v2": doubled(GOOD["nemotron_v2"], inside(GOOD["nemotron_v2"], "{", "}}"), ", "),
    "apertus": doubled(GOOD["apertus"], inside(GOOD["apertus"], "{", "}}"), ", "),
    "functools": doubled(GOOD["functools"], inside(GOOD["functools"], "{", "}}"), ", "),
}

# parser, what the model wrote, a part of the error
BAD = [
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


def test_every_parser_has_golden_transcripts_and_published_templates() -> None:
    assert set(GOOD) == set(SEVERAL) == set(TABLE) == {name for name, _, _ in BAD}
    found = {sweep.chat_of(name).parser.name for name in sweep.OF_PLUGINS}
    assert set(TABLE) - found == {"gigachat3"}, "see PARTS"


@pytest.mark.parametrize("name", GOOD)
def test_calls_answers_and_nested_arguments(name: str) -> None:
    check_calls(name, GOOD[name], SEVERAL[name], OWN_IDS.get(name, "c00010000"))
    check_bad_arguments(name)
    check_time(name)
    check_nested(name, BETWEEN.get(name, "\n"))


@pytest.mark.parametrize(("name", "text", "reason"), BAD)
def test_malformed_call_says_what_was_wrong_and_what_is_expected(
    name: str, text: str, reason: str
) -> None:
    check_malformed(name, text, reason)


def test_texts_around_calls() -> None:
    for name, text in (
        ("muse_glimmer", " to=user<|message|>42"),
        ("solar", "<|content|>42"),
        ("functionary_v32", "all\n42"),
    ):
        parsed = parse_text(text, load_parser(name), TOOLS)
        assert (parsed.content, parsed.calls) == ("42", ())
    text = "import functools\nfunctools.reduce(add, [1, 2])"
    assert parse_text(text, load_parser("functools"), TOOLS).calls == (), "a word of an answer"
    for name, said in (
        *((name, "12") for name in ("muse_glimmer", "hunyuan", "seed_oss", "minicpm")),
        ("functionary_v32", ">>> f(1)\n>>>f"),
    ):
        parser = load_parser(name)
        (call,) = parse_text(parser.example("say", {"text": said}), parser, TOOLS).calls
        assert call.arguments == {"text": said}, "a string stays one"


@pytest.mark.parametrize("name", TABLE)
def test_a_template_of_the_syntax_is_found(name: str) -> None:
    assert name in {parser.name for parser in all_parsers()}
    families.check_detection(name)


@pytest.mark.parametrize("name", sorted(sweep.OF_PLUGINS))
async def test_the_templates_of_these_families(name: str) -> None:
    await sweep.check_template(name)
    assert sweep.chat_of(name).parser.name in TABLE or name.endswith("GigaChat3-10B-A1.8B")


@pytest.mark.parametrize(("source", "name"), families.OF_PLUGINS)
async def test_a_tool_episode_of_these_families(source: str, name: str) -> None:
    await families.check_episode(source, name, families.OF_PLUGINS[source, name])


async def test_what_a_training_of_solar_would_skip_is_said() -> None:
    await families.check_would_skip(families.CPP, "upstage-Solar-Open-100B", ["a malformed call"])
