"""Tool-call syntaxes: one file each. A newcomer's parser is one file, one line in `PARSERS`, golden transcripts.

A parser turns the text of an assistant turn into content and calls. It never raises: what is wrong with a call goes
into `ToolCall.error`, in words that tell the model what to change.
"""

from __future__ import annotations

from agentrl_cli.chat.parsers.base import ParsedText, Parser, choose_parser, detect_parser, load_parser, reads

PARSERS: dict[str, str] = {
    "deepseek": "agentrl_cli.chat.parsers.deepseek:PARSER",
    "glm": "agentrl_cli.chat.parsers.glm:PARSER",
    "hermes": "agentrl_cli.chat.parsers.hermes:PARSER",
    "llama3_json": "agentrl_cli.chat.parsers.llama3_json:PARSER",
    "llama3_pythonic": "agentrl_cli.chat.parsers.llama3_pythonic:PARSER",
    "mistral": "agentrl_cli.chat.parsers.mistral:PARSER",
    "qwen3_coder": "agentrl_cli.chat.parsers.qwen3_coder:PARSER",
}
"""Name to the module and object of a parser."""

__all__ = ["PARSERS", "ParsedText", "Parser", "choose_parser", "detect_parser", "load_parser", "reads"]
