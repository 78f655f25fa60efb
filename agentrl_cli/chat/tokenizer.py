"""Text to token ids and back, from a model folder, by the `tokenizers` library alone (no transformers import).

The rest of `chat` relies on two guarantees. `encode` never adds tokens of its own: the text of a chat template is
encoded as it stands. And `encode_offsets` takes *plain* ranges, in which added tokens (`<|im_end|>` and the like) are
not
recognised, so text from a user or a tool cannot become markup. Plain ranges are still encoded in one piece with
everything around them, so merges at their borders are the template's own.

Not here: batching, padding, truncation.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.chat.tiny_template import tiny_template
from agentrl_cli.errors import ModelError, TemplateError
from agentrl_cli.types.plain import byte_of_char

if TYPE_CHECKING:
    import tokenizers

Offsets = list[tuple[int, int]]
"""Start and end of each token in the text, in characters."""

LONG = 2**14
"""Characters from which a text is tokenized without stopping the other threads."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in the text before the tokenizer proper sees it."""

    id: int
    text: str
    special: bool
    """True for control tokens (`<|im_end|>`), False for words that were merely added (`<think>` in Qwen3)."""


class BaseTokenizer:
    """A tokenizer as `Chat`, policies and screens use it; subclasses encode and decode.

    `chat_template` is a Jinja text, or None. `tool_template` is the one to use with tools if a model ships two.
    """

    added: tuple[AddedToken, ...]
    vocab_size: int
    """Its ids are smaller; added tokens may leave gaps below."""
    specials: Mapping[str, str]
    """`bos_token`, `eos_token`, … to their texts: what a chat template may refer to by name."""
    chat_template: str | None
    tool_template: str | None = None
    eos_ids: tuple[int, ...] = ()
    """End tokens of `generation_config.json`, then the tokenizer's own."""
    json: str = ""
    """Text of tokenizer.json, for the store."""

    def encode_offsets(
        self, text: str, plain: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], Offsets]:
        """Return ids and offsets of `text`; inside the `plain` character ranges no added token is recognised."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Return the exact text of `ids`, control tokens included; bytes that are not UTF-8 become U+FFFD."""
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        """Return a text of one token for people: never empty, its own bytes if it is part of a character."""
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, also of one that is a part of a character."""
        text, table = self.token_text(token), byte_of_char()
        if "\ufffd" not in self.decode([token]):
            return text.encode()
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", text):
            return bytes.fromhex(byte[1])
        return bytes(table[c] for c in text if c in table)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, added tokens recognised, nothing prepended or appended."""
        return self.encode_offsets(text)[0]

    def id_of(self, text: str) -> int | None:
        """Return the id of an added token, None if absent."""
        return self._added_ids.get(text)

    def plain(self, ids: Iterable[int]) -> str:
        """Return ids as text without the control tokens."""
        return self.decode([int(id_) for id_ in ids if int(id_) not in self.special_ids])

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token, at most."""
        return max((len(token.text) for token in self.added), default=1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        return frozenset(token.id for token in self.added if token.special)

    @cached_property
    def hash(self) -> str:
        """16 hex digits over vocabulary and templates: equal if the same text gives the same ids."""
        parts = (
            self.json,
            self.chat_template,
            self.tool_template,
            json.dumps(dict(self.specials), sort_keys=True),
        )
        return hashlib.sha256("\0".join(part or "" for part in parts).encode()).hexdigest()[:16]

    @cached_property
    def _added_ids(self) -> dict[str, int]:
        return {token.text: token.id for token in self.added}

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        """Leftmost longest match of any added token, as the `tokenizers` library finds them."""
        texts = sorted((token.text for token in self.added if token.text), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")


class Tokenizer(BaseTokenizer):
    """The tokenizer of a Hugging Face model folder.

    `load` reads tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.
    """

    def __init__(
        self,
        tokenizer_json: str,
        chat_template: str | None,
        specials: Mapping[str, str] | None = None,
        *,
        tool_template: str | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        """`tokenizer_json` is the text of tokenizer.json. Raises ModelError if it cannot be read."""
        self.json = tokenizer_json
        self._tk = _backend(tokenizer_json)
        self.chat_template, self.tool_template = chat_template, tool_template
        self.specials = dict(specials or {})
        named = set(self.specials.values())
        self.added = tuple(
            AddedToken(id_, token.content, token.special or token.content in named)
            for id_, token in sorted(self._tk.get_added_tokens_decoder().items())
        )
        size = self._tk.get_vocab_size(with_added_tokens=True)
        self.vocab_size = max([size, *(token.id + 1 for token in self.added)])
        eos = self.id_of(self.specials.get("eos_token", ""))
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *([] if eos is None else [eos])]))
        self._texts: dict[int, str] = {}
        self._nonce = f"zq{secrets.token_hex(8)}"

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Return the tokenizer of a model folder. Raises ModelError with the missing file and the way to get it."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not folder.is_dir():
            raise ModelError(
                f"No model folder {folder}.", hint="Use a local folder or a Hugging Face id."
            )
        if not path.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json.",
                hint="Save the fast tokenizer into it: AutoTokenizer.from_pretrained(...).save_pretrained(folder).",
            )
        config = _read_json(folder / "tokenizer_config.json")
        default, tool = _templates(folder, config)
        generation = _read_json(folder / "generation_config.json").get("eos_token_id")
        eos = generation if isinstance(generation, list) else [generation]
        specials = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = config.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                specials[name] = text
        return cls(
            path.read_text(encoding="utf-8"),
            default,
            specials,
            tool_template=tool,
            eos_ids=[id_ for id_ in eos if isinstance(id_, int)],
        )

    def encode_offsets(
        self, text: str, plain: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], Offsets]:
        if not plain:
            encoding = _encode(self._tk, text)
            return list(encoding.ids), list(encoding.offsets)
        renamed, back = self._rename(text, plain)
        backend, ids = self._renamed
        encoding = _encode(backend, renamed)
        offsets = [(back(start), back(end)) for start, end in encoding.offsets]
        return [ids.get(id_, id_) for id_ in encoding.ids], offsets

    @cached_property
    def longest(self) -> int:
        return max(map(len, self._tk.get_vocab(with_added_tokens=True)))

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tk.decode([int(id_) for id_ in ids], skip_special_tokens=False))

    def token_text(self, token: int) -> str:
        token = int(token)
        if token not in self._texts:
            text = self.decode([token])
            raw = self._tk.id_to_token(token)
            if raw is not None and ("\ufffd" in text or not text or raw.startswith("▁")):
                text = raw.replace("▁", " ")
            self._texts[token] = text or f"<{token}>"
        return self._texts[token]

    @cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The same tokenizer with secret names for its added tokens, and its ids to the original ones.

        Markup is renamed and everything else is plain text, encoded in one call, so that no border between the two is
        tokenized differently than in the template's own rendering.
        """
        data = json.loads(self.json)
        for token in data["added_tokens"]:
            token["content"] = f"{self._nonce}x{token['id']}x"
        backend = _backend(json.dumps(data))
        ids = {backend.token_to_id(f"{self._nonce}x{token.id}x"): token.id for token in self.added}
        return backend, {
            renamed: original for renamed, original in ids.items() if renamed is not None
        }

    def _rename(self, text: str, plain: Sequence[tuple[int, int]]) -> tuple[str, MovedText]:
        parts: list[str] = []
        moves = [(0, 0)]
        done = length = 0
        for match in self._added_pattern.finditer(text):
            start, end = match.span()
            if overlaps(match.span(), plain):
                continue
            name = f"{self._nonce}x{self._added_ids[match.group()]}x"
            parts += [text[done:start], name]
            length += start - done
            moves += [(length, start), (length + len(name), end)]
            done, length = end, length + len(name)
        return "".join([*parts, text[done:]]), MovedText(moves)


def overlaps(span: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether a span of a text overlaps one of these ranges, which are in order and apart."""
    before = bisect_left(ranges, (span[1],))
    return before > 0 and ranges[before - 1][1] > span[0]


class MovedText:
    """Positions in a renamed text to positions in the original: exact outside names, the name's start inside."""

    def __init__(self, moves: list[tuple[int, int]]) -> None:
        self._new, self._old = zip(*moves, strict=True)

    def __call__(self, position: int) -> int:
        index = bisect_right(self._new, position) - 1
        inside_name = index % 2 == 1
        return int(self._old[index] + (0 if inside_name else position - self._new[index]))


class ByteTokenizer(BaseTokenizer):
    """A fake tokenizer for tests and demonstrations: ids 0 to 255 are bytes, added tokens follow.

    `template` defaults to the bundled tiny-agent template; give another with its own control tokens to try it out.
    Tokens of `words` are added but not special, as in Qwen.
    """

    CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    WORDS = (
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    )

    def __init__(
        self,
        template: str | None = None,
        *,
        control: Sequence[str] = CONTROL,
        words: Sequence[str] = WORDS,
        eos: str = "<|im_end|>",
        bos: str = "",
    ) -> None:
        texts = [*control, *words]
        self.added = tuple(
            AddedToken(256 + n, text, n < len(control)) for n, text in enumerate(texts)
        )
        self.vocab_size = 256 + len(texts)
        self.chat_template = tiny_template() if template is None else template
        pad = "<|endoftext|>" if "<|endoftext|>" in texts else eos
        self.specials = {"eos_token": eos, "pad_token": pad, **({"bos_token": bos} if bos else {})}
        self.json = json.dumps({"byte_tokenizer": texts})
        end = self.id_of(eos)
        self.eos_ids = () if end is None else (end,)

    def encode_offsets(
        self, text: str, plain: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], Offsets]:
        ids: list[int] = []
        offsets: Offsets = []
        done = 0
        for match in self._added_pattern.finditer(text):
            start, end = match.span()
            if overlaps(match.span(), plain):
                continue
            self._bytes(text, done, start, ids, offsets)
            ids.append(self._added_ids[match.group()])
            offsets.append((start, end))
            done = end
        self._bytes(text, done, len(text), ids, offsets)
        return ids, offsets

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.token_bytes(int(id_)) for id_ in ids).decode("utf-8", errors="replace")

    def token_text(self, token: int) -> str:
        return self.token_bytes(int(token)).decode("utf-8", errors="backslashreplace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.added[token - 256].text.encode()

    @staticmethod
    def _bytes(text: str, start: int, end: int, ids: list[int], offsets: Offsets) -> None:
        for position in range(start, end):
            data = text[position].encode("utf-8", errors="replace")
            ids.extend(data)
            offsets.extend([(position, position + 1)] * len(data))


def _encode(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    if len(text) < LONG:
        return backend.encode(text, add_special_tokens=False)
    # `encode` keeps the interpreter's lock to its end; a batch gives it to the other threads.
    return backend.encode_batch([text], add_special_tokens=False)[0]


def _backend(tokenizer_json: str) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises plain Exception for any bad file
        raise ModelError(
            f"tokenizer.json cannot be read: {error}", hint="Download the model folder again."
        ) from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} is not JSON: {error}", hint="Download the model folder again."
        ) from error
    return data if isinstance(data, dict) else {}


def _templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the default template and the one for tools, from chat_template.jinja or tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, Mapping)
        }
        return named.get("default"), named.get("tool_use")
    if template is not None and not isinstance(template, str):
        raise TemplateError(
            f"chat_template in {folder}/tokenizer_config.json is neither a string nor a list."
        )
    return template, None
