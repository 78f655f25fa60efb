"""Conversations for templates that lack something: a system role, tool schemas, calls or results.

Gemma has no system role and no tools, Phi-3 and Llama-2 no tools, DeepSeek writes calls and results but no schemas.
Rendering probes shows the abilities of a template. The rest is written in a role that it has, the same way in a prompt,
a delta and a full rendering, so that an episode still extends by appending:

- a system message is put before the first user message,
- schemas are described in the system text, with the parser's own syntax as the example,
- calls are written in the assistant's content in that syntax,
- results are a user message, each in `<tool_response>` tags; or only those of malformed calls, which a template may not
  recognise as calls.

A template that can write everything, as those for agents can, gets the messages unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.chat.parsers.base import Parser
from agentrl_cli.chat.template_probe import (
    MARK,
    PROBE_TOOL,
    RESULT,
    RenderText,
    assistant,
    tool,
    user,
)
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message, ToolSchema

TOOLS_TEXT = """\
# Tools

You may call these functions; each line describes one as JSON Schema:
{schemas}

To call a function, write exactly this, with its name and arguments:
{example}"""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The parts of a conversation that a chat template writes by itself."""

    system: bool = True
    schemas: bool = True
    calls: bool = True
    results: bool = True
    lone_results: bool = True
    """Results after a turn without a call, as after a malformed one, are written like any others."""

    @property
    def all(self) -> bool:
        return self.system and self.schemas and self.calls and self.results and self.lone_results


def find_abilities(render: RenderText) -> Abilities:
    """Probe a template. One that refuses everything has no abilities, and raises when it is used."""

    def shows(
        word: str, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None
    ) -> bool:
        try:
            return word in render(messages, tools, True)
        except TemplateError:
            return False

    def tail(turn: Message) -> str | None:
        """Return the text after a result that follows this turn; None if the result is not written."""
        try:
            _, found, after = render(
                [user("u"), turn, tool(RESULT)], [PROBE_TOOL], True
            ).rpartition(RESULT)
        except TemplateError:
            return None
        return after if found else None

    call = assistant("", [("c00000000", "probe")])
    alone, after_call = tail(assistant("a")), tail(call)
    return Abilities(
        system=shows(MARK, [{"role": "system", "content": MARK}, user("u")]),
        schemas=shows("probe", [user("u")], [PROBE_TOOL]),
        calls=shows(MARK, [user("u"), call, tool("r")], [PROBE_TOOL])
        or shows(MARK, [user("u"), call], [PROBE_TOOL]),
        results=shows(RESULT, [user("u"), call, tool(RESULT)], [PROBE_TOOL]),
        lone_results=alone is not None and after_call in (None, alone),
    )


def adapt(
    messages: Sequence[Message], tools: Sequence[ToolSchema] | None, able: Abilities, parser: Parser
) -> tuple[list[Message], Sequence[ToolSchema] | None]:
    """Return messages and tools as a template of these abilities can write them."""
    if able.all:
        return list(messages), tools
    found = list(messages)
    if tools and not able.schemas:
        found = _describe_tools(found, tools, parser)
        tools = None
    if able.results and not able.lone_results:
        found = _move_results(found, only_lone=True)
    if not able.calls:
        found = [_write_calls(message, parser) for message in found]
    if not able.results:
        found = _move_results(found, only_lone=False)
    if not able.system:
        found = _merge_system(found)
    return found, tools


def _describe_tools(
    messages: list[Message], tools: Sequence[ToolSchema], parser: Parser
) -> list[Message]:
    """Return the tools at the end of the system text."""
    schemas = "\n".join(
        json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools
    )
    text = TOOLS_TEXT.format(schemas=schemas, example=parser.example("NAME", {"ARGUMENT": "VALUE"}))
    if messages and messages[0].get("role") == "system":
        return [_surround(messages[0], "", f"\n\n{text}"), *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _write_calls(message: Message, parser: Parser) -> Message:
    """Return an assistant message with its calls written in its content."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [parser.example(call["function"]["name"], _arguments(call)) for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content") or ""
    return {**rest, "content": "\n".join([*([content] if content else []), *texts])}


def _arguments(call: Message) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {"arguments": arguments}
    return dict(arguments)


def _move_results(messages: list[Message], only_lone: bool) -> list[Message]:
    """Return results as user messages, those of one turn together.

    `only_lone`: those after a turn without calls; Gemma 4 does not show them, MiniMax refuses them.
    """
    alone, previous, found = not only_lone, False, list[Message]()
    for message in messages:
        if only_lone and message.get("role") == "assistant":
            alone = not message.get("tool_calls")
        moves = alone and message.get("role") == "tool"
        content = message.get("content") or ""
        new = {"role": "user", "content": _tag_result(content)} if moves else message
        beside = moves or (previous and not only_lone)
        if beside and found and found[-1].get("role") == "user" == new.get("role"):
            text = _join(found[-1]["content"], "\n", new.get("content") or "")
            found[-1] = {**found[-1], "content": text}
        else:
            found.append(new)
        previous = moves
    return found


def _tag_result(content: Any) -> Any:
    return _join(_join("<tool_response>\n", "", content), "", "\n</tool_response>")


def _merge_system(messages: list[Message]) -> list[Message]:
    """Return the system text before the first user message, or as a user message of its own."""
    if not messages or messages[0].get("role") != "system":
        return messages
    text = messages[0].get("content") or ""
    if len(messages) > 1 and messages[1].get("role") == "user":
        return [
            {**messages[1], "content": _join(text, "\n\n", messages[1].get("content") or "")},
            *messages[2:],
        ]
    return [{"role": "user", "content": text}, *messages[1:]]


def _surround(message: Message, before: str, after: str) -> Message:
    content = message.get("content") or ""
    return {**message, "content": _join(_join(before, "", content), "", after)}


def _join(first: Any, between: str, second: Any) -> Any:
    """Return two contents as one: a text, or a list of parts if one of them is (images)."""
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second
    parts: list[Message] = []
    for content in (first, between, second):
        if content:
            parts += (
                [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            )
    return parts
