"""A chat template together with a parser: how turns begin and end, and the model's own text in one.

The parser belongs to it because its markers are not stop tokens, must not be written by anyone but the model, and are
how calls are written for a template that has none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, partial

from agentrl_cli.chat.escaping import Guard, Range
from agentrl_cli.chat.parsers import Parser, candidates, detect_parser, load_parser, reads
from agentrl_cli.chat.spans import shared_prefix
from agentrl_cli.chat.template import ModelTemplates
from agentrl_cli.chat.template_adapter import Abilities, adapt, find_abilities
from agentrl_cli.chat.template_probe import (
    MARK,
    PROBE_TOOL,
    RESULT,
    TEXT,
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

Tools = Sequence[ToolSchema] | None


class TemplateSyntax:
    """The text level of a chat. Everywhere `ask` adds the generation prompt."""

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        templates: ModelTemplates,
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
        write = partial(self.assistant_text, tools=[PROBE_TOOL], thinking=False)
        return reads(self.parser, find_called(self.text, write, self._end_pattern))

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

    def assistant_text(self, message: Message, tools: Tools, thinking: bool | None) -> str:
        """Return the text of `assistant_turn`."""
        return self.assistant_turn(message, tools, thinking)[0]

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

    @cached_property
    def _end_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.end_texts, key=len, reverse=True))))


def find_syntax(
    tokenizer: BaseTokenizer, templates: ModelTemplates, parser: str, reserved: Sequence[str] = ()
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
