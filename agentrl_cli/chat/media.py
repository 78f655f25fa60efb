"""Images and videos as rows, tools and messages give them, as encoded bytes; a video as some of its frames.

An image is a PIL image, an array [height, width, 3] of bytes, encoded bytes, `{"bytes": …}` or `{"path": …}` (datasets'
form), a path or a `data:` URL. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl_cli.errors import EnvError, MissingDependency
from agentrl_cli.types.content import data_uri

FRAMES = 8
"""Frames of a video whose row does not name another number (`nframes`)."""
MOST_BYTES = 256 * 2**20
"""Largest file of an image or a video."""
MOST_FRAMES = 256
NAMES = ("image", "image_url", "url", "path", "video", "bytes")
"""Keys of a mapping under which an image or a video is."""


def is_image(value: Any) -> bool:
    """Whether a value is a PIL image, checked without importing PIL."""
    return type(value).__module__.startswith("PIL.") and hasattr(value, "save")


def image_bytes(value: Any, folder: Path | None = None) -> bytes:
    """Return an image as encoded bytes, a PIL image or an array as PNG; paths are relative to `folder`.

    Raises EnvError for anything else, for a file that cannot be read, and for an address in the network.
    """
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if hasattr(value, "__array_interface__") and not is_image(value):
        from PIL import Image

        try:
            value = Image.fromarray(value)
        except (TypeError, ValueError, AttributeError) as error:
            raise EnvError(f"An array is not an image: {error}") from error
    if is_image(value):
        out = io.BytesIO()
        value.save(out, format="PNG")
        return out.getvalue()
    if isinstance(value, Mapping):
        found = next((value[name] for name in reversed(NAMES) if value.get(name) is not None), None)
        return image_bytes(found, folder)
    if isinstance(value, str | Path):
        return _read_link(str(value), folder)
    raise EnvError(
        f"An image is a {type(value).__name__}; give a PIL image, bytes, a path or a data: URL."
    )


def image_size(data: bytes) -> tuple[int, int]:
    """Return width and height. Raises EnvError for other bytes."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as opened:
            return opened.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise EnvError(f"An image of {len(data)} bytes cannot be read: {error}") from error


def image_link(value: Any) -> str:
    """Return an image of a row as JSON can hold it: its path, or its bytes as a data: URL. Raises EnvError."""
    if isinstance(value, Mapping) and value.get("bytes") is None:
        value = next((value[name] for name in NAMES if value.get(name) is not None), None)
        if isinstance(value, Mapping):
            return image_link(value)
    return str(value) if isinstance(value, str | Path) else data_uri(image_bytes(value))


def video_link(value: Any) -> Any:
    """Return a video of a row as JSON can hold it: a path, or the links of its frames. Raises EnvError."""
    if isinstance(value, Mapping):
        value = next(
            (value[name] for name in ("video", "frames", *NAMES) if value.get(name) is not None),
            None,
        )
    return (
        [image_link(frame) for frame in value]
        if isinstance(value, list | tuple)
        else image_link(value)
    )


def frames_of(value: Any, folder: Path | None = None, most: int = FRAMES) -> list[bytes]:
    """Return at most so many frames of a video, evenly spaced: of a list of images, or of a file.

    Pillow reads animated GIF, WebP and PNG; other files need PyAV. Raises EnvError if it cannot be read.
    """
    most = min(most, MOST_FRAMES)
    if isinstance(value, list | tuple):
        return [image_bytes(value[n], folder) for n in choose_frames(len(value), most)]
    data = image_bytes(value, folder)
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as opened:
            found = []
            for n in choose_frames(getattr(opened, "n_frames", 1), most):
                opened.seek(n)
                found.append(image_bytes(opened.convert("RGB")))
            return found
    except UnidentifiedImageError:
        return _decode(data, most)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise EnvError(f"A video of {len(data)} bytes cannot be read: {error}") from error


def choose_frames(count: int, most: int) -> list[int]:
    """Return at most `most` numbers below `count`, evenly spaced, including the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(n * (count - 1) / max(most - 1, 1)) for n in range(most)]


def _read_link(text: str, folder: Path | None) -> bytes:
    if text.startswith("data:"):
        head, _, body = text.partition(",")
        try:
            return (
                base64.b64decode(body, validate=True) if head.endswith(";base64") else body.encode()
            )
        except (ValueError, binascii.Error) as error:
            raise EnvError(f"The data: URL of an image cannot be decoded: {error}") from error
    if wrong := missing_file(text, folder or Path()):
        raise EnvError(wrong)
    path = _path(text, folder or Path())
    try:
        if path.stat().st_size > MOST_BYTES:
            raise EnvError(
                f"The image {path} has {path.stat().st_size / 2**20:.0f} MiB; at most {MOST_BYTES >> 20}."
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise EnvError(
            f"The image {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _path(text: str, folder: Path) -> Path:
    return folder / Path(text.removeprefix("file://")).expanduser()


def missing_file(link: str, folder: Path) -> str:
    """Return why the image of a row cannot be read, as a sentence; empty if its file exists, or it is a data: URL."""
    if link.startswith("data:"):
        return ""
    if link.startswith(("http://", "https://")):
        return (
            f"The image {link[:80]} is not downloaded: save it beside the rows and give its path."
        )
    try:
        return (
            ""
            if _path(link, folder).is_file()
            else f"The image {_path(link, folder)} does not exist."
        )
    except (OSError, ValueError, RuntimeError) as error:  # the last: ~USER of no user
        return f"The image {link[:80]!r} is not a path: {error}."


def _decode(data: bytes, most: int) -> list[bytes]:
    try:
        import av
    except ImportError as error:
        raise MissingDependency(
            f"A video of {len(data)} bytes is not one that Pillow reads, and PyAV is not installed.",
            hint="pip install 'agentrl-cli[video]', or give its frames as a list of images.",
        ) from error
    try:
        with av.open(io.BytesIO(data)) as opened:
            count = sum(1 for _ in opened.decode(video=0))
        wanted = set(choose_frames(count, most))
        with av.open(io.BytesIO(data)) as opened:
            return [
                image_bytes(f.to_image())
                for n, f in enumerate(opened.decode(video=0))
                if n in wanted
            ]
    except (av.FFmpegError, IndexError) as error:
        raise EnvError(f"A video of {len(data)} bytes cannot be read: {error}") from error
