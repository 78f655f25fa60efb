"""A chat template together with a parser: how turns begin and end, and the model's own text in one.

The parser belongs to it because its markers are not stop tokens, must not be written by anyone but the model, and are
how calls are written for a template that has none.

Some templates lack a system role, tool schemas, calls or results: Gemma has no system role and no tools, Phi-3 and
Llama-2 no tools, DeepSeek writes calls and results but no schemas. Rendering probes shows the abilities of a template.
The rest is written in a role that it has, the same way in a prompt, a delta and a full rendering, so that an episode
still extends by appending:

- a system message is put before the first user message,
- schemas are described in the system text, with the parser's own syntax as the example,
- calls are written in the assistant's content in that syntax,
- results are a user message, each in `<tool_response>` tags; or only those of malformed calls, which a template may not
  recognise as calls.

A template that can write everything, as those for agents can, gets the messages unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from agentrl_cli.chat.escaping import Guard, Range
from agentrl_cli.chat.parsers import Parser, candidates, detect_parser, load_parser, reads
from agentrl_cli.chat.spans import shared_prefix
from agentrl_cli.chat.template import ChatTemplate
from agentrl_cli.chat.template_probe import (
    MARK,
    PROBE_TOOL,
    RESULT,
    TEXT,
    RenderText,
    assistant,
    find_called,
    find_stops,
    tool,
    user,
)
from agentrl_cli.chat.thinking import THINK, THINK_END, without_given
from agentrl_cli.chat.tokenizer import BaseTokenizer, overlaps
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
    schemas = "\n".join(
        json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools
    )
    text = TOOLS_TEXT.format(schemas=schemas, example=parser.example("NAME", {"ARGUMENT": "VALUE"}))
    if messages and messages[0].get("role") == "system":
        both = _join(messages[0].get("content") or "", "", f"\n\n{text}")
        return [{**messages[0], "content": both}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _write_calls(message: Message, parser: Parser) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [parser.example(call["function"]["name"], _call_arguments(call)) for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content") or ""
    return {**rest, "content": "\n".join([*([content] if content else []), *texts])}


def _call_arguments(call: Message) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return dict(arguments) if isinstance(arguments, Mapping) else {"arguments": arguments}


def _move_results(messages: list[Message], only_lone: bool) -> list[Message]:
    """Return results as user messages, those of one turn together.

    `only_lone`: those after a turn without calls; Gemma 4 does not show them, MiniMax refuses them.
    """
    alone, previous, found = not only_lone, False, list[Message]()
    for message in messages:
        if only_lone and message.get("role") == "assistant":
            alone = not message.get("tool_calls")
        moves = alone and message.get("role") == "tool"
        tagged = _join("<tool_response>\n", "", message.get("content") or "")
        tagged = _join(tagged, "", "\n</tool_response>")
        new = {"role": "user", "content": tagged} if moves else message
        beside = moves or (previous and not only_lone)
        if beside and found and found[-1].get("role") == "user" == new.get("role"):
            text = _join(found[-1]["content"], "\n", new.get("content") or "")
            found[-1] = {**found[-1], "content": text}
        else:
            found.append(new)
        previous = moves
    return found


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


Tools = Sequence[ToolSchema] | None
NAME = "qzxname"
"""Stands for the name in a parser's example; not the name of any tool."""


class TemplateSyntax:
    """The text level of a chat. Everywhere `ask` adds the generation prompt."""

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        templates: ChatTemplate,
        able: Abilities,
        parser: Parser,
        reserved: Sequence[str] = (),
    ) -> None:
        """`reserved`: tokens that the model must not write either, such as an image's placeholder.

        Raises TemplateError if no special token ends an assistant turn.
        """
        self.tokenizer, self.templates, self.able, self.parser = tokenizer, templates, able, parser
        self.stops = find_stops(self.text, tokenizer, parser.markers)
        ends = [
            *self.stops.texts,
            self.stops.history,
            tokenizer.specials.get("eos_token", ""),
            *reserved,
        ]
        self.guard = Guard(tokenizer, templates.source + " ".join(parser.markers), ends)

    def text(self, messages: Sequence[Message], tools: Tools, ask: bool) -> str:
        """Return the template's text of a conversation, adapted to its abilities."""
        return self.templates.render(*adapt(messages, tools, self.able, self.parser), ask)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn: the template's own first, then the tokenizer's end tokens."""
        own = [self.tokenizer.id_of(text) for text in self.stops.texts]
        return tuple(
            dict.fromkeys([*(id_ for id_ in own if id_ is not None), *self.tokenizer.eos_ids])
        )

    @cached_property
    def opens(self) -> str:
        """The opened thinking block at the end of the generation prompt; empty if it opens none."""
        text = self.text([user("u")], None, True)
        return text[text.rindex(THINK) :] if text.rstrip().endswith(THINK) else ""

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """Texts that may stand where an assistant turn ends, followed by another message or not."""
        eos = self.tokenizer.specials.get("eos_token", "")
        return tuple(dict.fromkeys([*self.stops.texts, *([eos] if eos else [])]))

    @property
    def closing_texts(self) -> tuple[str, ...]:
        """Texts that an assistant turn may end with if the conversation continues after it."""
        return (*self.end_texts, *([self.stops.history] if self.stops.history else []))

    @cached_property
    def moves_text(self) -> bool:
        """Whether the template writes the text of a turn with calls behind their results, in one turn (Gemma 4)."""
        called = {**assistant("", [("c00000000", "probe")]), "content": TEXT}
        try:
            text = self.text([user("u"), called, tool(RESULT)], [PROBE_TOOL], True)
        except TemplateError:
            return False
        between = (
            text[text.find(MARK) :].partition(TEXT)[0] if MARK in text and TEXT in text else ""
        )
        return RESULT in between and self.stops.texts[0] not in between

    @cached_property
    def reads_calls(self) -> bool:
        """Whether the parser reads the calls that the template writes; True if it writes none."""
        if not self.able.calls:
            return True
        return reads(
            self.parser,
            find_called(
                self.text,
                lambda message: self.assistant_turn(message, [PROBE_TOOL], False)[0],
                self._end_pattern,
            ),
        )

    def continuation(
        self, messages: Sequence[Message], tools: Tools, ask: bool
    ) -> tuple[str, list[Range]]:
        """Return the text of an assistant message and what follows it, after the generation prompt; and its plain
        ranges.

        Raises TemplateError if the template refuses, or begins such turns unlike its generation prompt.
        """
        safe, safe_tools, hidden = self.guard.hide([user("u"), *messages], tools)
        start = self.text(safe[:1], safe_tools, True)
        full = self.text(safe, safe_tools, ask)
        if not full.startswith(start):
            start = without_given(start, full)
        if not full.startswith(start):
            at = shared_prefix(start, full)
            both = f"it asks with {start[at:][:40]!r} where the turn has {full[at:][:40]!r}"
            raise TemplateError(
                f"The chat template's generation prompt is not how its assistant turns begin: {both}."
            )
        return hidden.reveal(full[len(start) :])

    def assistant_turn(
        self, message: Message, tools: Tools, thinking: bool | None
    ) -> tuple[str, list[Range]]:
        """Return the text of an assistant turn up to its stop token, and its plain ranges; `thinking`: see Chat."""
        text, plain = self.continuation([message], tools, False)
        ends = [
            match.start()
            for match in self._end_pattern.finditer(text)
            if not overlaps(match.span(), plain)
        ]
        text = text[: ends[0]] if ends else text
        thinking = bool(self.opens) if thinking is None else thinking
        if not thinking or THINK_END in text:
            return text, plain
        closed = f"\n{THINK_END}\n\n"
        return closed + text, [(start + len(closed), end + len(closed)) for start, end in plain]

    def forced_text(self, schemas: Sequence[ToolSchema], choice: Any) -> str:
        """Return the text that a turn must begin with by a `tool_choice` as in OpenAI's API; empty for `none` and
        `auto`, and without tools.

        It is how the template writes a call. `required` forces a call and leaves its name to the model; naming a
        function forces the name too. Its tokens have the origin FORCED and are never trained.
        """
        name = choice.get("function", {}).get("name") if isinstance(choice, Mapping) else None
        if not schemas or (choice != "required" and name is None):
            return ""
        head, _, rest = self.parser.example(NAME, {}).partition(NAME)
        if name is not None:
            empty = rest.find("{}")
            head += str(name) + (rest[:empty] if empty >= 0 else rest[:1])
        # If the generation prompt opens a thinking block, close it: calls inside it do not count.
        return (f"\n{THINK_END}\n\n" if self.opens else "") + head

    @cached_property
    def _end_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.end_texts, key=len, reverse=True))))


def find_syntax(
    tokenizer: BaseTokenizer, templates: ChatTemplate, parser: str, reserved: Sequence[str] = ()
) -> TemplateSyntax:
    """Return the syntax with the parser of that name; with "auto" the first one that reads the template's calls.

    If none does, the one that the template's text suggests.
    """
    able = find_abilities(templates.render)
    make = partial(TemplateSyntax, tokenizer, templates, able, reserved=reserved)
    first = make(load_parser(detect_parser(templates.source) if parser == "auto" else parser))
    if parser != "auto":
        return first
    if not able.calls:
        added = {token.text for token in tokenizer.added}
        return make(load_parser(detect_parser(templates.source, added)))
    if first.reads_calls:
        return first
    others = (make(other) for other in candidates(find_called(first.text)))
    return next((syntax for syntax in others if syntax.reads_calls), first)
