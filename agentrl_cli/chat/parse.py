"""The text of an assistant turn to a message with tool calls. A call that cannot be executed carries its error.

A bad call never ends an episode: its `error`, with the form that is expected, becomes the observation.
Calls inside the model's thinking do not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from agentrl_cli.chat.arguments import example_arguments, validate_arguments
from agentrl_cli.chat.parsers import Parser, all_parsers, candidates, is_unmarked
from agentrl_cli.chat.thinking import THINK, THINK_END
from agentrl_cli.errors import nearest
from agentrl_cli.types import Message, ToolCall, ToolSchema


@dataclass(frozen=True, slots=True)
class Parsed:
    """An assistant turn, parsed. The ids that it came from are unchanged."""

    content: str
    """The text without its calls; the whole text if a call was malformed."""
    calls: tuple[ToolCall, ...]
    message: Message
    """The assistant message for the conversation. Malformed calls stay in its content, so that rendering it again
    gives what the model wrote. `reasoning_content` is `thinking`, if any."""
    thinking: str = ""
    """The model's thinking, if the parser's syntax has markup of its own for it (Gemma 4, gpt-oss)."""


def parse_text(
    text: str,
    parser: Parser,
    tools: Sequence[ToolSchema] | None = None,
    turn: int = 0,
    *,
    opened: str = "",
) -> Parsed:
    """Parse an assistant turn (no stop token). With `tools`, names and arguments are checked too. Never raises.

    `opened` is the thinking block that the generation prompt opened. If the turn closes it, the content begins with
    it: the message then contains the whole block, and no template adds an opening.
    """
    if opened and THINK_END in text and THINK not in text.partition(THINK_END)[0]:
        text = opened + text
    thinking, rest = _split_thinking(text)
    found = parser.parse(rest, tools or ())
    own = Counter(call.id for call in found.calls)
    calls = tuple(
        replace(
            _explain(_check(call, tools), parser, tools),
            id=call.id if own[call.id] == 1 and call.id else call_id(turn, number),
        )
        for number, call in enumerate(found.calls)
    )
    malformed = any(call.arguments is None for call in calls)
    content = text if malformed else thinking + found.content
    message: Message = {"role": "assistant", "content": content}
    if calls and not malformed:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    if found.thinking and not malformed:
        message["reasoning_content"] = found.thinking
    return Parsed(content, calls, message, found.thinking)


def call_id(turn: int, number: int) -> str:
    """Return nine letters and digits, as Mistral's template wants them; the same for the same place."""
    return f"c{turn % 10000:04d}{number % 10000:04d}"


def is_malformed(call: ToolCall) -> bool:
    """Whether the call's syntax is wrong, as opposed to an unknown tool or bad arguments."""
    return call.arguments is None


def foreign_parser(text: str, parsed: Parsed, own: Parser, tools: Sequence[ToolSchema]) -> str:
    """Return the parser that reads calls of a turn in which `own` read none: the model writes another family's syntax.

    `parsed` is the turn as `own` read it. A parser that reads a whole call comes first; if `own` found no call at all,
    one whose markers begin a malformed call counts too. Empty if there is none.
    """
    if not _any_marker().search(text):
        return ""
    others = [p for p in candidates(text) if p.name != own.name and not is_unmarked(p)]
    found = [(parser.name, parse_text(text, parser, tools).calls) for parser in others]
    whole = [name for name, calls in found if any(call.arguments is not None for call in calls)]
    begun = [name for name, calls in found if calls and not parsed.calls]
    return next(iter([*whole, *begun]), "")


@cache
def _any_marker() -> re.Pattern[str]:
    marked = (parser.markers for parser in all_parsers() if not is_unmarked(parser))
    texts = sorted({re.escape(marker) for markers in marked for marker in markers})
    return re.compile("|".join(texts))


def _split_thinking(text: str) -> tuple[str, str]:
    """Return the thinking at the start of a turn with its markers, and the rest.

    Unfinished thinking is all thinking.
    """
    head, mark, tail = text.rpartition(THINK_END)
    if mark:
        body = tail.lstrip("\n")
        return head + mark + tail[: len(tail) - len(body)], body
    if text.lstrip().startswith(THINK):
        return text, ""
    return "", text


def _check(call: ToolCall, tools: Sequence[ToolSchema] | None) -> ToolCall:
    if call.error or tools is None:
        return call
    schemas = {tool["function"]["name"]: tool for tool in tools}
    if call.name not in schemas:
        close = nearest(call.name, schemas, n=1)
        known = (
            f"did you mean {close[0]}?" if close else f"there are: {', '.join(schemas) or 'none'}"
        )
        return replace(call, error=f'unknown tool "{call.name}"; {known}')
    problem = validate_arguments(schemas[call.name], call.arguments or {})
    return replace(call, error=problem) if problem else call


def _explain(call: ToolCall, parser: Parser, tools: Sequence[ToolSchema] | None) -> ToolCall:
    """Return the error with its kind before it and the expected form after it."""
    if not call.error:
        return call
    schemas = {tool["function"]["name"]: tool for tool in tools or ()}
    name = next(
        iter([*nearest(call.name, schemas, n=1), *schemas]), ""
    )  # the tool that the error asks about
    example = parser.example(name or "NAME", example_arguments(schemas[name]) if name else {})
    what = "Malformed tool call" if call.arguments is None else "Bad tool call"
    stop = "" if call.error.endswith("?") else "."
    return replace(call, error=f"{what}: {call.error}{stop} Expected: {example}")
