"""`Chat`: messages to token ids by the model's own template, as a prompt and as deltas; ids to tool calls.

The rule (DESIGN 3): ids are the truth. A prompt is rendered once; afterwards only deltas are appended (`delta.py`).
Sampled ids never pass through here; `parse` reads them and does not change them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from agentrl_cli.chat.delta import Encoder, render_delta
from agentrl_cli.chat.families import family_of
from agentrl_cli.chat.images import Images
from agentrl_cli.chat.parse import Parsed, parse_text
from agentrl_cli.chat.spans import Rendered, find_ends, join_renderings, locate
from agentrl_cli.chat.template import ChatTemplate
from agentrl_cli.chat.template_syntax import Tools, find_syntax
from agentrl_cli.chat.thinking import THINK
from agentrl_cli.chat.tokenizer import BaseTokenizer
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message, Origin, StopReason

PROMPTS = 64
"""Prompts that a Chat remembers."""


class Chat:
    """One tokenizer, its chat template and a tool-call parser.

    `append_only` accepts a template that cannot be extended by appending; `variables` are passed to the template.
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
        """`parser` "auto" detects the template's syntax; `images` if the model reads them.

        Raises TemplateError if the template cannot be used.
        """
        if not tokenizer.chat_template:
            raise TemplateError(
                "The tokenizer has no chat template.",
                hint="Use an instruction-tuned model, or for a base model"
                f" --set model.chat.template={family_of(tokenizer)}, or a Jinja file.",
            )
        self.tokenizer = tokenizer
        self.append_only = append_only
        self.images = images
        templates = ChatTemplate(
            tokenizer.chat_template,
            tokenizer.specials,
            with_tools=tokenizer.tool_template,
            variables=variables,
            now=now,
        )
        self.source = templates.source
        reserved = (
            [tokenizer.token_text(images.token), images.written] if images is not None else []
        )
        self.syntax = find_syntax(tokenizer, templates, parser, reserved)
        self.parser, self.able, self.stops = (
            self.syntax.parser,
            self.syntax.able,
            self.syntax.stops,
        )
        self._encoder = Encoder(tokenizer, images)
        self._prompt = lru_cache(PROMPTS)(
            lambda key: self.render(*json.loads(key), add_generation_prompt=True)
        )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn: the template's own first, then the tokenizer's end tokens."""
        return self.syntax.stop_ids

    @property
    def opens(self) -> str:
        """The opened thinking block at the end of the generation prompt; empty if it opens none."""
        return self.syntax.opens

    @cached_property
    def shows_images(self) -> bool:
        """True if the model reads images and the template writes those of tool results."""
        return self.images is not None and self.images.shows(self.extend)

    @cached_property
    def reads_images(self) -> bool:
        """True if the model reads images and the template writes those of users."""
        return self.images is not None and self.images.shows(self.extend, "user")

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> Rendered:
        """Return the whole of `messages` and the generation prompt, ready for the model's first turn.

        The latest ones are cached, as the members of a group share theirs: do not change the result.
        """
        try:
            key = json.dumps([messages, tools])
        except TypeError:  # not JSON
            return self.render(messages, tools, add_generation_prompt=True)
        return self._prompt(key)

    def rendered_ids(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Return the ids of `render` at a fraction of its cost, without origins and spans."""
        safe, safe_tools, hidden = self.syntax.guard.hide(messages, tools)
        text, plain = hidden.reveal(self.syntax.text(safe, safe_tools, add_generation_prompt))
        return self._encoder.encode(text, plain, messages)[0]

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Return a full rendering. The drift guard compares with this; training data never comes from it."""
        safe, safe_tools, hidden = self.syntax.guard.hide(messages, tools)
        text, plain = hidden.reveal(self.syntax.text(safe, safe_tools, add_generation_prompt))
        ids, offsets = self._encoder.encode(text, plain, messages)
        regions = locate(
            text, messages, lambda other: self.syntax.text(other, tools, add_generation_prompt)
        )
        ends = find_ends(
            text, safe, lambda n: hidden.reveal(self.syntax.text(safe[:n], safe_tools, False))[0]
        )
        return self._encoder.render(ids, offsets, messages, regions, ends, text)

    def extend(
        self,
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools = None,
        *,
        last_id: int | None = None,
    ) -> Rendered:
        """Return the delta after an assistant turn that ended by itself: separator, new messages, generation prompt.

        `messages_so_far` ends with the assistant's message and is not rendered again. `last_id` is the last token of
        the conversation so far; header-style templates (GLM) need it, because there the stop token already begins
        what follows. Raises TemplateError if the template refuses such messages.
        """
        if messages_so_far and messages_so_far[-1].get("role") != "assistant":
            raise TemplateError("A conversation is extended after an assistant turn only.")
        if (
            not self.able.lone_results
            and messages_so_far
            and not messages_so_far[-1].get("tool_calls")
        ):
            new_messages = [{**message, "lone": True} for message in new_messages]
        return render_delta(self.syntax, self._encoder, new_messages, tools, last_id)

    def close_turn(self, stop_reason: StopReason, ids: Sequence[int] = ()) -> list[int]:
        """Return tokens (origin FORCED) that close an assistant turn of `ids` which did not end with a stop token
        itself.
        """
        if (
            stop_reason is StopReason.STOP
            or not self.stops.closing
            or (len(ids) and int(ids[-1]) in self.stop_ids)
        ):
            return []
        return [*(self._before_stop if len(self.said(ids)) == len(ids) else []), self.stop_ids[0]]

    def parse(self, ids: Iterable[int], tools: Tools = None, *, turn: int = 0) -> Parsed:
        """Return the content and tool calls of an assistant turn's ids. Never raises.

        With `tools`, unknown names and invalid arguments become errors. `turn` makes the calls' ids unique.
        """
        text = self.decode(self.said([int(id_) for id_ in ids]))
        return parse_text(text, self.parser, tools, turn, opened=self.opens)

    def said(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids of an assistant turn without what ends it: the stop token, and a token that precedes it."""
        own = ids[:-1] if len(ids) and int(ids[-1]) in self.stop_ids else ids
        before = len(self._before_stop)
        return (
            own[: len(own) - before] if before and list(own[-before:]) == self._before_stop else own
        )

    @cached_property
    def _before_stop(self) -> list[int]:
        """The ids that the model samples before its stop token; empty for most."""
        return self.tokenizer.encode(self.stops.suffix) if self.stops.suffix.strip() else []

    def decode(self, ids: Iterable[int]) -> str:
        """Return the exact text of ids, control tokens included."""
        return self.tokenizer.decode(ids)

    def continuation(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the template's own ids, after a generation prompt, for an assistant message and what follows it.

        Sampled ids plus the deltas should equal this; the drift guard compares.
        Raises TemplateError if the template refuses, or begins assistant turns unlike its generation prompt.
        """
        text, plain = self.syntax.continuation(messages, tools, add_generation_prompt)
        return self._encoder.encode_after(self.stops.texts[0], text, plain, messages)

    def assistant_text(
        self, message: Message, tools: Tools = None, *, thinking: bool | None = None
    ) -> str:
        """Return the text that a model would have to sample for an assistant message, without its stop token.

        If the generation prompt opens a thinking block that the message lacks, the text closes it at once; `thinking`
        is whether it opens one (None: as after a user message).
        """
        return self.syntax.assistant_turn(message, tools, thinking)[0]

    def assistant_ids(
        self, message: Message | str, tools: Tools = None, *, thinking: bool | None = None
    ) -> list[int]:
        """Return the ids that a model would have to sample for an assistant turn, its stop token included.

        A string is the model's own text, markup and all.
        """
        text, plain = (
            (message, [])
            if isinstance(message, str)
            else self.syntax.assistant_turn(message, tools, thinking)
        )
        called = (
            bool(message.get("tool_calls"))
            if isinstance(message, dict)
            else bool(self.parser.parse(text).calls)
        )
        stop = self.stops.after_call if called and self.stops.after_call else self.stops.texts[0]
        stop_id = self.tokenizer.id_of(stop)
        ids = self._encoder.encode_after(self.stops.texts[0], text, plain)
        return ids if stop_id is None or (ids and ids[-1] in self.stop_ids) else [*ids, stop_id]

    def conversation(self, messages: Sequence[Message], tools: Tools = None) -> Rendered:
        """Return a whole demonstration as an episode has it: prompt, turns of origin MODEL (stop token included),
        deltas.

        Every assistant message counts as the model's. Without one it is the prompt.
        """
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        first = turns[0] if turns else len(messages)
        parts = [self.prompt(messages[:first], tools)]
        for at, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            opened = parts[-1].text.rstrip().endswith(THINK)
            ids = self.assistant_ids(messages[at], tools, thinking=opened)
            origin = [int(Origin.MODEL)] * len(ids)
            parts.append(Rendered(ids, origin, (("assistant", 0, len(ids)),)))
            if at + 1 < len(messages):
                more = messages[at + 1 : following]
                parts.append(self.extend(messages[: at + 1], more, tools, last_id=ids[-1]))
        return join_renderings(parts)
