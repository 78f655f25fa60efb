"""The text of an assistant turn to a message with tool calls. A call that cannot be executed carries its error.

A bad call never ends an episode: its `error` becomes the observation, and says what was wrong and what is expected.
Calls inside the model's thinking are no calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl_cli.chat.arguments import example_arguments, validate_arguments
from agentrl_cli.chat.parsers.base import Parser
from agentrl_cli.errors import nearest
from agentrl_cli.types import Message, ToolCall, ToolSchema

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Parsed:
    """An assistant turn, read. The ids it came from are not touched."""

    content: str
    """The text without its calls; the whole text where a call was malformed."""
    calls: tuple[ToolCall, ...]
    message: Message
    """The assistant message for the conversation. Malformed calls stay in its content, so that rendering it again
    gives what the model wrote. `reasoning_content` holds `thinking`, where there is any."""
    thinking: str = ""
    """What was thought, where the parser's syntax has markup of its own for it (Gemma 4, gpt-oss)."""


def parse_text(
    text: str, parser: Parser, tools: Sequence[ToolSchema] | None = None, turn: int = 0, *, opened: str = ""
) -> Parsed:
    """Read an assistant turn (no stop token). With `tools` also names and arguments are checked. Never raises.

    `opened`: how the generation prompt opened a thinking block. Where the turn closes it, the content begins with it:
    so the message says what was thought, and a template does not take the opening for missing.
    """
    if opened and THINK_END in text and THINK not in text.partition(THINK_END)[0]:
        text = opened + text
    thinking, rest = _split_thinking(text)
    found = parser.parse(rest, tools or ())
    own = [call.id for call in found.calls]
    calls = tuple(
        replace(
            _explained(_checked(call, tools), parser, tools),
            id=call.id if own.count(call.id) == 1 and call.id else call_id(turn, number),
        )
        for number, call in enumerate(found.calls)
    )
    malformed = any(call.arguments is None for call in calls)
    content = text if malformed else thinking + found.content
    message: Message = {"role": "assistant", "content": content}
    if calls and not malformed:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    if found.thinking and not malformed:
        message["reasoning_content"] = found.thinking
    return Parsed(content, calls, message, found.thinking)


def call_id(turn: int, number: int) -> str:
    """Nine letters and digits, which is what Mistral's template asks for; the same for the same place."""
    return f"c{turn % 10000:04d}{number % 10000:04d}"


def is_malformed(call: ToolCall) -> bool:
    """True where the call's syntax is wrong, as against an unknown tool or bad arguments."""
    return call.arguments is None


def _split_thinking(text: str) -> tuple[str, str]:
    """The thinking at the start of a turn with its markers, and the rest. Unfinished thinking is all thinking."""
    head, mark, tail = text.rpartition(THINK_END)
    if mark:
        body = tail.lstrip("\n")
        return head + mark + tail[: len(tail) - len(body)], body
    if text.lstrip().startswith(THINK):
        return text, ""
    return "", text


def _checked(call: ToolCall, tools: Sequence[ToolSchema] | None) -> ToolCall:
    if call.error or tools is None:
        return call
    schemas = {tool["function"]["name"]: tool for tool in tools}
    if call.name not in schemas:
        close = nearest(call.name, schemas, n=1)
        known = f"did you mean {close[0]}?" if close else f"there are: {', '.join(schemas) or 'none'}"
        return replace(call, error=f'there is no tool "{call.name}"; {known}')
    problem = validate_arguments(schemas[call.name], call.arguments or {})
    return replace(call, error=problem) if problem else call


def _explained(call: ToolCall, parser: Parser, tools: Sequence[ToolSchema] | None) -> ToolCall:
    """The error with the class of the problem before it and the expected form after it."""
    if not call.error:
        return call
    schemas = {tool["function"]["name"]: tool for tool in tools or ()}
    name = call.name if call.name in schemas else next(iter(schemas), "")
    example = parser.example(name or "NAME", example_arguments(schemas[name]) if name else {})
    what = "Malformed tool call" if call.arguments is None else "Bad tool call"
    stop = "" if call.error.endswith("?") else "."
    return replace(call, error=f"{what}: {call.error}{stop} Expected: {example}")
