"""Texts of a template to token ids, with whose they are."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_cli.chat.escaping import Range
from agentrl_cli.chat.images import Images
from agentrl_cli.chat.rendered import Rendered
from agentrl_cli.chat.spans import ORIGINS, Region, origins, spans
from agentrl_cli.chat.tokenizer import BaseTokenizer, Offsets
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
