"""Every decoder architecture of the installed transformers, as a tiny random model: sampled, trained, compared.

`python benchmarks/architectures.py check [CLASS …]` samples four episodes of two turns and computes an update of two
groups, and compares log-probabilities and gradients with the model's plain forward. `… ratio CLASS …` measures 64
episodes (groups of 8, prompts of 96, 16 to 48 new tokens) beside `generate` with the same prompts and no
log-probabilities, in CPU seconds, three interleaved rounds after a warm-up; `… ratio-3M CLASS …` the same with 2 to 3
million parameters, where products and not calls take the time. All write benchmarks/results/architectures.json and the
table of docs/models.md.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks/results/architectures.json", ROOT / "docs/models.md"
VOCAB, ROUNDS = 96, 3

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 32, "n_embed": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "intermediate_size": 64, "ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64, "ffn_hidden_size": 64,
    "n_inner": 64, "d_ff": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "mlp_intermediate_size": 64, "intermediate_size_mlp": 64,
    "head_dim": 8, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "moe_num_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 12,
    "sliding_window": 16, "attention_chunk_size": 16, "attention_window_size": 16, "max_position_embeddings": 512,
    "n_positions": 512, "n_ctx": 512, "max_seq_len": 512,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1,
    "mamba_chunk_size": 16, "chunk_size": 16, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "index_n_heads": 4, "index_head_dim": 8, "o_lora_rank": 16, "o_groups": 2,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "state_size": 8, "time_step_rank": 4,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.15,
}  # fmt: skip
"""What configurations call their sizes."""


LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
FOUR = {"num_hidden_layers": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    "BailingHybrid": {"head_dim": 8, "layer_types": [LINEAR, FULL], "mlp_layer_types": ["dense", "sparse"]},
    **{name: {"pad_token_id": 1} for name in ("Camembert", "Data2VecText", "Roberta", "RobertaPreLayerNorm")},
    **{name: {"pad_token_id": 1} for name in ("XLMRoberta", "XLMRobertaXL", "ProphetNet", "XLM")},
    "Xmod": {"pad_token_id": 1, "default_language": "en_XX"},
    "CodeGen": {"rotary_dim": 8}, "GPTJ": {"rotary_dim": 8},
    "Bamba": {"attn_layer_indices": [1]},
    "Cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "Emu3": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "Gemma3n": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "intermediate_size": [64] * 4,
        "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    },
    "Gemma4Unified": {"global_head_dim": 8, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    "Qwen4Exp": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16, "hc_lowrank": 8,
        "indexer_compress_ratio": 4, "ple_layer_ids": [1], "ngram_vocab_size_base": 32, "heads_per_ngram": 4,
        "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 8, "eos_token_id": 2,
    },
    "Gemma4": {"global_head_dim": 8, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    "DeepseekV4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "GraniteMoeHybrid": {"layer_types": [LINEAR, FULL]},
    **{
        name: {"swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "rel_extent": 64}
        | {"unpadded_vocab_size": 96} | loop
        for name, loop in (
            ("Inkling", {}), ("Inkling2", {}), ("Inkling2Loop", {
                "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2}),
        )
    },
    "Jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "KimiLinear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "Laguna": {"num_attention_heads_per_layer": [4, 4]},
    "Lfm2": {"layer_types": ["conv", FULL]},
    "Lfm2Moe": {"layer_types": ["conv", FULL], "num_dense_layers": 1},
    "Mamba2": {"num_heads": 8, "head_dim": 8},
    "ModernBert": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "MiniMax": {"block_size": 16},
    "RecurrentGemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "LongcatFlash": {"head_dim": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    "Reformer": {"pad_token_id": 0, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32]},
    "RoCBert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8,
        "pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "XLNet": {}, "xLSTM": {},
    "Zamba": {"num_hidden_layers": 4, "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"]},
    "Zamba2": {"layers_block_type": [LINEAR, "hybrid"], "hybrid_layer_ids": [1]},
    "Zaya": {"num_experts_per_tok": 1},
    "CTRL": {"dff": 64}, "CpmAnt": {"dim_head": 8, "dim_ff": 64},
}  # fmt: skip
"""What a configuration needs beside its sizes."""
DROPPED = {
    "Falcon": {"head_dim"}, "xLSTM": {"v_head_dim", "qk_head_dim"}, "XLNet": {"max_position_embeddings"},
    "ProphetNet": {"num_hidden_layers"}, "Gemma4": {"head_dim"}, "Gemma4Unified": {"head_dim"},
    "Zamba": {"head_dim", "mamba_head_dim"}, "Zamba2": {"head_dim"},
}  # fmt: skip
"""Sizes that a configuration derives itself."""
SKIPPED = {
    "Blt": "predicts bytes in patches that a second model cuts",
    "Dbrx": "its configuration of this version cannot be made",
    "Mllama": "its text model needs images",
    "Gemma4Assistant": "drafts for another model",
    "Gemma4UnifiedAssistant": "drafts for another model",
    "Musicgen": "predicts audio codes",
    "MusicgenMelody": "predicts audio codes",
    "Moshi": "predicts audio codes",
    "Git": "needs a vision tower of its own size",
    "GotOcr2": "its text model is Qwen2's",
    "MossTranscribeDiarize": "transcribes audio",
    "Phi4Multimodal": "needs vision and speech towers; its text model is Phi3's",
    "Gemma3n.ForConditionalGeneration": "needs timm; its text model is in the table",
    "CohereCompass": "its configuration of this version cannot be made",
    "Dots3Note": "its configuration of this version cannot be made",
}
"""Classes that are not decoders of text by themselves, and why."""


def names() -> list[str]:
    """Classes of causal models that transformers generates with."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, None] = {}
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        for one in (name,) if isinstance(name, str) else name:
            found[one] = None
    return [name for name in found if not name.endswith("ForConditionalGeneration")]


def family(name: str) -> str:
    """`Qwen3` of `Qwen3ForCausalLM`."""
    for ending in ("ForCausalLM", "LMHeadModel", "WithLMHead", "ModelWithLMHead", "Decoder"):
        name = name.removesuffix(ending) or name
    return name.removesuffix("Model")


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model of this class with random weights, in eval mode."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    kind, own = cls.config_class, family(name)
    plain = kind()
    text = plain.get_text_config()
    dropped = DROPPED.get(own, set()) | ({"head_dim"} if _has(text, "qk_rope_head_dim") else set())
    known = {key: value for key, value in SIZES.items() if key not in dropped and _has(text, key)}
    if isinstance(getattr(plain, "is_decoder", None), bool):
        known["is_decoder"] = True
    types = list(dict.fromkeys(vars(text).get("layer_types") or ()))
    if len(types) > 1:
        known |= {"layer_types": types, "num_hidden_layers": len(types)}
        if vars(text).get("mlp_layer_types"):
            known["mlp_layer_types"] = ["dense", "sparse", "sparse"][: len(types)]
    if _has(text, "kv_lora_rank") and "num_key_value_heads" in known:
        known["num_key_value_heads"] = known["num_attention_heads"]
    torch.manual_seed(seed)
    return cls(kind(**{**known, **SPECIAL.get(own, {}), **changes})).eval()


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except AttributeError:
        return False


# --- what is compared --------------------------------------------------------------------------------------------


def check(name: str) -> dict[str, Any]:
    """How a class is sampled and trained, and how far its numbers are from its plain forward's; or why it is not."""
    from agentrl_cli.errors import AgentRLError
    from agentrl_cli.inference.policy import LocalPolicy
    from agentrl_cli.learning.forward import way_of

    if family(name) in SKIPPED:
        return {"refused": SKIPPED[family(name)]}
    try:
        model = build(name)
        policy = LocalPolicy(model, context_length=256, rows=8, memory=2**28)
    except AgentRLError as error:
        return {"refused": error.message}
    try:
        sampled = asyncio.run(_sampled(policy, model))
    except AgentRLError as error:
        return {"failed": error.message, "refused": f"fails at a turn: {error.message}"}
    found: dict[str, Any] = {"engine": policy.engine, "reason": policy.engine_why, "logp": sampled}
    try:
        found["gradient"] = trained(model)
        found["training"] = way_of(model)
    except AgentRLError as error:
        found["training"] = error.message
    return found


async def _sampled(policy: Any, model: Any) -> float:
    """The largest difference of a log-probability, over four episodes of two turns, two of them with one prompt."""
    import torch

    from agentrl_cli.types import Sampling

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (30, 21, 44)]

    async def episode(n: int) -> float:
        ids, worst = list(prompts[max(0, n - 1)]), 0.0
        for _ in range(2):
            said = await policy.generate(str(n), ids, Sampling(seed=n, max_new_tokens=5 + n))
            whole = torch.tensor([ids + said.ids.tolist()])
            with torch.no_grad():
                logp = (
                    model(input_ids=whole, use_cache=False)
                    .logits[0, len(ids) - 1 : -1]
                    .float()
                    .log_softmax(-1)
                )
            wanted = logp.gather(1, whole[0, len(ids) :, None])[:, 0].numpy()
            worst = max(worst, float(np.abs(wanted - said.logp_policy).max()))
            ids = whole[0].tolist() + rng.integers(0, VOCAB, 3 + n).tolist()
        return worst

    found = await asyncio.gather(*map(episode, range(4)))
    await policy.close()
    return max(found)


def trained(model: Any) -> float:
    """The largest difference of a gradient from that of plain forwards, relative to the largest gradient."""
    import torch

    from agentrl_cli.learning.forward import trained_logprobs
    from agentrl_cli.learning.packing import Segment

    rng = np.random.default_rng(1)
    groups: list[list[Segment]] = []
    for prompt in (40, 25):
        first = rng.integers(0, VOCAB, prompt)
        both = [
            np.concatenate([first, rng.integers(0, VOCAB, n)]).astype(np.int32) for n in (7, 12, 17)
        ]
        groups.append([Segment(ids, np.arange(len(ids)) >= prompt) for ids in both])
    _, out = trained_logprobs(model, groups)
    weights = torch.randn(len(out.logp), generator=torch.Generator().manual_seed(0))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((out.logp * weights).sum(), parameters, allow_unused=True)
    parts = []
    for segment in (segment for group in groups for segment in group):
        ids = torch.from_numpy(segment.ids.astype(np.int64))
        logp = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        parts.append(logp.gather(1, ids[1:, None])[torch.from_numpy(segment.trained[1:]), 0])
    wanted = torch.autograd.grad((torch.cat(parts) * weights).sum(), parameters, allow_unused=True)
    largest = max(float(grad.abs().max()) for grad in wanted if grad is not None)
    pairs = [
        (torch.zeros_like(p) if a is None else a, torch.zeros_like(p) if b is None else b)
        for _, p, a, b in zip(names, parameters, found, wanted, strict=True)
    ]
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


# --- speed -----------------------------------------------------------------------------------------------------------


def larger(name: str) -> dict[str, Any]:
    """Changes to a tiny configuration that give 2 to 3 million parameters in six layers."""
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
    }
    types = (
        {"layer_types": [SLIDING, FULL] * 3}
        if family(name) in ("Gemma2", "Gemma3", "Cohere2")
        else {}
    )
    width = {"head_dim": 32} if family(name) in ("Gemma2", "Gemma3", "Qwen3Moe") else {}
    return {**sizes, **types, **width, "num_key_value_heads": 2, "vocab_size": 2048}


def ratios(name: str, episodes: int = 64, **changes: Any) -> list[float]:
    """CPU seconds of `generate` divided by the policy's, by round."""
    import torch

    from agentrl_cli.inference.policy import LocalPolicy
    from agentrl_cli.types import Sampling

    model, rng = build(name, **changes), np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 96).tolist() for _ in range(episodes // 8)]
    counts = rng.integers(16, 49, episodes).tolist()
    policy = LocalPolicy(model, context_length=256, rows=episodes, memory=2**30)
    ids = torch.tensor([prompts[n // 8] for n in range(episodes)])

    async def ours(number: int) -> None:
        async def one(n: int) -> None:
            key = f"{number}-{n}"
            await policy.generate(key, prompts[n // 8], Sampling(seed=n, max_new_tokens=counts[n]))
            await policy.release(key)

        await asyncio.gather(*map(one, range(episodes)))

    async def rounds() -> list[float]:
        found = []
        for number in range(ROUNDS + 1):
            started = time.process_time()
            await ours(number)
            between = time.process_time()
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max(counts),
                    do_sample=True,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            found.append((time.process_time() - between) / (between - started))
        await policy.close()
        return found[1:]

    return asyncio.run(rounds())


# --- the table -------------------------------------------------------------------------------------------------------


def table(results: dict[str, dict[str, Any]]) -> str:
    """The rows of docs/models.md."""
    lines = [
        "| class | engine | in training | log-probability | gradient | ratio to `generate` | ratio at 3M |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results.items():
        if "refused" in found:
            lines.append(f"| {name} | none: {_short(found['refused'])} | | | | | |")
            continue
        limits = found["reason"].partition("; ")[2]
        engine = found["engine"] + (f"; {limits}" if limits else "")
        speeds = " | ".join(_spread(found.get(key)) for key in ("ratio", "ratio-3M"))
        gradient = f"{found['gradient']:.0e}" if "gradient" in found else ""
        lines.append(
            f"| {name} | {engine} | {_short(found['training'])} | {found['logp']:.0e} | {gradient} | {speeds} |"
        )
    return "\n".join(lines)


def _spread(ratio: list[float] | None) -> str:
    return (
        ""
        if not ratio
        else f"{min(ratio):.2f} / **{sorted(ratio)[len(ratio) // 2]:.2f}** / {max(ratio):.2f}"
    )


def _short(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:150]


def write(results: dict[str, dict[str, Any]]) -> None:
    """Store the results, and put the table into the page."""
    ordered = {name: results[name] for name in sorted(results, key=str.lower)}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    head, start, rest = PAGE.read_text(encoding="utf-8").partition("<!-- architectures:start -->\n")
    _, end, tail = rest.partition("<!-- architectures:end -->")
    PAGE.write_text(head + start + table(ordered) + "\n" + end + tail, encoding="utf-8")


def main(arguments: list[str]) -> None:
    """`check [CLASS …]`, `ratio CLASS …` or `ratio-3M CLASS …`."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for name in arguments[1:] or names():
        if arguments[0].startswith("ratio"):
            found = ratios(name, **(larger(name) if arguments[0] == "ratio-3M" else {}))
            results.setdefault(name, check(name))[arguments[0]] = [round(each, 2) for each in found]
        else:
            known = {
                key: results[name][key]
                for key in ("ratio", "ratio-3M")
                if key in results.get(name, {})
            }
            results[name] = check(name) | known
        print(name, results[name], flush=True)
        write(results)


if __name__ == "__main__":
    main(sys.argv[1:] or ["check"])
