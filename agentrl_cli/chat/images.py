"""Images in a conversation: the placeholders of a vision model, and tool results with images as messages.

The template writes one placeholder token for an image; the model needs as many as its processor makes of the image.
Counts are in the message (`types/content.py`), so a conversation renders to the same ids without the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import numpy as np

from agentrl_cli.chat.escaping import Range
from agentrl_cli.chat.media import FRAMES, frames_of, image_bytes
from agentrl_cli.chat.spans import Rendered
from agentrl_cli.chat.template_probe import assistant, tool, user
from agentrl_cli.chat.tokenizer import BaseTokenizer, MovedText, Offsets, overlaps
from agentrl_cli.errors import EnvError, PolicyError, TemplateError
from agentrl_cli.types import Message, ToolResult
from agentrl_cli.types.content import Layout, image_part, images_of, is_text

Measure = Callable[[bytes], tuple[int, int, int, Layout]]
"""(width, height, tokens, layout) of an image. Raises EnvError for bytes that are not an image."""

REFUSED = (
    "A tool returned an image, but this model reads text alone and would never see it. Let the tool describe the image"
    " in words, or use a vision-language model."
)


@dataclass(frozen=True, slots=True)
class Images:
    """A model that reads images.

    `token`: id of the placeholder, one for every patch of an image; `written`: the template's text for an image,
    if that is another token.
    """

    token: int
    measure: Measure
    written: str = ""

    def spell(
        self,
        text: str,
        plain: Sequence[Range],
        messages: Sequence[Message],
        tokenizer: BaseTokenizer,
    ) -> tuple[list[int], Offsets]:
        """Return the ids of a rendering, each image as its processor writes it; offsets are those in `text`.

        Raises TemplateError unless the rendering has one place for each image of the messages.
        """
        mark = tokenizer.token_text(self.token)
        parts = [part for message in messages for part in images_of(message)]
        pieces = [part.get("layout") or [("", part["tokens"])] for part in parts]
        places = [
            m.span()
            for m in re.finditer(re.escape(self.written or mark), text)
            if not overlaps(m.span(), plain)
        ]
        if len(places) != len(parts):
            raise TemplateError(
                f"The chat template writes {len(places)} places for {len(parts)} images.",
                hint="Use one that shows the images of tool results: --set model.chat.template=FILE.",
            )
        written = self.written or mark
        spelt = [
            "".join(words + mark * bool(count) for words, count in layout) for layout in pieces
        ]
        if all(new == written for new in spelt):
            ids, offsets = tokenizer.encode_offsets(text, plain)
        else:
            ids, offsets = _encode_replaced(text, plain, places, spelt, tokenizer)
        counts = iter([count for layout in pieces for _, count in layout if count])
        times = [next(counts, 1) if token == self.token else 1 for token in ids]
        return (
            list(chain.from_iterable(map(repeat, ids, times))),
            list(chain.from_iterable(map(repeat, offsets, times))),
        )

    def shows(
        self, extend: Callable[[Sequence[Message], Sequence[Message]], Rendered], role: str = "tool"
    ) -> bool:
        """Whether a template writes the images of tool results, or of another role's messages; `extend`: see Chat."""
        new = tool("") if role == "tool" else user("")
        before = [
            user("u"),
            assistant("", [("c00000000", "probe")]) if role == "tool" else assistant("a"),
        ]
        try:
            return (
                self.token in extend(before, [{**new, "content": [image_part(b"", 1, 1, 1)]}]).ids
            )
        except TemplateError:
            return False

    def mark(
        self, ids: Sequence[int], origins: Sequence[int], of: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Return the origins, those of the images filled in; `of`: (tokens, origin) of each image in order."""
        marked = np.asarray(origins, np.int64)
        marked[np.asarray(ids) == self.token] = [
            origin for count, origin in of for _ in range(count)
        ]
        return [int(origin) for origin in marked]


def _encode_replaced(
    text: str,
    plain: Sequence[Range],
    places: Sequence[Range],
    spelt: Sequence[str],
    tokenizer: BaseTokenizer,
) -> tuple[list[int], Offsets]:
    """Return the ids of a text with other texts at some places, and their offsets in the text as it was."""
    parts: list[str] = []
    moves, at, done = [(0, 0)], 0, 0
    shifted = []
    waiting = sorted(plain)
    for (start, end), new in [*zip(places, spelt, strict=True), ((len(text), len(text)), "")]:
        while waiting and waiting[0][0] < start:
            begin, stop = waiting.pop(0)
            shifted.append((begin - done + at, stop - done + at))
        parts += [text[done:start], new]
        moves += [(at + start - done, start), (at + start - done + len(new), end)]
        at, done = at + start - done + len(new), end
    ids, offsets = tokenizer.encode_offsets("".join(parts), shifted)
    back = MovedText(moves)
    return ids, [(back(begin), back(stop)) for begin, stop in offsets]


def place_images(
    messages: Sequence[Message],
    results: Sequence[ToolResult],
    images: Images | None,
    folder: Path | None = None,
    *,
    in_results: bool = True,
) -> tuple[list[Message], tuple[bytes, ...]]:
    """Return the messages whose images are named by hash and measured, and the images in order.

    Those of tool results come before the text, or, unless the template shows them `in_results`, in a user
    message after the results. Paths are relative to `folder`. Raises PolicyError if a prompt has images and the
    model reads none, EnvError if a tool's result has, or if an image cannot be read.
    """
    out: list[Message] = []
    pixels: list[bytes] = []
    later: list[Message] = []
    number = -1
    for message in messages:
        number += message["role"] == "tool"
        given = (
            results[number].images if message["role"] == "tool" and number < len(results) else ()
        )
        if given and images is None:
            raise EnvError(REFUSED)
        content = message.get("content")
        if given and images is not None:
            parts = [image_part(data, *images.measure(data)) for data in given]
            pixels += given
            if in_results:
                text = [{"type": "text", "text": content}] if content else []
                message = {**message, "content": [*parts, *text]}
            else:
                later += parts
        elif isinstance(content, list) and not all(map(is_text, content)):
            message, found = _measure_images(message, images, folder)
            pixels += found
        out.append(message)
    if any(result.images for result in results[number + 1 :]):
        raise EnvError("A tool returned an image with no tool message to show it in.")
    return [*out, *([{"role": "user", "content": later}] if later else [])], tuple(pixels)


def _measure_images(
    message: Message, images: Images | None, folder: Path | None
) -> tuple[Message, list[bytes]]:
    if images is None:
        raise PolicyError(
            f"A message of the {message['role']} has an image, and this model reads text alone.",
            hint="Use a vision-language model (docs/models.md), or rows without images.",
        )
    content: list[Message] = []
    pixels: list[bytes] = []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "video":
            found = frames_of(part.get("video"), folder, int(part.get("nframes") or FRAMES))
        elif kind in ("image", "image_url"):
            found = [image_bytes(part, folder)]
        elif kind == "text":
            content.append(part)
            continue
        else:
            raise EnvError(
                f"A message of the {message['role']} has a part of the kind {kind!r}: text, image or video."
            )
        content += [image_part(data, *images.measure(data)) for data in found]
        pixels += found
    return {**message, "content": content}, pixels
