"""`Chat`: messages to token ids by the model's own template, as a prompt and as deltas; ids to tool calls.

The rule (DESIGN 3): ids are the truth. A prompt is rendered once; afterwards only deltas are appended. A delta is
what the template writes between the model's stop token and the next generation: the separator that follows the stop
token (`\\n` after `<|im_end|>`, whose loss was verl#6921), the new messages, the generation prompt. It is found by
rendering a short dummy conversation that ends in a marked assistant turn, followed by the new messages, and taking
everything after that turn's stop token. It is encoded together with the stop token before it, so its first merge is
the one a full rendering would have.

What the model sampled never passes through here; `parse` reads it and leaves it as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from agentrl_cli.chat.escaping import Guard, Hidden, Range, within
from agentrl_cli.chat.images import Images
from agentrl_cli.chat.parse import THINK, THINK_END, Parsed, parse_text
from agentrl_cli.chat.parsers import Parser, candidates, detect_parser, load_parser, reads
from agentrl_cli.chat.rendered import Rendered, joined
from agentrl_cli.chat.spans import ORIGINS, Region, locate, origins, shared_prefix, spans
from agentrl_cli.chat.template import ChatTemplate
from agentrl_cli.chat.template_adapter import Abilities, adapted, find_abilities
from agentrl_cli.chat.template_probe import MARK, PROBE_TOOL, Stops, assistant, find_called, find_stops, user
from agentrl_cli.chat.thinking import without_given
from agentrl_cli.chat.tokenizer import BaseTokenizer, Offsets
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message, Origin, StopReason, ToolSchema
from agentrl_cli.types.content import images_of

if TYPE_CHECKING:
    from agentrl_cli.chat.audit import AuditReport, Conversations

Tools = Sequence[ToolSchema] | None
PROMPTS = 64
"""How many prompts a Chat remembers."""


class Chat:
    """One tokenizer, its chat template and a tool-call parser.

    `append_only` accepts a template that does not extend by appending; `variables` are handed to the template.
    """

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        parser: str = "hermes",
        append_only: bool = False,
        *,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        images: Images | None = None,
    ) -> None:
        """`parser` "auto" recognises the template's syntax; `images`: the model reads them.

        Raises TemplateError where the template cannot be used.
        """
        if not tokenizer.chat_template:
            raise TemplateError(
                "The tokenizer has no chat template.",
                hint="Take an instruction-tuned model, or give one: --set model.chat_template=FILE.",
            )
        self.tokenizer = tokenizer
        self.append_only = append_only
        self.images = images
        self._prompts: dict[str, Rendered] = {}
        self._audited: dict[Conversations, AuditReport] = {}
        now = now or datetime.now()
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.specials, variables=variables, now=now)
        source = tokenizer.tool_template or tokenizer.chat_template
        self._tool_template = ChatTemplate(source, tokenizer.specials, variables=variables, now=now)
        self.source = self._tool_template.source + self._template.source
        self.parser = load_parser(detect_parser(self.source) if parser == "auto" else parser)
        self.able = Abilities()
        self.able = find_abilities(self._text)
        self._use(self.parser)
        if parser == "auto" and not self.able.calls:
            specials = {token.text for token in tokenizer.added if token.special}
            self._use(load_parser(detect_parser(self.source, specials)))
        elif parser == "auto" and not self.reads_calls:
            self._choose()

    def _choose(self) -> None:
        """Take the first parser that reads what the template writes; the one that was recognised where none does."""
        first = self.parser
        for parser in [*candidates(find_called(self._text)), first]:
            self._use(parser)
            if self.reads_calls:
                return

    def _use(self, parser: Parser) -> None:
        """Take a parser: its markers are no stops, and nobody but the model may write them."""
        self.parser = parser
        for known in ("stop_ids", "_end_texts", "_end_pattern", "_called"):
            self.__dict__.pop(known, None)
        self.stops: Stops = find_stops(self._text, self.tokenizer, parser.markers)
        unsaid = [self.tokenizer.token_text(self.images.token)] if self.images is not None else []
        ends = [*self.stops.texts, self.stops.history, self.tokenizer.specials.get("eos_token", ""), *unsaid]
        markup = self.source + " ".join(parser.markers)
        self._guard = Guard(self.tokenizer, markup, ends)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn: the template's own first, then the tokenizer's end tokens."""
        own = [self.tokenizer.id_of(text) for text in self.stops.texts]
        return tuple(dict.fromkeys([*(id_ for id_ in own if id_ is not None), *self.tokenizer.eos_ids]))

    @property
    def supports_tools(self) -> bool:
        """True where the template itself writes tool schemas and tool results."""
        return self.able.results and self.able.schemas

    @property
    def reads_calls(self) -> bool:
        """True where the parser reads the calls that the template writes, where it writes any."""
        return not self.able.calls or reads(self.parser, self._called)

    @cached_property
    def shows_images(self) -> bool:
        """True where the model reads images and the template writes those of tool answers."""
        return self.images is not None and self.images.shown(self.extend)

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> Rendered:
        """The whole of `messages` and the generation prompt, ready for the model's first turn.

        The newest ones are remembered: the members of a group begin alike. Not to be changed.
        """
        try:
            key = json.dumps([messages, tools])
        except TypeError:  # something in it is no JSON
            return self.render(messages, tools, add_generation_prompt=True)
        found = self._prompts.pop(key, None) or self.render(messages, tools, add_generation_prompt=True)
        self._prompts[key] = found
        if len(self._prompts) > PROMPTS:
            self._prompts.pop(next(iter(self._prompts)))
        return found

    def rendered_ids(
        self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = False
    ) -> list[int]:
        """The ids of `render`, at a fraction of its cost: whose they are is not looked for."""
        safe, safe_tools, hidden = self._guard.hide(messages, tools)
        text, plain = hidden.reveal(self._text(safe, safe_tools, add_generation_prompt))
        return self._encode(text, plain, messages)[0]

    def render(
        self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = False
    ) -> Rendered:
        """A full rendering. The drift guard compares with this; training data never comes from it."""
        safe, safe_tools, hidden = self._guard.hide(messages, tools)
        text, plain = hidden.reveal(self._text(safe, safe_tools, add_generation_prompt))
        ids, offsets = self._encode(text, plain, messages)
        regions = locate(text, messages, lambda other: self._text(other, tools, add_generation_prompt))
        ends = self._ends(text, safe, safe_tools, hidden)
        return Rendered(ids, self._origins(ids, offsets, regions, messages), spans(messages, ends, offsets), text)

    def extend(
        self,
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools = None,
        *,
        last_id: int | None = None,
    ) -> Rendered:
        """What to append after the model's own stop token: separator, `new_messages`, generation prompt.

        `messages_so_far` ends with the assistant's message and is not rendered again. `last_id` is the last token of
        the conversation so far; header-style templates (GLM) need it, because there the stop token is already the
        start of what follows. Raises TemplateError where the template refuses such messages.
        """
        if messages_so_far and messages_so_far[-1].get("role") != "assistant":
            raise TemplateError("A conversation is extended after an assistant turn only.")
        if not self.able.lone_results and messages_so_far and not messages_so_far[-1].get("tool_calls"):
            new_messages = [{**message, "lone": True} for message in new_messages]
        safe, safe_tools, hidden = self._guard.hide(new_messages, tools)
        text, plain = hidden.reveal(self._after_turn(safe, safe_tools))
        stop = next(stop for stop in sorted(self._closed_by, key=len, reverse=True) if text.startswith(stop))
        stop_id = self.tokenizer.id_of(stop)
        ids, offsets = self._encode(text, plain, new_messages)
        if not ids or ids[0] != stop_id:
            raise TemplateError(f"The tokenizer does not keep the stop token {stop!r} in one piece.")
        regions = locate(text, new_messages, lambda other: self._after_turn(other, tools))
        ends = self._delta_ends(text, safe, safe_tools, hidden)
        keep = not self.stops.closing and last_id is not None and last_id != stop_id
        ids, offsets = (ids, offsets) if keep else (ids[1:], offsets[1:])
        origin = self._origins(ids, offsets, regions, new_messages)
        return Rendered(ids, origin, spans(new_messages, ends, offsets), text if keep else text[len(stop) :])

    def close_turn(self, stop_reason: StopReason, ids: Sequence[int] = ()) -> list[int]:
        """Tokens (origin FORCED) that close an assistant turn of `ids` which did not end by a stop token itself."""
        if stop_reason is StopReason.STOP or not self.stops.closing or (len(ids) and int(ids[-1]) in self.stop_ids):
            return []
        return [self.stop_ids[0]]

    def parse(self, ids: Iterable[int], tools: Tools = None, *, turn: int = 0) -> Parsed:
        """The content and tool calls of an assistant turn's ids, which stay as they are. Never raises.

        With `tools` also unknown names and bad arguments become errors. `turn` makes the calls' ids unique.
        """
        own = [int(id_) for id_ in ids]
        if own and own[-1] in self.stop_ids:
            own.pop()
        return parse_text(self.decode(own), self.parser, tools, turn, opened=self.opens)

    @cached_property
    def opens(self) -> str:
        """How the generation prompt opens a thinking block, at its end; empty where it opens none."""
        text = self._text([user("u")], None, True)
        return text[text.rindex(THINK) :] if text.rstrip().endswith(THINK) else ""

    def decode(self, ids: Iterable[int]) -> str:
        """The exact text of ids, control tokens included."""
        return self.tokenizer.decode(ids)

    def continuation(
        self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids that the template itself gives after a generation prompt for an assistant message and what follows.

        What a model sampled plus the deltas should equal this; the drift guard compares.
        Raises TemplateError where the template refuses, or its assistant turns begin unlike its generation prompt.
        """
        return self._encode_after_stop(*self._continuation(messages, tools, add_generation_prompt), messages)

    def assistant_text(self, message: Message, tools: Tools = None, *, thinking: bool | None = None) -> str:
        """The text a model would have to sample for an assistant message, without its stop token.

        Where the generation prompt opens a thinking block that the message lacks, the text closes it at once;
        `thinking` says whether it does (None: as after a user message).
        """
        return self._assistant(message, tools, thinking)[0]

    def assistant_ids(self, message: Message | str, tools: Tools = None, *, thinking: bool | None = None) -> list[int]:
        """The ids a model would have to sample for an assistant turn, its stop token included.

        A text is taken as the model's own writing, markup and all.
        """
        text, plain = (message, []) if isinstance(message, str) else self._assistant(message, tools, thinking)
        called = "tool_calls" in message if isinstance(message, dict) else bool(self.parser.parse(text).calls)
        stop = self.stops.after_call if called and self.stops.after_call else self.stops.texts[0]
        stop_id = self.tokenizer.id_of(stop)
        ids = self._encode_after_stop(text, plain)
        return ids if stop_id is None or (ids and ids[-1] in self.stop_ids) else [*ids, stop_id]

    def conversation(self, messages: Sequence[Message], tools: Tools = None) -> Rendered:
        """A whole demonstration as an episode holds it: prompt, turns of origin MODEL (stop token included), deltas.

        Every assistant message counts as the model's. Without an assistant message it is the prompt.
        """
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        first = turns[0] if turns else len(messages)
        parts = [self.prompt(messages[:first], tools)]
        for at, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            opened = parts[-1].text.rstrip().endswith(THINK)
            ids = self.assistant_ids(messages[at], tools, thinking=opened)
            parts.append(Rendered(ids, [int(Origin.MODEL)] * len(ids), (("assistant", 0, len(ids)),)))
            if at + 1 < following:
                parts.append(self.extend(messages[: at + 1], messages[at + 1 : following], tools, last_id=ids[-1]))
        return joined(parts)

    def audit(self, which: Conversations | None = None) -> AuditReport:
        """Whether this template can be trained with, and what is odd about it (`agentrl doctor --template`).

        `which`: of which conversations this is asked; None: of all.
        """
        from agentrl_cli.chat.audit import EVERY, audit

        asked = which or EVERY
        if asked not in self._audited:
            self._audited[asked] = audit(self, asked)
        return self._audited[asked]

    def require_append_only(self, which: Conversations | None = None) -> AuditReport:
        """The audit. Raises TemplateError with the reason where the template does not extend by appending."""
        from agentrl_cli.chat.audit import EVERY, require_append_only

        return require_append_only(self, which or EVERY)

    def _encode(
        self, text: str, plain: Sequence[Range], messages: Sequence[Message]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and offsets of a rendering of `messages`, the placeholders of their images repeated."""
        ids, offsets = self.tokenizer.encode_offsets(text, plain)
        return (ids, offsets) if self.images is None else self.images.expand(ids, offsets, messages)

    def _origins(
        self, ids: Sequence[int], offsets: Offsets, regions: Sequence[Region], messages: Sequence[Message]
    ) -> list[int]:
        found = origins(offsets, regions, messages)
        if self.images is None:
            return found
        own = [(m, ORIGINS.get(str(m.get("role")), Origin.USER)) for m in messages]
        return self.images.mark(ids, found, [(part["tokens"], int(o)) for m, o in own for part in images_of(m)])

    def _encode_after_stop(self, text: str, plain: Sequence[Range], messages: Sequence[Message] = ()) -> list[int]:
        """Ids of a text inside a conversation: no tokenizer shall take it for a text's start and put a space there."""
        stop = self.stops.texts[0]
        shifted = [(start + len(stop), end + len(stop)) for start, end in plain]
        return self._encode(stop + text, shifted, messages)[0][1:]

    def _text(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool) -> str:
        messages, tools = adapted(messages, tools, self.able, self.parser)
        template = self._tool_template if tools else self._template
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt)

    @cached_property
    def _called(self) -> str:
        """What the template itself writes in a turn with a call; "" where it writes none."""
        said = partial(self.assistant_text, tools=[PROBE_TOOL], thinking=False)
        return find_called(self._text, said, self._end_pattern) if self.able.calls else ""

    @cached_property
    def _end_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._end_texts, key=len, reverse=True))))

    @cached_property
    def _end_texts(self) -> tuple[str, ...]:
        """Texts a rendering may have where an assistant turn ends."""
        eos = self.tokenizer.specials.get("eos_token", "")
        return tuple(dict.fromkeys([*self.stops.texts, *([eos] if eos else [])]))

    @property
    def _closed_by(self) -> tuple[str, ...]:
        """Texts that a turn may end with in a rendering that goes on after it."""
        return (*self._end_texts, *([self.stops.history] if self.stops.history else []))

    def _assistant(self, message: Message, tools: Tools, thinking: bool | None) -> tuple[str, list[Range]]:
        """Text of an assistant turn up to its stop token, and its plain ranges."""
        text, plain = self._continuation([message], tools, False)
        ends = [match.start() for match in self._end_pattern.finditer(text) if not within(match.span(), plain)]
        text = text[: ends[0]] if ends else text
        thinking = bool(self.opens) if thinking is None else thinking
        if not thinking or THINK_END in text:
            return text, plain
        closed = f"\n{THINK_END}\n\n"
        return closed + text, [(start + len(closed), end + len(closed)) for start, end in plain]

    def _continuation(
        self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool
    ) -> tuple[str, list[Range]]:
        """Text after the generation prompt, and its plain ranges."""
        safe, safe_tools, hidden = self._guard.hide([user("u"), *messages], tools)
        start = self._text(safe[:1], safe_tools, True)
        full = self._text(safe, safe_tools, add_generation_prompt)
        if not full.startswith(start):
            start = without_given(start, full)
        if not full.startswith(start):
            at = shared_prefix(start, full)
            told = f"it asks with {start[at:][:40]!r} where the turn has {full[at:][:40]!r}"
            raise TemplateError(f"The chat template's generation prompt is not how its assistant turns begin: {told}.")
        return hidden.reveal(full[len(start) :])

    def _after_turn(self, new: Sequence[Message], tools: Tools, add_generation_prompt: bool = True) -> str:
        """The template's text from the stop token of a dummy assistant turn on."""
        results = [message for message in new if message.get("role") == "tool" and not message.get("lone")]
        calls = [(str(m.get("tool_call_id") or "c00000000"), str(m.get("name") or "tool")) for m in results]
        content = "" if calls else MARK  # in the arguments: Gemma 4 writes a turn's content behind its results
        for called in (calls, calls[:1]):  # Llama 3 allows a single call in a turn; its results still render one by one
            try:
                text = self._text([user("u"), assistant(content, called), *new], tools, add_generation_prompt)
                break
            except TemplateError:
                if len(called) < 2:
                    raise
        start = text.rfind(MARK) + len(MARK)
        places = [place for stop in self._closed_by if (place := text.find(stop, start)) >= 0]
        if not places:
            raise TemplateError("The chat template writes no stop token between an assistant turn and what follows.")
        return text[min(places) :]

    def _ends(self, text: str, messages: list[Message], tools: Tools, hidden: Hidden) -> list[int]:
        """Where each message ends in `text` (characters): the prefix that rendering shares with one cut there."""
        ends: list[int] = []
        for count in range(1, len(messages)):
            try:
                part = hidden.reveal(self._text(messages[:count], tools, False))[0]
                ends.append(max([shared_prefix(part, text), *ends[-1:]]))
            except TemplateError:
                ends.append(ends[-1] if ends else 0)
        return [*ends, len(text)]

    def _delta_ends(self, text: str, new: list[Message], tools: Tools, hidden: Hidden) -> list[int]:
        ends: list[int] = []
        for count in range(1, len(new)):
            if new[count].get("role") != new[count - 1].get("role"):
                part = hidden.reveal(self._after_turn(new[:count], tools, False))[0]
                ends.append(shared_prefix(part, text))
            else:
                ends.append(ends[-1] if ends else 0)  # spans join messages of one role: this end is not used
        return [*ends, len(text)]
