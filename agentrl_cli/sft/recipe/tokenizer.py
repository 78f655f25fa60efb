"""The bundled model's tokenizer: a word has the same tokens wherever it stands.

Words, spaces, digits, capitals and signs are split apart before a byte-level BPE, so that a name after a space, a quote
or an underscore is the same tokens, which is what lets a small model copy it. The punctuation of JSON is the exception:
runs of brackets, quotes, colons and commas may merge, since nothing is copied from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from agentrl_cli.chat.tokenizer import Tokenizer, tiny_template

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<tools>", "</tools>", "<think>", "</think>"),
)
SPLIT = r'[{}\[\]"]+(?:[:,] ?[{}\[\]"]*)*|[,:] ?[\[{"]+|[a-z]+|[A-Z]|\d| {4}|\s|[^\sA-Za-z\d]'
"""JSON's punctuation, lower-case words, single capitals and digits, indentation, single spaces and signs."""


def train_tokenizer(texts: Iterable[str], vocabulary: int, context: int, folder: Path) -> Tokenizer:
    """Train on `texts` and write tokenizer.json, its configuration and the chat template into `folder`."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:  # markers of tools stay visible when decoded
        token["special"] = token["content"].startswith("<|")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(tiny_template(), encoding="utf-8")
    return Tokenizer.load(folder)
