"""Small tokenizers, a chat and schemas that the tests share."""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from agentrl_cli import ByteTokenizer, Chat
from agentrl_cli.types import ToolSchema

BYTES = ByteTokenizer()
CHAT = Chat(BYTES)
TEXTS = (
    "print(6*7) def f(x): return x run_python arguments name code user assistant system tool_response print print",
    "What is the answer? It is 42.\nLet me see.\n<tools>\n</tools>\n\n",
)


def schema(name: str, parameters: dict[str, str], description: str = "Do it.") -> ToolSchema:
    properties = {key: {"type": type_} for key, type_ in parameters.items()}
    wanted = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": wanted},
    }


def call(name: str, /, **arguments: Any) -> str:
    """A call as a model of the family of Hermes writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@cache
def bpe_json() -> str:
    """tokenizer.json of a byte-level BPE of about 330 entries, control tokens 0 to 2, words not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(ByteTokenizer.CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ByteTokenizer.WORDS])
    return str(tokenizer.to_str())


# End tokens of gpt-oss's generation config; the first is its tokenizer's own.
GPT_OSS_ENDS = ("<|return|>", "<|endoftext|>", "<|call|>")


def tokenizer_for(
    template: str, more: Sequence[str] = (), ends: Sequence[str] = ()
) -> ByteTokenizer:
    """A byte tokenizer whose control tokens are those that a template's source names, and `more`.

    `ends`: the model's end tokens, its tokenizer's own first; guessed from the source where none are given.
    """
    if not ends and "<|return|>" in template:
        ends = GPT_OSS_ENDS
    pattern = (
        r"<\|[^|>{}' ]+\|>|<｜[^｜]+｜>|\[/?[A-Z_]{3,}\]|</?s>|<(?:start|end)_of_(?:turn|utterance)>"
        r"|<\|?turn\|?>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[gMASK\]|<sop>"
    )
    control = sorted({*re.findall(pattern, template), *more, *ends})
    common = (
        "<|im_end|>",
        "<|eot_id|>",
        "<｜end▁of▁sentence｜>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "</s>",
    )
    eos = next((text for text in (*ends, *common) if text in control), "<|endoftext|>")
    tokenizer = ByteTokenizer(
        template,
        control=control if eos in control else [*control, eos],
        words=[text for text in ByteTokenizer.WORDS if text not in control],
        eos=eos,
        bos="<s>" if "bos_token" in template else "",
    )
    found = [tokenizer.id_of(text) for text in ends]
    tokenizer.eos_ids = tuple(id_ for id_ in found if id_ is not None) or tokenizer.eos_ids
    return tokenizer


@cache
def metaspace_json() -> str:
    """tokenizer.json of a SentencePiece-like BPE: `▁` for spaces, one before the text's first word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    special = ["<unk>", *ByteTokenizer.CONTROL]
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:1] * 3, trainer)  # nothing merges over line breaks
    return str(tokenizer.to_str())


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
