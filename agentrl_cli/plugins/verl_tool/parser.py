"""verl-tool's actions: texts with a tag or a fence for each tool. https://github.com/TIGER-AI-Lab/verl-tool

    <python>…</python>   or a fence of python     run_python
    <bash>…</bash>       or a fence of bash, sh, shell, terminal    bash
    <search>…</search>                            search
    <sql>…</sql>         or a fence of sql        sql
    <mcp_call>{"name": …, "arguments": {…}}</mcp_call>      the tool of that name

A tag calls the tool of its kind that is offered, with the text as the only argument that it requires. All blocks of
python, and all of bash, are one call; a fence of `input` beside them is its standard input.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, read_json
from agentrl_cli.types import ToolCall, ToolSchema

KINDS: dict[str, tuple[str, ...]] = {
    "python": ("run_python", "python", "python_code", "ipython_code"),
    "bash": ("bash", "bash_terminal"),
    "search": ("search", "search_retrieval"),
    "sql": ("sql",),
}
"""Tag to the names of tools that it may mean, the first that is offered counts."""
_FENCES = {"python": r"\n?python", "bash": r"\s*(?:bash|shell|sh|terminal)\b", "sql": r"\n?sql"}
_FENCED = {kind: re.compile(rf"```{names}") for kind, names in _FENCES.items()}


class VerlToolActions:
    """The parser; `agentrl tools serve` tries it after the syntax of `--parser`."""

    name = "verl_tool"
    markers = tuple(f"<{slash}{kind}>" for kind in (*KINDS, "mcp_call") for slash in ("", "/"))

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        """Return the calls of a text. Only tools that are offered are called."""
        offered = {str(tool["function"]["name"]): tool["function"] for tool in tools}
        calls: list[ToolCall] = []
        for kind, names in KINDS.items():
            name = next((name for name in names if name in offered), None)
            found = _find_blocks(text, re.compile(f"<{kind}>"), f"</{kind}>")
            if not found and kind in _FENCED:
                found = _find_blocks(text, _FENCED[kind], "```")
            if name is None or not found:
                continue
            blocks = [block.strip() for block in found]
            if kind in ("python", "bash"):
                blocks = [
                    "\n".join(
                        [
                            *_stdin(kind, _find_blocks(text, re.compile("```input\n"), "\n```")),
                            *blocks,
                        ]
                    )
                ]
            given = offered[name].get("parameters") or {}
            required = given.get("required") or list(given.get("properties") or {"text": {}})
            calls += [call(name, {str(required[0]): block}, raw=block) for block in blocks]
        calls += [
            _read_mcp_call(raw)
            for raw in _find_blocks(text, re.compile("<mcp_call>"), "</mcp_call>")
        ]
        return ParsedText(text if not calls else "", tuple(calls))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        kind = next((kind for kind, names in KINDS.items() if name in names), None)
        return (
            f"<{kind}>{next(iter(arguments.values()), '')}</{kind}>"
            if kind
            else '<mcp_call>{"name": …}</mcp_call>'
        )


def _find_blocks(text: str, opening: re.Pattern[str], closing: str) -> list[str]:
    """Return the blocks of a text, in time proportional to it: after one that is not closed, none can be."""
    found: list[str] = []
    at = 0
    while (start := opening.search(text, at)) and (end := text.find(closing, start.end())) >= 0:
        found.append(text[start.end() : end])
        at = end + len(closing)
    return found


def _stdin(kind: str, given: Sequence[str]) -> list[str]:
    """Return the lines of a program that set its standard input, which is the first of `given`."""
    if not given:
        return []
    value = given[0].strip()
    return (
        [f"exec <<< {shlex.quote(value)}"]
        if kind == "bash"
        else ["import io, sys", f"sys.stdin = io.StringIO({value!r})"]
    )


def _read_mcp_call(raw: str) -> ToolCall:
    value, error = read_json(raw.strip())
    name = value.get("name", value.get("tool")) if isinstance(value, dict) else None
    arguments = value.get("arguments", value.get("args", {})) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return call(
            raw=raw, error=error or "an <mcp_call> holds a JSON object with name and arguments"
        )
    return call(name, arguments, raw=raw)


PARSER = VerlToolActions()
