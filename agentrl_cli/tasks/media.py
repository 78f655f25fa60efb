"""The images and videos of a row as parts of its prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_cli.chat.media import NAMES, image_link, is_image, video_link
from agentrl_cli.errors import DataError

Row = dict[str, Any]

PLACES = re.compile(r"(<image>|<video>)")
"""Where a text has the media of the prompt."""


def with_media(row: Row) -> Row:
    """Return a row whose `images` (or `image`) and `videos` are parts of its prompt.

    They fill the parts without content of their own, else the texts `<image>` and `<video>`, else stand before the
    text of the first user message. Raises DataError, and EnvError for media of another type.
    """
    images, videos = _as_list(row.pop("images", None)), _as_list(row.pop("videos", None))
    one = row.get("image")  # rows may have a text of their own there
    if is_image(one) or isinstance(one, bytes) or (isinstance(one, Mapping) and "bytes" in one):
        images.append(row.pop("image"))
    prompt = row.get("prompt")
    said: list[Any] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _as_list(prompt)
    )
    if (
        not images
        and not videos
        and not any(isinstance(m, dict) and isinstance(m.get("content"), list) for m in said)
    ):
        return row
    given: dict[str, list[Any]] = {
        "image": list(map(image_link, images)),
        "video": list(map(_video, videos)),
    }
    if not any(_places(message) for message in said):
        first = next(
            (n for n, m in enumerate(said) if isinstance(m, dict) and m.get("role") == "user"), None
        )
        if first is None and (images or videos):
            raise DataError("`images` or `videos` need a message of the user in the prompt.")
        if first is not None:
            parts = [{"type": kind} for kind, found in given.items() for _ in found]
            said[first] = {**said[first], "content": [*parts, *_parts(said[first]["content"])]}
    counts = {kind: sum(_places(message).count(kind) for message in said) for kind in given}
    for kind, found in given.items():
        if counts[kind] != len(found):
            raise DataError(f"the prompt has {counts[kind]} places for {len(found)} {kind}s.")
    rest = {kind: iter(found) for kind, found in given.items()}
    return {**row, "prompt": [_fill_media(message, rest) for message in said]}


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _video(value: Any) -> Row:
    """Return a part for a video: its link, and how many of its frames are shown (`nframes` or
    `max_frames` of the row).
    """
    options = value if isinstance(value, Mapping) else {}
    most = options.get("nframes") or options.get("max_frames")
    return {"video": video_link(value), **({"nframes": int(most)} if most else {})}


def _places(message: Any) -> list[str]:
    """Kinds of the media whose places a message has, in order."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return [text.strip("<>") for text in PLACES.findall(content)]
    return [p["type"] for p in _as_list(content) if isinstance(p, dict) and _empty(p)]


def _empty(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return kind in ("image", "video") and not any(part.get(name) for name in (*NAMES, "frames"))


def _parts(content: Any) -> list[Row]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _fill_media(message: Any, rest: Mapping[str, Iterator[Any]]) -> Any:
    """Return a message with its media as parts that JSON can hold."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and _places(message):
        pieces = [piece for piece in PLACES.split(content) if piece]
        marks = {"<image>": "image", "<video>": "video"}
        content = [
            {"type": marks[p]} if p in marks else {"type": "text", "text": p} for p in pieces
        ]
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part, rest) for part in content]}


def _part(part: Any, rest: Mapping[str, Iterator[Any]]) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("image", "video", "image_url"):
        return part
    if _empty(part):
        found = next(rest[kind])
        return {"type": "video", **found} if kind == "video" else {"type": "image", "image": found}
    return (
        {"type": "video", **_video(part)}
        if kind == "video"
        else {"type": "image", "image": image_link(part)}
    )
