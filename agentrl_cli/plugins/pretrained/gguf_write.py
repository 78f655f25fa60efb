"""`agentrl merge --gguf`: a Hugging Face folder as a GGUF file that llama.cpp runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from agentrl_cli.commands.common import warn
from agentrl_cli.errors import ModelError, UsageError
from agentrl_cli.errors import writing as disk_writing
from agentrl_cli.plugins.pretrained.gguf_file import require_reader
from agentrl_cli.plugins.pretrained.gguf_vocabulary import OTHERS, Vocabulary, find_vocabulary

if TYPE_CHECKING:
    from agentrl_cli.chat.render import Chat

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
    writer.add_context_length(min(config.max_position_embeddings, window))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
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
