"""Deltas: a template's text between the model's stop token and the next generation.

That is the separator after the stop token (`\\n` after `<|im_end|>`), the new messages and
the generation prompt. It is found by rendering a short dummy conversation that ends in a marked assistant turn,
followed by the new messages, and taking everything after that turn's stop token. It is encoded together with the stop
token before it, so its first merge is the one that a full rendering would have.

`Encoder` makes token ids of a template's texts, with whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_cli.chat.escaping import Range
from agentrl_cli.chat.images import Images
from agentrl_cli.chat.spans import ORIGINS, Region, Rendered, find_ends, locate, origins, spans
from agentrl_cli.chat.template_probe import MARK, assistant, user
from agentrl_cli.chat.template_syntax import TemplateSyntax, Tools
from agentrl_cli.chat.tokenizer import BaseTokenizer, Offsets
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message, Origin
from agentrl_cli.types.content import images_of


class Encoder:
    """A tokenizer, and the placeholders of images if the model reads them.

    Everywhere `plain` are the character ranges without markup, and `messages` are those that the text renders.
    """

    def __init__(self, tokenizer: BaseTokenizer, images: Images | None) -> None:
        self.tokenizer = tokenizer
        self.images = images

    def encode(
        self, text: str, plain: Sequence[Range], messages: Sequence[Message]
    ) -> tuple[list[int], Offsets]:
        """Return ids and offsets; each image is spelt as the model's processor writes it."""
        if self.images is None:
            return self.tokenizer.encode_offsets(text, plain)
        return self.images.spell(text, plain, messages, self.tokenizer)

    def encode_after(
        self, stop: str, text: str, plain: Sequence[Range], messages: Sequence[Message] = ()
    ) -> list[int]:
        """Return the ids of a text that follows `stop`: some tokenizers put a space at the start of a text."""
        shifted = [(start + len(stop), end + len(stop)) for start, end in plain]
        return self.encode(stop + text, shifted, messages)[0][1:]

    def render(
        self,
        ids: list[int],
        offsets: Offsets,
        messages: Sequence[Message],
        regions: Sequence[Region],
        ends: Sequence[int],
        text: str,
    ) -> Rendered:
        """Return the ids with their origins and spans. `regions` are contents, `ends` the messages' ends, in
        characters.
        """
        found = origins(offsets, regions, messages)
        if self.images is not None:
            own = [(m, ORIGINS.get(str(m.get("role")), Origin.USER)) for m in messages]
            counts = [(part["tokens"], int(origin)) for m, origin in own for part in images_of(m)]
            found = self.images.mark(ids, found, counts)
        return Rendered(ids, found, spans(messages, ends, offsets), text)


def render_delta(
    syntax: TemplateSyntax,
    encoder: Encoder,
    messages: Sequence[Message],
    tools: Tools,
    last_id: int | None,
) -> Rendered:
    """Return the delta of new messages after an assistant turn whose last token is `last_id`, which
    it does not repeat.
    """
    safe, safe_tools, hidden = syntax.guard.hide(messages, tools)
    text, plain = hidden.reveal(_after_turn(syntax, safe, safe_tools))
    stop = next(
        stop
        for stop in sorted(syntax.closing_texts, key=len, reverse=True)
        if text.startswith(stop)
    )
    stop_id = encoder.tokenizer.id_of(stop)
    ids, offsets = encoder.encode(text, plain, messages)
    if not ids or ids[0] != stop_id:
        raise TemplateError(f"The tokenizer does not keep the stop token {stop!r} in one piece.")
    regions = locate(text, messages, lambda other: _after_turn(syntax, other, tools))
    ends = find_ends(
        text, safe, lambda n: hidden.reveal(_after_turn(syntax, safe[:n], safe_tools, False))[0]
    )
    # Header style: the template's stop token begins the next message. Keep it if another one was sampled.
    keep = not syntax.stops.closing and last_id is not None and last_id != stop_id
    if not keep:
        ids, offsets = ids[1:], offsets[1:]
    return encoder.render(
        ids, offsets, messages, regions, ends, text if keep else text[len(stop) :]
    )


def _after_turn(
    syntax: TemplateSyntax, new: Sequence[Message], tools: Tools, ask: bool = True
) -> str:
    """Return the template's text from the stop token of a dummy assistant turn on."""
    results = [
        message for message in new if message.get("role") == "tool" and not message.get("lone")
    ]
    calls = [
        (str(m.get("tool_call_id") or "c00000000"), str(m.get("name") or "tool")) for m in results
    ]
    content = (
        "" if calls else MARK
    )  # with calls it is in the arguments: Gemma 4 writes content after the results
    for called in (
        calls,
        calls[:1],
    ):  # Llama 3 allows a single call in a turn; its results still render one by one
        try:
            text = syntax.text([user("u"), assistant(content, called), *new], tools, ask)
            break
        except TemplateError:
            if len(called) < 2:
                raise
    start = text.rfind(MARK) + len(MARK)
    places = [place for stop in syntax.closing_texts if (place := text.find(stop, start)) >= 0]
    if not places:
        raise TemplateError(
            "The chat template writes no stop token between an assistant turn and what follows."
        )
    return text[min(places) :]
