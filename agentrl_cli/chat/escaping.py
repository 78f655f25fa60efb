"""Text from users and tools stays text: no token of the chat template can be written by them.

Every text that looks like a control token inside a message is replaced by a placeholder before the template renders,
and put back afterwards as a *plain* range, in which the tokenizer recognises no added token. The template sees
ordinary words, so trimming, JSON escaping and joining work as usual; a conversation without such text (nearly all of
them) takes exactly the path of a plain rendering.

Which texts are escaped depends on their author:

- user and tool: control tokens, and added words that the template or the parser uses as markup (`<tool_call>`).
- system text and tool schemas: control tokens. A pack's author may write `<tool_call>` in a system prompt and it is
  encoded as Hugging Face would.
- assistant: only the tokens that end a turn. A model may write the rest.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from agentrl_cli.chat.tokenizer import BaseTokenizer
from agentrl_cli.types import Message, ToolSchema

Range = tuple[int, int]


class Guard:
    """Hides control-token texts inside messages and tools; `Hidden.reveal` puts them back into a rendering."""

    def __init__(
        self, tokenizer: BaseTokenizer, markup: str, stop_texts: Iterable[str] = ()
    ) -> None:
        """`markup`: template source and parser markers; an added word counts as markup if it occurs in them."""
        control = [token.text for token in tokenizer.added if token.special]
        words = [
            token.text
            for token in tokenizer.added
            if not token.special and any(c.isalnum() for c in token.text) and token.text in markup
        ]
        self._outside = _pattern([*control, *words])
        self._author = _pattern(control)
        self._model = _pattern(stop_texts)
        self._prefix = f"zq{secrets.token_hex(8)}h"

    def hide(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None
    ) -> tuple[list[Message], list[ToolSchema] | None, Hidden]:
        """Return copies of messages and tools with placeholders in place of escaped text."""
        hidden = Hidden(self._prefix)
        by = {"assistant": self._model, "system": self._author, "developer": self._author}
        safe = [
            {
                key: value
                if key == "role"
                else hidden.replace(value, by.get(str(message.get("role")), self._outside))
                for key, value in message.items()
            }
            for message in messages
        ]
        return safe, hidden.replace(list(tools), self._author) if tools else None, hidden


class Hidden:
    """The texts that were replaced in one conversation."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._texts: list[str] = []

    def replace(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """Return a copy of `value` (text, list or mapping, any depth) with placeholders for what `pattern` matches."""
        if isinstance(value, str):
            return pattern.sub(self._hide, value)
        if isinstance(value, dict):
            return {
                self.replace(key, pattern): self.replace(item, pattern)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.replace(item, pattern) for item in value]
        return value

    def reveal(self, text: str) -> tuple[str, list[Range]]:
        """Return the rendering with the texts back in, and the character ranges they take."""
        if not self._texts:
            return text, []
        parts: list[str] = []
        ranges: list[Range] = []
        done = length = 0
        for match in re.finditer(rf"{self._prefix}(\d+)h", text):
            parts += [text[done : match.start()], self._texts[int(match.group(1))]]
            length += len(parts[-2])
            ranges.append((length, length + len(parts[-1])))
            length += len(parts[-1])
            done = match.end()
        return "".join([*parts, text[done:]]), ranges

    def _hide(self, match: re.Match[str]) -> str:
        self._texts.append(match.group())
        return f"{self._prefix}{len(self._texts) - 1}h"


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    ordered = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
