"""Gemma: `call:NAME{key:value,…}`, in the markers of Gemma 4 or of FunctionGemma, text between quote tokens.

Values are texts between two quote tokens, numbers, `true`, `false`, `null`, lists and objects; keys inside objects are
quoted the same way, or bare. https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, no_constant, parse_blocks
from agentrl_cli.types import ToolCall, ToolSchema

THOUGHT, THOUGHT_END = "<|channel>", "<channel|>"
THINKING = re.compile(
    rf"{re.escape(THOUGHT)}thought\n?(.*?)(?:\n?{re.escape(THOUGHT_END)}|\Z)", re.DOTALL
)
HEAD = re.compile(r"\s*call:([\w.\-]+)\s*(?=\{)")
DEPTH = 64
"""How deep values may be nested."""


class GemmaParser:
    """`call:f{x:1,text:<|"|>a<|"|>}` between the family's markers."""

    def __init__(
        self, name: str, opening: str, closing: str, quote: str, *, thinks: bool = False
    ) -> None:
        """`thinks`: the model may think in the channel `thought`, where calls do not count."""
        self.name = name
        self._thinks = thinks
        self._block, self._quote = (opening, closing), quote
        self.markers: tuple[str, ...] = (
            opening,
            closing,
            quote,
            *((THOUGHT, THOUGHT_END) if thinks else ()),
        )

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        thoughts = (
            [thought for found in THINKING.findall(text) if (thought := found.strip())]
            if self._thinks
            else []
        )
        text = THINKING.sub("", text) if self._thinks else text
        return replace(parse_blocks(text, self._block, self._read), thinking="\n".join(thoughts))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.markers[0]}call:{name}{self._write(dict(arguments), '')}{self.markers[1]}"

    def _write(self, value: Any, quote: str | None = None) -> str:
        """Return a value; the keys of an object are quoted by `quote` (None: the quote token)."""
        token = self.markers[2]
        if isinstance(value, str):
            return f"{token}{value}{token}"
        if isinstance(value, dict):
            around = token if quote is None else quote
            return (
                "{"
                + ",".join(
                    f"{around}{key}{around}:{self._write(item)}" for key, item in value.items()
                )
                + "}"
            )
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(self._write(item) for item in value) + "]"
        return json.dumps(value)

    def _read(self, raw: str) -> ToolCall:
        head = HEAD.match(raw)
        if not head:
            error = "call:NAME and arguments in braces must follow the opening marker"
            return call(raw=raw, error=error)
        try:
            value = _Reader(raw, self.markers[2], head.end()).read_all()
        except ValueError as error:
            return call(head[1], raw=raw, error=str(error))
        return call(head[1], value, raw=raw)


class _Reader:
    """Reads values from a text. Raises ValueError with the fault."""

    def __init__(self, text: str, quote: str, at: int) -> None:
        self._text, self._quote, self._at, self._start = text, quote, at, at
        mark = re.escape(quote)
        # The group `open` matches where a text is not closed: it then reaches to the end, and is searched for once.
        self._token = re.compile(
            rf"\s*(?:{mark}(?P<text>.*?)(?:{mark}|(?P<open>\Z))"
            r"|(?P<mark>[{}\[\],:])|(?P<word>[^,\[\]{}:]+))",
            re.DOTALL,
        )

    def read_all(self) -> Any:
        """Return the value that the text consists of."""
        value = self._value(0)
        if rest := self._text[self._at :].strip():
            raise ValueError(f"there is text after the arguments: {rest[:40]!r}")
        return value

    def _next(self) -> tuple[str, str]:
        """Return the kind of the next token (text, mark or word; empty at the end), and the token."""
        self._start = self._at
        found = self._token.match(self._text, self._at)
        kind = found.lastgroup if found else None
        if found is None or kind is None:
            return "", ""
        self._at = found.end()
        if kind == "open":
            raise ValueError(f"a text is not closed by {self._quote}")
        return kind, found[kind].strip() if kind == "word" else found[kind]

    def _require(self, right: object, missing: str) -> None:
        if not right:
            near = self._text[max(0, self._start - 20) : self._start + 20]
            raise ValueError(f"{missing} is missing near {near!r}")

    def _value(self, depth: int) -> Any:
        if depth > DEPTH:
            raise ValueError(f"values are nested deeper than {DEPTH}")
        kind, word = self._next()
        if kind == "text":
            return word
        if word == "{":
            return dict(self._items("}", self._pair, depth + 1))
        if word == "[":
            return list(self._items("]", self._value, depth + 1))
        self._require(kind == "word" and word, "a value")
        try:
            return json.loads(word, parse_constant=no_constant)
        except ValueError:
            error = f"text must stand between two {self._quote}, not as {word[:40]!r}"
            raise ValueError(error) from None

    def _items(self, closing: str, read: Callable[[int], Any], depth: int) -> Iterator[Any]:
        before = self._at
        if self._next() == ("mark", closing):
            return
        self._at = before
        while True:
            yield read(depth)
            token = self._next()
            if token == ("mark", closing):
                return
            self._require(token == ("mark", ","), f"a comma or {closing}")

    def _pair(self, depth: int) -> tuple[str, Any]:
        kind, key = self._next()
        self._require(kind == "text" or (kind == "word" and key), "an argument's name")
        if self._next() != ("mark", ":"):
            raise ValueError(f"after {key!r} a colon and its value must follow")
        return key, self._value(depth)


GEMMA4 = GemmaParser("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', thinks=True)
FUNCTION_GEMMA = GemmaParser(
    "gemma3_function", "<start_function_call>", "<end_function_call>", "<escape>"
)
