"""`merge --gguf`: transformers, and llama.cpp where it is installed, read the model that was merged."""

import json
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import Tokenizer
from agentrl_cli.commands import main
from agentrl_cli.paths import bundled_model
from tests.helpers.cli import Cli

pytest.importorskip("gguf", reason="the extra gguf is not installed")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}},
            "required": ["a"],
        },
    },
}
ASKED = [{"role": "user", "content": 'What is 12 plus 345, it\'s 中文 f"{x_1:>8}"?\n\n  Thanks'}]
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 768,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def folder_of(kind: str, path: Path) -> Path:
    """Write a small random model of an architecture, with the bundled model's tokenizer."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, tie_word_embeddings=kind == "Qwen2")
    getattr(transformers, f"{kind}ForCausalLM")(config).float().save_pretrained(path)
    for file in bundled_model().glob("*t*.j*n*"):
        if "token" in file.name or "chat" in file.name:
            shutil.copy(file, path)
    return path


def merged(source: str, out: Path, *more: str) -> Path:
    assert main(["merge", source, str(out), "--gguf", *more]) == 0
    (file,) = out.glob("*.gguf")
    return file


def prompt(folder: Path) -> list[int]:
    chat = Chat(Tokenizer.load(folder), "auto", append_only=True)
    return list(chat.rendered_ids(ASKED, [TOOL], add_generation_prompt=True))


def log_probabilities(folder: Path, ids: list[int], **how: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_transformers_reads_the_numbers_and_the_tokens_that_were_written(
    kind: str, tmp_path: Path
) -> None:
    from gguf import GGUFReader

    file = merged(str(folder_of(kind, tmp_path / "model")), tmp_path / "out", "--gguf-type", "f32")
    ids = prompt(tmp_path / "out")
    theirs = log_probabilities(file.parent, ids, gguf_file=file.name)
    torch.testing.assert_close(theirs, log_probabilities(tmp_path / "out", ids), atol=1e-4, rtol=0)
    fields = GGUFReader(file).fields
    tokens, template = (
        fields[f"tokenizer.{key}"].contents() for key in ("ggml.tokens", "chat_template")
    )
    assert template == Tokenizer.load(tmp_path / "out").chat_template and len(tokens) == 768
    assert tokens[fields["tokenizer.ggml.eos_token_id"].contents()] == "<|im_end|>"
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"  # as the bundled tokenizer cuts


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize(("kind", "nats"), [("f16", 0.05), ("q8_0", 0.25)])
def test_llama_cpp_cuts_texts_alike_and_continues_with_the_same_tokens(
    kind: str, nats: float, tmp_path: Path
) -> None:
    import llama_cpp

    file = merged("tiny", tmp_path / "out", "--gguf-type", kind)
    ids = prompt(tmp_path / "out")
    chat = Chat(Tokenizer.load(tmp_path / "out"), "auto", append_only=True)
    theirs = llama_cpp.Llama(str(file), n_ctx=512, logits_all=True, verbose=False, n_threads=1)
    assert theirs.tokenize(chat.decode(ids).encode(), add_bos=True, special=True) == ids
    answer: list[int] = []
    for id_ in theirs.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        answer.append(int(id_))
        if id_ in chat.stop_ids or len(answer) > 100:
            break
    whole = [*ids, *answer]
    ours = log_probabilities(tmp_path / "out", whole)[len(ids) - 1 : -1]
    assert ours.argmax(-1).tolist() == answer and answer[-1] in chat.stop_ids
    theirs.reset()
    theirs.eval(whole)
    scores = torch.from_numpy(np.array(theirs.scores[len(ids) - 1 : len(whole) - 1]))
    picked = torch.tensor(answer)[:, None]
    off = scores.log_softmax(-1).gather(1, picked) - ours.gather(1, picked)
    assert off.abs().max() < nats
    theirs.close()


def test_other_types_architectures_and_positions_are_refused_with_words(cli: Cli) -> None:
    said = "Choose f16, bf16, f32, q8_0"
    cli("merge", "tiny", "a", "--gguf", "--gguf-type", "q9", code=2, said=said)
    assert not list(cli.folder.iterdir())
    source = folder_of("Qwen3", cli.folder / "model")
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (source / "config.json").write_text(json.dumps(config))
    cli("merge", "model", "out", "--gguf", code=2, said=("dynamic", "convert_hf_to_gguf.py"))
    assert not [path for path in (cli.folder / "out").iterdir() if "gguf" in path.name]


def test_a_tokenizer_with_cuts_of_its_own_is_a_warning_that_quotes_the_text(
    cli: Cli, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    source = folder_of("Qwen3", cli.folder / "model")
    data = json.loads((source / "tokenizer.json").read_text())
    cuts = {"pattern": {"Regex": "[aeiou]"}, "behavior": "Isolated", "invert": False}
    both = [{"type": "Split", **cuts}, data["pre_tokenizer"]]
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    (source / "tokenizer.json").write_text(json.dumps(data))
    cli("merge", "model", "out", "--gguf", said="llama.cpp cuts texts differently")
