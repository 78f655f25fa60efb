"""Tool-call syntaxes, and which of them a chat template writes.

A parser splits the text of an assistant turn into content and calls. It never raises: what is wrong with a call goes
into `ToolCall.error`, in words that tell the model what to change. A new parser is an object, one line in `PARSERS`
and golden transcripts.
"""

from __future__ import annotations

from collections.abc import Collection

from agentrl_cli.chat.parsers.base import ParsedText, Parser
from agentrl_cli.chat.template_probe import MARK, PROBE_TOOL
from agentrl_cli.registry import resolve

PARSERS: dict[str, str] = {
    "apertus": "agentrl_cli.chat.parsers.json_lists:APERTUS",
    "cohere": "agentrl_cli.chat.parsers.json_lists:COHERE",
    "command_r": "agentrl_cli.chat.parsers.json_lists:COMMAND_R",
    "deepseek": "agentrl_cli.chat.parsers.json_blocks:DEEPSEEK",
    "deepseek_v32": "agentrl_cli.chat.parsers.tags:DEEPSEEK_V32",
    "functionary_v31": "agentrl_cli.chat.parsers.json_blocks:FUNCTIONARY_V31",
    "functionary_v32": "agentrl_cli.chat.parsers.functionary_v32:PARSER",
    "functools": "agentrl_cli.chat.parsers.json_lists:FUNCTOOLS",
    "gemma3_function": "agentrl_cli.chat.parsers.gemma:FUNCTION_GEMMA",
    "gemma4": "agentrl_cli.chat.parsers.gemma:GEMMA4",
    "gigachat3": "agentrl_cli.chat.parsers.json_blocks:GIGACHAT3",
    "gigachat3_1": "agentrl_cli.chat.parsers.json_blocks:GIGACHAT31",
    "glm": "agentrl_cli.chat.parsers.tags:GLM",
    "harmony": "agentrl_cli.chat.parsers.harmony:PARSER",
    "hermes": "agentrl_cli.chat.parsers.json_blocks:HERMES",
    "hunyuan": "agentrl_cli.chat.parsers.tags:HUNYUAN",
    "kimi_k2": "agentrl_cli.chat.parsers.json_blocks:KIMI_K2",
    "kimi_k3": "agentrl_cli.chat.parsers.tags:KIMI_K3",
    "lfm2": "agentrl_cli.chat.parsers.pythonic:LFM2",
    "llama3_json": "agentrl_cli.chat.parsers.llama_json:LLAMA3_JSON",
    "llama3_pythonic": "agentrl_cli.chat.parsers.pythonic:LLAMA3_PYTHONIC",
    "llama4": "agentrl_cli.chat.parsers.llama_json:LLAMA4",
    "minicpm": "agentrl_cli.chat.parsers.tags:MINICPM",
    "minimax_m2": "agentrl_cli.chat.parsers.tags:MINIMAX_M2",
    "minimax_m3": "agentrl_cli.chat.parsers.minimax_m3:PARSER",
    "mistral": "agentrl_cli.chat.parsers.mistral:PARSER",
    "muse_glimmer": "agentrl_cli.chat.parsers.tags:MUSE_GLIMMER",
    "nemotron_v2": "agentrl_cli.chat.parsers.json_lists:NEMOTRON_V2",
    "qwen3_coder": "agentrl_cli.chat.parsers.tags:QWEN3_CODER",
    "seed_oss": "agentrl_cli.chat.parsers.tags:SEED_OSS",
    "solar": "agentrl_cli.chat.parsers.json_blocks:SOLAR",
    "tool_calls": "agentrl_cli.chat.parsers.json_lists:TOOL_CALLS",
}
"""Name to the module and object of a parser. The order decides between parsers that read the same template."""

UNMARKED = ("llama3_json", "llama3_pythonic", "llama4", "functionary_v32")
"""Syntaxes without required markers: the whole turn is the call."""

DETECT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("harmony", ("<|channel|>", "functions.")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("gemma3_function", ("<start_function_call>",)),
    ("llama4", ("<|header_start|>", "<|python_start|>")),
    ("llama3_json", ("<|start_header_id|>", "parameters")),
)
"""Parser names and the texts that a chat template for their syntax contains; the first match wins. If that parser
cannot read what the template writes, one that can is used instead (`candidates`)."""


def load_parser(name: str) -> Parser:
    """Return a parser by name, `module:object` or entry point. Raises NotFound with the nearest name."""
    parser: Parser = resolve("parsers", PARSERS, name)
    return parser


def detect_parser(template: str, tokens: Collection[str] = ()) -> str:
    """Return the parser whose syntax a chat template writes, else the one whose markers are all in `tokens`, else
    hermes.

    `tokens`: texts of a tokenizer's added tokens. Pass them for a template that writes no calls: its model may write
    them between tokens that the template does not name.
    """
    for name, texts in DETECT:
        if all(text in template for text in texts):
            return name
    return next((parser.name for parser in parsers_of(tokens)), "hermes")


def parsers_of(tokens: Collection[str]) -> list[Parser]:
    """Return the parsers whose markers are all among a tokenizer's tokens: its model may write calls with those."""
    known = [load_parser(name) for name in PARSERS if name not in UNMARKED]
    return [parser for parser in known if parser.markers and set(parser.markers) <= set(tokens)]


def reads(parser: Parser, written: str) -> bool:
    """Whether a parser reads a turn in which a template called the tool `probe`."""
    calls = parser.parse(written, [PROBE_TOOL]).calls
    return [(call.name, call.arguments, call.error) for call in calls] == [
        ("probe", {"x": MARK}, None)
    ]


def candidates(written: str) -> list[Parser]:
    """Return the parsers with a marker in a turn that contains a call, and those without required markers."""
    every = [load_parser(name) for name in PARSERS]
    return [
        p for p in every if p.name in UNMARKED or any(marker in written for marker in p.markers)
    ]


__all__ = [
    "PARSERS",
    "UNMARKED",
    "ParsedText",
    "Parser",
    "candidates",
    "detect_parser",
    "load_parser",
    "parsers_of",
    "reads",
]
