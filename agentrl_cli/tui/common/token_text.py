"""Token ids to the exact text of each token, with the stored tokenizer.

Not here: encoding. A byte-level vocabulary (GPT-2, Qwen, tiny-agent) is read straight from the JSON: building a
`tokenizers.Tokenizer` of 150,000 entries costs most of a second and a screen has a third of one. Anything else goes
through the `tokenizers` library. A token that ends in the middle of a character shows a placeholder; the token that
completes the character shows it.
"""

from __future__ import annotations

import codecs
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any

from agentrl_cli.types import Int32
from agentrl_cli.types.plain import byte_of_char

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal: C0 with ESC, DEL, C1, and those that change the direction of writing."""
PARTIAL = "▫"
"""Stands for a token that is only a part of a character."""


class TokenTexts:
    """Decodes ids one by one. Without a tokenizer every token shows as its number."""

    def __init__(self, tokenizer_json: str | None = None) -> None:
        """`tokenizer_json` is the text of a tokenizer.json; None or broken JSON leaves a `problem`."""
        self.problem = "" if tokenizer_json else "no tokenizer stored: tokens show as their ids"
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str] = {}
        self._special: dict[int, str] = {}
        self._library: Any = None
        try:
            if tokenizer_json:
                self._read(json.loads(tokenizer_json), tokenizer_json)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"the stored tokenizer cannot be read ({error})"
            self.problem = f"{why}: tokens show as their ids"
            self._special = {}

    def _read(self, data: dict[str, Any], text: str) -> None:
        if "byte_tokenizer" in data:  # chat.tokenizer.ByteTokenizer: ids 0 to 255 are bytes
            self._bytes = {byte: bytes([byte]) for byte in range(256)}
            self._special = {256 + n: str(name) for n, name in enumerate(data["byte_tokenizer"])}
            return
        vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
        self._special = {int(one["id"]): str(one["content"]) for one in added}
        kinds = json.dumps([data.get("decoder"), data.get("pre_tokenizer")])
        if "ByteLevel" in kinds and isinstance(vocab, dict) and vocab:
            self._pieces = {index: piece for piece, index in vocab.items()}
            return
        from tokenizers import Tokenizer  # only the rare kinds of vocabulary pay for the library

        try:
            self._library = Tokenizer.from_str(text)
        except Exception as error:
            raise ValueError(str(error)) from error

    @property
    def specials(self) -> frozenset[int]:
        """Ids of added tokens, `<|im_end|>` for instance."""
        return frozenset(self._special)

    def one(self, token: int) -> bytes | str:
        """Return the bytes of an ordinary token, the text of a special or unknown one."""
        if token in self._bytes:
            return self._bytes[token]
        if token in self._special:
            return self._special[token]
        if self._library is not None:
            self._bytes[token] = str(
                self._library.decode([token], skip_special_tokens=False)
            ).encode()
        elif token in self._pieces:
            table = byte_of_char()
            chars = (bytes([table[c]]) if c in table else c.encode() for c in self._pieces[token])
            self._bytes[token] = b"".join(chars)
        return self._bytes.get(token, f"⟨{token}⟩")

    def texts(self, ids: Sequence[int] | Int32) -> list[str]:
        """Return the text of every token; joined they are the decoded text, except for `PARTIAL` placeholders."""
        numbers = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        cache: dict[int, str | None] = {}
        for token in set(numbers):
            raw = self.one(token)
            if isinstance(raw, str):
                cache[token] = raw
                continue
            try:
                cache[token] = raw.decode()
            except UnicodeDecodeError:
                cache[token] = None
        out: list[str] = [cache[token] or "" for token in numbers]
        if None in cache.values():
            self._join_partial(numbers, cache, out)
        return out

    def _join_partial(
        self, numbers: list[int], cache: dict[int, str | None], out: list[str]
    ) -> None:
        """Decode together each run of tokens that are not characters by themselves."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        open_run = False
        for position, token in enumerate(numbers):
            if cache[token] is not None and not open_run:
                continue
            raw = self.one(token)
            if isinstance(raw, str):  # a special token: the character before it is never completed
                decoder.reset()
                open_run = False
                continue
            out[position] = decoder.decode(raw) or PARTIAL
            open_run = bool(decoder.getstate()[0])

    def text(self, ids: Sequence[int] | Int32) -> str:
        """Return all of it as one string."""
        return "".join(self.texts(ids))


def visible(text: str) -> str:
    """Return a token's text with newline, tab, control characters made visible, for one line of the inspector."""
    out = text.replace("\n", "⏎").replace("\t", "⇥")
    return "".join(c if c.isprintable() else f"␀{ord(c):x}" for c in out)


def matches(texts: list[str], needle: str, most: int = 10_000) -> list[int]:
    """Return the tokens in which a match of `needle` begins (case ignored), in order; at most `most`."""
    starts = [0, *accumulate(len(text) for text in texts)]
    text, low = "".join(texts), needle
    # some characters have a longer lower case: positions must not move
    if len(text.lower()) == len(text):
        text, low = text.lower(), needle.lower()
    overlapping = re.finditer(f"(?={re.escape(low)})", text)
    return [bisect_right(starts, match.start()) - 1 for match in islice(overlapping, most)]
