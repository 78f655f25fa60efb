"""Contents of messages that hold images: a list of parts, as OpenAI's and Hugging Face's chats have them.

    {"type": "image", "image": "sha256:9f86…", "width": 640, "height": 480, "tokens": 391}
    {"type": "text", "text": "…"}

The bytes are in the `ToolResult` (and once in the store); a message names them by their hash, so that it stays small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

HASH = "sha256:"


def image_part(data: bytes, width: int, height: int, tokens: int) -> dict[str, Any]:
    """An image in a message; `tokens`: how many stand for it in the model's context."""
    digest = hashlib.sha256(data).hexdigest()
    return {"type": "image", "image": HASH + digest, "width": width, "height": height, "tokens": tokens}


def is_image(part: Any) -> bool:
    """Whether a part of a content is one of `image_part`'s."""
    return isinstance(part, dict) and part.get("type") == "image" and isinstance(part.get("tokens"), int)


def images_of(message: Any) -> list[dict[str, Any]]:
    """The image parts of a message, in order."""
    content = message.get("content")
    return [part for part in content if is_image(part)] if isinstance(content, list) else []


def content_text(content: Any) -> str:
    """A content for people and text-only readers: texts as they are, images as `[image 640x480 9f86d081]`."""
    if not isinstance(content, list):
        return str(content or "")
    return "\n".join(_texts(content))


def _texts(content: list[Any]) -> Iterator[str]:
    for part in content:
        if is_image(part):
            yield f"[image {part['width']}x{part['height']} {part['image'].removeprefix(HASH)[:8]}]"
        elif isinstance(part, dict) and part.get("text"):
            yield str(part["text"])


def media_type(data: bytes) -> str:
    """What kind of image the bytes are, by their first bytes; PNG if unknown."""
    starts = {b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp", b"BM": "image/bmp"}
    return next((kind for start, kind in starts.items() if data.startswith(start)), "image/png")
