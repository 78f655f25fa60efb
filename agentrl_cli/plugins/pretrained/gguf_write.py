"""`agentrl merge --gguf`: a Hugging Face folder as a GGUF file that llama.cpp runs.

llama.cpp knows the first cuts of a byte-level tokenizer by a name alone (`tokenizer.ggml.pre`). The name is found by
trial: of the cuts in CUTS, those that give the same ids for the most probe texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from agentrl_cli.commands.common import warn
from agentrl_cli.commands.options import refuse_idle
from agentrl_cli.errors import ModelError, UsageError
from agentrl_cli.errors import writing as disk_writing
from agentrl_cli.plugins.pretrained.gguf_file import require_reader

if TYPE_CHECKING:
    from agentrl_cli.chat.render import Chat
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


NAMES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""Types of transformers' models to names in gguf.MODEL_ARCH."""
TYPES = ("f16", "bf16", "f32", "q8_0")


def settings_of(
    gguf: Annotated[
        bool, Option("--gguf", help="Write a GGUF file for llama.cpp into OUT, too.")
    ] = False,
    gguf_type: Annotated[
        str, Option("--gguf-type", metavar="TYPE", help=f"Its weights: {', '.join(TYPES)}.")
    ] = TYPES[0],
) -> dict[str, Any]:
    """Return the type of the file to write, None for none. Raises UsageError, MissingDependency."""
    if gguf_type not in TYPES:
        raise UsageError(f"Unknown --gguf-type {gguf_type}.", hint=f"Choose {', '.join(TYPES)}.")
    if not gguf:
        refuse_idle("without --gguf", {"--gguf-type": gguf_type != TYPES[0]})
        return {"gguf": None}
    require_reader()
    return {"gguf": gguf_type}


def write_gguf(folder: Path, kind: str) -> Path:
    """Write the model of a folder into it as a GGUF file with weights of a type of TYPES. Raises ModelError."""
    import gguf
    from transformers import AutoConfig

    from agentrl_cli.chat.render import Chat
    from agentrl_cli.chat.tokenizer import Tokenizer

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in NAMES:
        known = ", ".join(NAMES)
        raise ModelError(
            f"A model of the type {config.model_type} cannot be written as GGUF: {known} can.",
            hint=OTHERS,
        )
    tokenizer = Tokenizer.load(folder)
    chat = Chat(tokenizer, "auto", append_only=True)
    found = find_vocabulary(tokenizer, int(config.vocab_size), _conversations(chat))
    if found.wrong:
        warn(
            f"llama.cpp cuts texts differently from this tokenizer: of {len(found.wrong)} probe texts it makes other"
            f" tokens, of {found.wrong[0][:40]!r} for one. `agentrl certify RUN@best {folder}` shows its cost."
        )
    path = folder / f"{folder.resolve().name}-{kind}.gguf"
    beside = path.with_name(f".{path.name}.partial")
    architecture = gguf.MODEL_ARCH[NAMES[config.model_type]]
    try:
        with disk_writing(str(path), hint="Free some space."):
            writer = gguf.GGUFWriter(beside, gguf.MODEL_ARCH_NAMES[architecture])
            writer.add_name(folder.resolve().name)
            _add_shape(writer, config)
            _add_tokenizer(writer, folder, chat, found)
            _add_weights(writer, folder, config, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _conversations(chat: Chat) -> list[str]:
    """Return texts as the model's template writes them."""
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 12.5 % of 80?"},
        {"role": "assistant", "content": "It's 10."},
        {"role": "user", "content": "Thanks!\nAnd 中文?"},
    ]
    text = {"type": "string", "description": "Python."}
    given = {"type": "object", "properties": {"code": text}, "required": ["code"]}
    tool = {"name": "run", "description": "Run code.", "parameters": given}
    tools = [[], [{"type": "function", "function": tool}]]
    return [chat.decode(chat.rendered_ids(said, one, add_generation_prompt=True)) for one in tools]


def _add_shape(writer: Any, config: Any) -> None:
    """Write the sizes of the model and its positions. Raises ModelError for positions that are not written."""
    import gguf

    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    rope = config.rope_parameters
    shape = {
        "context_length": min(config.max_position_embeddings, window),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": width,
        "value_length": width,
        "rope_dimension_count": width,
        "rope_freq_base": rope["rope_theta"],
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }
    for name, value in shape.items():
        getattr(writer, f"add_{name}")(value)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "llama3" and NAMES[config.model_type] == "LLAMA":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        steps = rope["rope_theta"] ** -(scaled.new_tensor(range(0, width, 2)) / width)
        writer.add_tensor("rope_freqs.weight", (steps / scaled).numpy())
    elif rope["rope_type"] != "default":
        raise ModelError(
            f"Positions of the kind {rope['rope_type']} are not written as GGUF.",
            hint=OTHERS,
        )


def _add_tokenizer(writer: Any, folder: Path, chat: Chat, found: Vocabulary) -> None:
    """Write tokens, merges, the tokens that end a turn, whether a text begins with one, and the chat template."""
    import gguf
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(chat.tokenizer.json)
    plain, whole = (backend.encode("a", add_special_tokens=own).ids for own in (False, True))
    first = whole.index(plain[0])
    special = gguf.SpecialVocab(folder, n_vocab=len(found.tokens))
    special.merges = list(found.merges)
    special.special_token_ids |= dict(zip(("eos", "eot"), chat.stop_ids, strict=False))
    special.special_token_ids |= {"bos": whole[0]} if first else {}
    special.add_special_token = {"bos": first > 0, "eos": len(whole) > first + len(plain)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(found.pre)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.kinds)
    special.add_to_gguf(writer, quiet=True)


def _add_weights(writer: Any, folder: Path, config: Any, kind: str) -> None:
    """Write every tensor: vectors in float32, a matrix whose rows the type does not divide in float16."""
    import gguf
    from safetensors import safe_open

    architecture = gguf.MODEL_ARCH[NAMES[config.model_type]]
    wanted = gguf.GGMLQuantizationType[kind.upper()]
    kinds = {"F32": "ALL_F32"}
    name_of = gguf.get_tensor_name_map(architecture, config.num_hidden_layers).get_name
    writer.add_file_type(gguf.LlamaFileType[kinds.get(wanted.name, f"MOSTLY_{wanted.name}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                value = tensors.get_tensor(name).float().numpy()
                written = name_of(name, try_suffixes=(".weight", ".bias"))
                if written is None:
                    raise ModelError(f"llama.cpp has no place for the weights {name}.")
                heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
                if architecture is gguf.MODEL_ARCH.LLAMA and (n := heads.get(name.split(".")[-2])):
                    # transformers turns the halves of a head, llama.cpp pairs of neighbours
                    halves = value.reshape(n, 2, value.shape[0] // n // 2, *value.shape[1:])
                    value = halves.swapaxes(1, 2).reshape(value.shape)
                fits = wanted if value.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16
                as_is = gguf.GGMLQuantizationType.F32 if value.ndim == 1 else fits
                writer.add_tensor(written, gguf.quants.quantize(value, as_is), raw_dtype=as_is)
