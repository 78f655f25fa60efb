"""The vocabulary of a model as GGUF has it: its tokens, their kinds and merges, and where llama.cpp cuts a text first.

llama.cpp knows the first cuts of a byte-level tokenizer by a name alone (`tokenizer.ggml.pre`). The name is found by
trial: of the cuts in CUTS, those that give the same ids for the most probe texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl_cli.errors import ModelError

if TYPE_CHECKING:
    from agentrl_cli.chat.tokenizer import Tokenizer

NORMAL, CONTROL, OWN, UNUSED = 1, 3, 4, 5
"""Kinds of tokens in GGUF; an OWN one is found in a text before anything is cut or merged."""
_SHORT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_CASES}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
OTHERS = "llama.cpp's own convert_hf_to_gguf.py reads other folders."
CUTS: dict[str, list[str]] = {
    "qwen2": [f"{_SHORT}|{_WORDS % ''}"],
    "llama-bpe": [f"{_SHORT}|{_WORDS % '{1,3}'}"],
    "smollm": [r"\p{N}", _GPT2],
    "gpt-2": [_GPT2],
    "tekken": [_TEKKEN],
}
"""Names that llama.cpp knows, to the patterns that it cuts by (src/llama-vocab.cpp)."""
PROBES = (
    "  two  spaces\n\n\ttab, a \r\nline;    four,         nine",
    "it's I'LL don't 'save' we've O'Neil",
    "中文，很好。🙂👩‍👩‍👧 naïve Straße ÉTÉ",
    "²³ ½ ٣ 7 42 123 12345 1,234.5 -0.5e-3 0xFF",
    '{"name": "f", "arguments": {"a": [1, 2, {"b": "c"}], "d": ["e", "f"]}, "n": null}\n\n',
    '{"type":"function","function":{"parameters":{"properties":{"x":{"type":"string"}}}}}',
    "def fooBar(x_1: int) -> str:\n    if x_1 != 3:\n        return f'{x_1:>8}'  # HTTPServer\n",
    "http://example.org/a-b_c?d=e&f#g <b>bold</b> user@host ~/.config C:\\new",
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level vocabulary in GGUF's form."""

    pre: str
    """The name of its first cuts."""
    tokens: Sequence[str]
    kinds: Sequence[int]
    merges: Sequence[str]
    wrong: tuple[str, ...] = ()
    """The probe texts that llama.cpp encodes in another way."""


def find_vocabulary(tokenizer: Tokenizer, size: int, texts: Iterable[str]) -> Vocabulary:
    """Return the vocabulary of a model with `size` rows of embeddings, tried on `texts` too. Raises ModelError."""
    data = json.loads(tokenizer.json)
    model = data["model"]
    added = {token["id"]: token for token in data["added_tokens"]}
    named = {id_: text for text, id_ in model["vocab"].items()} if model["type"] == "BPE" else {}
    named |= {id_: token["content"] for id_, token in added.items()}
    tokens = [named.get(n, f"[PAD{n}]") for n in range(size)]
    special = {token.id for token in tokenizer.added if token.special}
    kinds = [
        UNUSED if n not in named else CONTROL if n in special else OWN if n in added else NORMAL
        for n in range(size)
    ]
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges") or ()]
    if not pairs or "ByteLevel" not in json.dumps(data.get("pre_tokenizer")):
        raise ModelError(
            f"A tokenizer of the kind {model['type']} that is not byte-level is not written as GGUF.",
            hint=OTHERS,
        )
    wanted = {text: tokenizer.encode(text) for text in (*PROBES, *texts)}
    found: dict[str, tuple[str, ...]] = {}
    for name, cuts in CUTS.items():
        encode = _encoder(data, cuts, name in ("llama-bpe", "tekken"))
        found[name] = tuple(text for text, ids in wanted.items() if encode(text) != ids)
    best = min(found, key=lambda name: len(found[name]))
    return Vocabulary(best, tokens, kinds, [" ".join(pair) for pair in pairs], found[best])


def _encoder(
    data: dict[str, Any], cuts: list[str], whole: bool = False
) -> Callable[[str], list[int]]:
    """Return a function from a text to its ids by other cuts; `whole`: an entry needs no merges."""
    from tokenizers import Regex
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers as steps

    merging = {**data["model"], "ignore_merges": whole}
    backend = Backend.from_str(json.dumps({**data, "model": merging, "pre_tokenizer": None}))
    split = [steps.Split(Regex(cut), "isolated") for cut in cuts]
    level = steps.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = steps.Sequence([*split, level])
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
