"""The bundled model's tokenizer: a word has the same tokens wherever it stands.

Words, spaces, digits, capitals and signs are split apart before a byte-level BPE, so that a name after a space, a quote
or an underscore is the same tokens, which is what lets a small model copy it. The punctuation of JSON is the exception:
runs of brackets, quotes, colons and commas may merge, since nothing is copied from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agentrl_cli.chat.tokenizer import Tokenizer
from agentrl_cli.sft.from_nothing import train_tokenizer

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<tools>", "</tools>", "<think>", "</think>"),
)
SPLIT = r'[{}\[\]"]+(?:[:,] ?[{}\[\]"]*)*|[,:] ?[\[{"]+|[a-z]+|[A-Z]|\d| {4}|\s|[^\sA-Za-z\d]'
"""JSON's punctuation, lower-case words, single capitals and digits, indentation, single spaces and signs."""


def make_tokenizer(texts: Iterable[str], vocabulary: int, context: int, folder: Path) -> Tokenizer:
    """Train on `texts` and write the tokenizer into `folder`."""
    return train_tokenizer(
        texts, folder, vocabulary=vocabulary, split=SPLIT, specials=SPECIALS, context=context
    )
