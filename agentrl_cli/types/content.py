"""Contents of messages that hold images: a list of parts, as OpenAI's and Hugging Face's chats have them.

    {"type": "image", "image": "sha256:9f86…", "width": 640, "height": 480, "tokens": 391}
    {"type": "text", "text": "…"}

The bytes are in the `ToolResult` or the `Turn` (and once in the store); a message names them by their hash, so that it
stays small. `layout` is there if a processor writes more than placeholders for an image: texts, each with the number
of placeholders that follow it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

HASH = "sha256:"
Layout = Sequence[tuple[str, int]]
"""(text, number of placeholders after it) of an image; empty if it takes placeholders alone."""


def image_part(
    data: bytes, width: int, height: int, tokens: int, layout: Layout = ()
) -> dict[str, Any]:
    """Return an image in a message; `tokens`: how many placeholders stand for it in the model's context."""
    part = {
        "type": "image",
        "image": HASH + digest(data),
        "width": width,
        "height": height,
        "tokens": tokens,
    }
    return {**part, "layout": [list(piece) for piece in layout]} if layout else part


def digest(data: bytes) -> str:
    """Return the name of an image's bytes."""
    return hashlib.sha256(data).hexdigest()


def is_image(part: Any) -> bool:
    """Whether a part of a content is one of `image_part`'s."""
    return (
        isinstance(part, dict)
        and part.get("type") == "image"
        and isinstance(part.get("tokens"), int)
    )


def is_text(part: Any) -> bool:
    """Whether a part of a content is a text."""
    return isinstance(part, dict) and part.get("type") == "text"


def images_of(message: Any) -> list[dict[str, Any]]:
    """Return the image parts of a message, in order."""
    content = message.get("content")
    return [part for part in content if is_image(part)] if isinstance(content, list) else []


def content_text(content: Any) -> str:
    """Return a content for people and text-only readers: texts as they are, images as `[image 640x480 9f86d081]`."""
    if not isinstance(content, list):
        return str(content or "")
    texts = []
    for part in content:
        if is_image(part):
            name = part["image"].removeprefix(HASH)[:8]
            texts.append(f"[image {part['width']}x{part['height']} {name}]")
        elif isinstance(part, dict) and part.get("text"):
            texts.append(str(part["text"]))
    return "\n".join(texts)


def with_text(content: Any, text: str) -> Any:
    """Return a content with a text after it, a line between; one with parts gets another part."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": f"\n\n{text}"}]
    return "\n\n".join(filter(None, [str(content or ""), text]))


def media_type(data: bytes) -> str:
    """Return an image's media type by its first bytes; PNG if unknown."""
    starts = {
        b"\xff\xd8\xff": "image/jpeg",
        b"GIF8": "image/gif",
        b"RIFF": "image/webp",
        b"BM": "image/bmp",
    }
    return next((kind for start, kind in starts.items() if data.startswith(start)), "image/png")


def data_uri(data: bytes) -> str:
    """Return the image as a data: URL."""
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"
