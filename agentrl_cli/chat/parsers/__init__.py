"""Tool-call syntaxes: one file each. A newcomer's parser is one file, one line in `PARSERS`, golden transcripts.

A parser turns the text of an assistant turn into content and calls. It never raises: what is wrong with a call goes
into `ToolCall.error`, in words that tell the model what to change.
"""

from __future__ import annotations

from agentrl_cli.chat.parsers.base import ParsedText, Parser, candidates, detect_parser, load_parser, reads

PARSERS: dict[str, str] = {
    "apertus": "agentrl_cli.chat.parsers.json_lists:APERTUS",
    "cohere": "agentrl_cli.chat.parsers.json_lists:COHERE",
    "command_r": "agentrl_cli.chat.parsers.json_lists:COMMAND_R",
    "deepseek": "agentrl_cli.chat.parsers.deepseek:PARSER",
    "deepseek_v32": "agentrl_cli.chat.parsers.invoke:DEEPSEEK_V32",
    "functionary_v31": "agentrl_cli.chat.parsers.functionary:V31",
    "functionary_v32": "agentrl_cli.chat.parsers.functionary:V32",
    "functools": "agentrl_cli.chat.parsers.json_lists:FUNCTOOLS",
    "gemma3_function": "agentrl_cli.chat.parsers.gemma:FUNCTION_GEMMA",
    "gemma4": "agentrl_cli.chat.parsers.gemma:GEMMA4",
    "gigachat3": "agentrl_cli.chat.parsers.gigachat:GIGACHAT3",
    "gigachat3_1": "agentrl_cli.chat.parsers.gigachat:GIGACHAT31",
    "glm": "agentrl_cli.chat.parsers.glm:PARSER",
    "harmony": "agentrl_cli.chat.parsers.harmony:PARSER",
    "hermes": "agentrl_cli.chat.parsers.hermes:PARSER",
    "hunyuan": "agentrl_cli.chat.parsers.hunyuan:PARSER",
    "kimi_k2": "agentrl_cli.chat.parsers.kimi_k2:PARSER",
    "kimi_k3": "agentrl_cli.chat.parsers.kimi_k3:PARSER",
    "lfm2": "agentrl_cli.chat.parsers.llama3_pythonic:LFM2",
    "llama3_json": "agentrl_cli.chat.parsers.llama3_json:PARSER",
    "llama3_pythonic": "agentrl_cli.chat.parsers.llama3_pythonic:PARSER",
    "llama4": "agentrl_cli.chat.parsers.llama4:PARSER",
    "minicpm": "agentrl_cli.chat.parsers.minicpm:PARSER",
    "minimax_m2": "agentrl_cli.chat.parsers.invoke:MINIMAX_M2",
    "minimax_m3": "agentrl_cli.chat.parsers.minimax_m3:PARSER",
    "mistral": "agentrl_cli.chat.parsers.mistral:PARSER",
    "muse_glimmer": "agentrl_cli.chat.parsers.invoke:MUSE_GLIMMER",
    "nemotron_v2": "agentrl_cli.chat.parsers.json_lists:NEMOTRON_V2",
    "qwen3_coder": "agentrl_cli.chat.parsers.qwen3_coder:PARSER",
    "seed_oss": "agentrl_cli.chat.parsers.qwen3_coder:SEED",
    "solar": "agentrl_cli.chat.parsers.solar:PARSER",
    "tool_calls": "agentrl_cli.chat.parsers.json_lists:TOOL_CALLS",
}
"""Name to the module and object of a parser."""

__all__ = ["PARSERS", "ParsedText", "Parser", "candidates", "detect_parser", "load_parser", "reads"]
