"""Tool-call syntaxes, and which of them a chat template writes.

A parser splits the text of an assistant turn into content and calls. It never raises: the fault of a call goes
into `ToolCall.error`, in words from which the model can correct it. A new parser is an object, one line in `PARSERS`
and golden transcripts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from agentrl_cli.chat.parsers.base import ParsedText, Parser
from agentrl_cli.chat.template_probe import MARK, PROBE_TOOL
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers

PARSERS: dict[str, str] = {
    "deepseek": "agentrl_cli.chat.parsers.json_blocks:DEEPSEEK",
    "deepseek_v32": "agentrl_cli.chat.parsers.tags:DEEPSEEK_V32",
    "gemma3_function": "agentrl_cli.chat.parsers.gemma:FUNCTION_GEMMA",
    "gemma4": "agentrl_cli.chat.parsers.gemma:GEMMA4",
    "glm": "agentrl_cli.chat.parsers.tags:GLM",
    "harmony": "agentrl_cli.chat.parsers.json_blocks:HARMONY",
    "hermes": "agentrl_cli.chat.parsers.json_blocks:HERMES",
    "kimi_k2": "agentrl_cli.chat.parsers.json_blocks:KIMI_K2",
    "kimi_k3": "agentrl_cli.chat.parsers.tags:KIMI_K3",
    "lfm2": "agentrl_cli.chat.parsers.pythonic:LFM2",
    "llama3_json": "agentrl_cli.chat.parsers.pythonic:LLAMA3_JSON",
    "llama3_pythonic": "agentrl_cli.chat.parsers.pythonic:LLAMA3_PYTHONIC",
    "llama4": "agentrl_cli.chat.parsers.pythonic:LLAMA4",
    "minimax_m2": "agentrl_cli.chat.parsers.tags:MINIMAX_M2",
    "minimax_m3": "agentrl_cli.chat.parsers.tags:MINIMAX_M3",
    "mistral": "agentrl_cli.chat.parsers.json_blocks:MISTRAL",
    "qwen3_coder": "agentrl_cli.chat.parsers.tags:QWEN3_CODER",
}
"""Name to the module and object of a parser; plugins offer those of rarer families (`syntaxes`)."""

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
    return cast(Parser, resolve("parsers", {**PARSERS, **offers("syntaxes")}, name))


def all_parsers() -> list[Parser]:
    """Return the parsers that detection chooses from. Of several that read the same template, the first is chosen."""
    return [load_parser(name) for name in {**PARSERS, **offers("syntaxes")}]


def is_unmarked(parser: Parser) -> bool:
    """Whether a syntax has no required markers: the whole turn is the call."""
    return getattr(parser, "unmarked", False)


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
    marked = [parser for parser in all_parsers() if parser.markers and not is_unmarked(parser)]
    return [parser for parser in marked if set(parser.markers) <= set(tokens)]


def reads(parser: Parser, written: str) -> bool:
    """Whether a parser reads a turn in which a template called the tool `probe`."""
    calls = parser.parse(written, [PROBE_TOOL]).calls
    return [(call.name, call.arguments, call.error) for call in calls] == [
        ("probe", {"x": MARK}, None)
    ]


def candidates(written: str) -> list[Parser]:
    """Return the parsers with a marker in a turn that contains a call, and those without required markers."""
    return [
        parser
        for parser in all_parsers()
        if is_unmarked(parser) or any(marker in written for marker in parser.markers)
    ]


__all__ = [
    "PARSERS",
    "ParsedText",
    "Parser",
    "all_parsers",
    "candidates",
    "detect_parser",
    "is_unmarked",
    "load_parser",
    "parsers_of",
    "reads",
]
