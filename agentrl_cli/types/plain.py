"""Texts and JSON that others wrote: those that cannot be used raise a ValueError with a sentence."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

DEPTH = 100
"""How deep lists and objects may lie in each other."""
SURROGATE = "lone surrogate"
_TOO_DEEP = f"it is nested more than {DEPTH} levels deep"
_SURROGATE = re.compile("[\ud800-\udfff]")


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """Return the GPT-2 table of byte-level BPE: printable character to byte."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in keep]
    return {chr(byte): byte for byte in keep} | {chr(n): byte for n, byte in enumerate(others, 256)}


def parse_json(text: str | bytes) -> Any:
    """Return a JSON value. Raises ValueError (JSONDecodeError, UnicodeDecodeError, or one with another reason).

    Besides JSON's own rules: at most `DEPTH` levels, and no lone surrogates, which no file, store or tokenizer takes.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > DEPTH or "\\u" in text or not is_text(text):
        check_plain(value)
    return value


def check_plain(value: Any) -> None:
    """Raise ValueError if a value of lists, mappings and texts is too deep or holds a lone surrogate."""
    level, depth = [value], 0
    while level:
        if depth > DEPTH:
            raise ValueError(_TOO_DEEP)
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str) and not is_text(item):
                raise ValueError(
                    f"the text {quote_text(item)} has a {SURROGATE}, which is not a character"
                )
            if isinstance(item, dict):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, (list, tuple)):
                inner += item
        level, depth = inner, depth + 1


def describe_json_error(error: json.JSONDecodeError) -> str:
    """Return the message of an error, to be followed by ` at …`: some of them end so, or in a colon."""
    return error.msg.removesuffix(" at").rstrip(": ")


def is_text(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no lone surrogates."""
    return text.isascii() or _SURROGATE.search(text) is None


def quote_text(text: str, length: int = 40) -> str:
    """Return a text for a message: quoted, with escapes for what cannot be printed, and cut."""
    return ascii(text if len(text) <= length else text[:length] + "…")
