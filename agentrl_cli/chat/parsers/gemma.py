"""Gemma: `call:NAME{key:value,…}`, in the markers of Gemma 4 or of FunctionGemma, text between quote tokens.

Values are texts between two quote tokens, numbers, `true`, `false`, `null`, lists and objects; keys inside objects are
quoted the same way, or bare. https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call
from agentrl_cli.chat.parsers.blocks import parse_blocks
from agentrl_cli.types import ToolCall, ToolSchema

THOUGHT, THOUGHT_END = "<|channel>", "<channel|>"
THINKING = re.compile(
    rf"{re.escape(THOUGHT)}thought\n?(.*?)(?:\n?{re.escape(THOUGHT_END)}|\Z)", re.DOTALL
)
HEAD = re.compile(r"\s*call:([\w.\-]+)\s*(?=\{)")
BARE = re.compile(r"[^,\[\]{}:]+")
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
            return call(
                raw=raw, error="call:NAME and arguments in braces must follow the opening marker"
            )
        try:
            value, end = _Reader(raw, self.markers[2]).value(head.end(), 0)
        except ValueError as error:
            return call(head[1], raw=raw, error=str(error))
        if raw[end:].strip():
            return call(
                head[1],
                raw=raw,
                error=f"there is text after the arguments: {raw[end:].strip()[:40]!r}",
            )
        return call(head[1], value, raw=raw)


class _Reader:
    """Reads values from a text. Raises ValueError with what is wrong."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote = text, quote

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        at = self._skip(at)
        if depth > DEPTH:
            raise ValueError(f"values are nested deeper than {DEPTH}")
        if self._text.startswith(self._quote, at):
            return self._quoted(at)
        opening = self._text[at : at + 1]
        if opening == "{":
            return self._object(at + 1, depth + 1)
        if opening == "[":
            return self._list(at + 1, depth + 1)
        return self._bare(at)

    def _skip(self, at: int) -> int:
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        return at

    def _quoted(self, at: int) -> tuple[str, int]:
        start = at + len(self._quote)
        end = self._text.find(self._quote, start)
        if end < 0:
            raise ValueError(f"a text is not closed by {self._quote}")
        return self._text[start:end], end + len(self._quote)

    def _bare(self, at: int) -> tuple[Any, int]:
        found = BARE.match(self._text, at)
        word = found[0].strip() if found else ""
        if not found or not word:
            raise ValueError(f"a value is missing near {self._text[max(0, at - 20) : at + 20]!r}")
        try:
            return json.loads(word, parse_constant=_no_constant), found.end()
        except ValueError:
            raise ValueError(
                f"text must stand between two {self._quote}, not as {word[:40]!r}"
            ) from None

    def _key(self, at: int) -> tuple[str, int]:
        at = self._skip(at)
        if self._text.startswith(self._quote, at):
            return self._quoted(at)
        found = BARE.match(self._text, at)
        if not found or not found[0].strip():
            raise ValueError(
                f"an argument's name is missing near {self._text[max(0, at - 20) : at + 20]!r}"
            )
        return found[0].strip(), found.end()

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self._skip(at)
        if self._text.startswith("}", at):
            return found, at + 1
        while True:
            key, at = self._key(at)
            at = self._skip(at)
            if not self._text.startswith(":", at):
                raise ValueError(f"after {key!r} a colon and its value must follow")
            found[key], at = self.value(at + 1, depth)
            done, at = self._ends(at, "}")
            if done:
                return found, at

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self._skip(at)
        if self._text.startswith("]", at):
            return found, at + 1
        while True:
            item, at = self.value(at, depth)
            found.append(item)
            done, at = self._ends(at, "]")
            if done:
                return found, at

    def _ends(self, at: int, closing: str) -> tuple[bool, int]:
        """Whether the list or object ends here, and the position after that or after the comma."""
        at = self._skip(at)
        if self._text.startswith(closing, at):
            return True, at + 1
        if not self._text.startswith(",", at):
            raise ValueError(
                f"a comma or {closing} is missing near {self._text[max(0, at - 20) : at + 20]!r}"
            )
        return False, at + 1


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a value")


GEMMA4 = GemmaParser("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', thinks=True)
FUNCTION_GEMMA = GemmaParser(
    "gemma3_function", "<start_function_call>", "<end_function_call>", "<escape>"
)
