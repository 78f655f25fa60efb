"""Images in a conversation: what a chat must know of a vision model, and tool results with images as messages.

The template writes one placeholder token for an image; the model needs as many as its processor makes of the image.
Counts are in the message (`types/content.py`), so a conversation renders to the same ids without the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np

from agentrl_cli.chat.rendered import Rendered
from agentrl_cli.chat.template_probe import assistant, tool, user
from agentrl_cli.chat.tokenizer import Offsets
from agentrl_cli.errors import EnvError, TemplateError
from agentrl_cli.types import Message, ToolResult
from agentrl_cli.types.content import image_part, images_of

Measure = Callable[[bytes], tuple[int, int, int]]
"""(width, height, tokens) of an image. Raises EnvError for bytes that are not an image."""

REFUSED = (
    "A tool returned an image, but this model reads text alone and would never see it. Let the tool describe the image"
    " in words, or use a vision-language model."
)


@dataclass(frozen=True, slots=True)
class Images:
    """A model that reads images. `token`: id of the placeholder, one for every patch of an image."""

    token: int
    measure: Measure

    def expand(self, ids: list[int], offsets: Offsets, messages: Sequence[Message]) -> tuple[list[int], Offsets]:
        """Ids with every placeholder repeated as often as its image needs, and their offsets.

        Raises TemplateError unless the rendering has one placeholder for each image of the messages.
        """
        counts = [int(part["tokens"]) for message in messages for part in images_of(message)]
        found = ids.count(self.token)
        if found != len(counts):
            raise TemplateError(
                f"The chat template writes {found} places for {len(counts)} images.",
                hint="Use one that shows the images of tool results: --set model.chat_template=FILE.",
            )
        left = iter(counts)
        times = [next(left) if token == self.token else 1 for token in ids]
        return (
            list(chain.from_iterable(map(repeat, ids, times))),
            list(chain.from_iterable(map(repeat, offsets, times))),
        )

    def shown(self, extend: Callable[[Sequence[Message], Sequence[Message]], Rendered]) -> bool:
        """True if a template writes the images of tool results; `extend`: see Chat."""
        answer: Message = {**tool(""), "content": [image_part(b"", 1, 1, 1)]}
        try:
            return self.token in extend([user("u"), assistant("", [("c00000000", "probe")])], [answer]).ids
        except TemplateError:
            return False

    def mark(self, ids: Sequence[int], origins: Sequence[int], of: Sequence[tuple[int, int]]) -> list[int]:
        """Origins, those of the images filled in; `of`: (tokens, origin) of each image in order."""
        marked = np.asarray(origins, np.int64)
        marked[np.asarray(ids) == self.token] = [origin for count, origin in of for _ in range(count)]
        return [int(origin) for origin in marked]


def pictured(
    messages: Sequence[Message], results: Sequence[ToolResult], images: Images | None
) -> tuple[list[Message], tuple[bytes, ...]]:
    """Tool messages with the images of their results before the text, as in verl; and the images in order.

    Raises EnvError if the model reads no images, or if one cannot be read.
    """
    out: list[Message] = []
    pixels: list[bytes] = []
    number = -1
    for message in messages:
        number += message["role"] == "tool"
        given = results[number].images if message["role"] == "tool" and number < len(results) else ()
        if given and images is None:
            raise EnvError(REFUSED)
        if given and images is not None:
            parts = [image_part(data, *images.measure(data)) for data in given]
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            message = {**message, "content": [*parts, *text]}
            pixels += given
        out.append(message)
    if any(result.images for result in results[number + 1 :]):
        raise EnvError("A tool returned an image with no tool message to show it in.")
    return out, tuple(pixels)
