"""Small models with random weights, conversations with a policy, and what `generate` would have said."""

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.types import TOP_K, Generation, Sampling, StopReason

VOCAB = 96
STOP = 5
TURNS = 3

SWITCH = 128
"""Tokens beyond which the positions of `LONGROPE` are others."""
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": SWITCH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 5.0, 6.0, 7.0],
        "original_max_position_embeddings": SWITCH,
    },
}

# Architecture and what its configuration has of its own. Windows are shorter than every
# conversation.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "llama": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "minimind": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "mistral": ("Mistral", {"sliding_window": 12, "head_dim": 8}),
    "qwen2-sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 8,
            "sliding_window": 12,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
        }
        | {
            "final_logit_softcapping": 8.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_implementation": "eager",
        },
    ),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 8, "sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"attn_implementation": "eager"},
    ),
}


def tiny(kind: str = "qwen3", **changes: Any) -> Any:
    """A model of two layers whose random weights are so large that the best token is never a close call."""
    import transformers

    name, extra = KINDS.get(kind, (kind, {}))
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.15,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    config = getattr(transformers, f"{name}Config")(**{**given, **extra, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # sinks are made empty
        for key, weight in model.named_parameters():
            if "sinks" in key:
                weight.normal_()
    return model


# What `policy_of` made; tests/inference closes it after each test.
MADE: WeakSet[LocalPolicy] = WeakSet()


def policy_of(model: Any, **changes: Any) -> LocalPolicy:
    made = LocalPolicy(model, **{"context_length": 256, "rows": 6, "memory": 2**28, **changes})
    MADE.add(made)
    return made


def prompts(seed: int = 0, count: int = 12) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    system = rng.integers(6, VOCAB, 24).tolist()
    groups = [[*system, *rng.integers(0, VOCAB, n).tolist()] for n in (3, 17, 9)]
    loners = [rng.integers(0, VOCAB, n).tolist() for n in (1, 40, 21, 5, 11, 33, 2)]
    return [*(group for group in groups for _ in range(3)), *loners][:count]


def forced(
    model: Any, ids: Sequence[int], count: int, stop: int | None = None, *, said: list[int]
) -> tuple[list[int], list[float]]:
    """What greedy decoding says, seen in one forward over what was said: the likeliest token at every position."""
    given = torch.tensor([[*ids, *said]])
    with torch.no_grad():
        logp = torch.log_softmax(
            model(input_ids=given, use_cache=False).logits[0, len(ids) - 1 : -1].float(), -1
        )
    best = logp.argmax(-1).tolist()
    end = best.index(stop) + 1 if stop in best[:count] else count
    return best[:end], logp.max(-1).values.tolist()[:end]


def greedy(
    model: Any, ids: Sequence[int], count: int, stop: int | None = STOP, *, said: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """What `generate` says, and the log-probability of each token."""
    given = torch.tensor([list(ids)])
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=STOP,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[0, len(ids) :].tolist()
    rows = [torch.log_softmax(step[0].float(), -1) for step in out.logits]
    return new, [float(row[token]) for row, token in zip(rows, new, strict=True)]


async def check_turn(
    policy: Policy, model: Any, ids: Sequence[int], count: int, key: str = "a"
) -> Generation:
    """A greedy turn is what the model's own forward says."""
    said = await policy.generate(key, ids, Sampling(temperature=0, max_new_tokens=count))
    assert said.ids.tolist() == forced(model, ids, count, said=said.ids.tolist())[0]
    return said


async def converse(
    policy: Policy, key: str, prompt: Sequence[int], number: int, more: int = 0
) -> list[tuple[list[int], Generation]]:
    rng = np.random.default_rng(number)
    ids, said = list(prompt), []
    for turn in range(TURNS):
        sampling = Sampling(
            temperature=0, max_new_tokens=4 + more + (number + turn) % 5, stop_ids=(STOP,)
        )
        generation = await policy.generate(key, ids, sampling, group="")
        said.append((list(ids), generation))
        ids += generation.ids.tolist() + rng.integers(0, VOCAB, 2 + number % 4).tolist()
        if number % 3 == 0:
            await asyncio.sleep(0.002)
    await policy.release(key)
    return said


async def check_against_generate(
    model: Any, count: int = 16, more: int = 0, **changes: Any
) -> LocalPolicy:
    """`count` conversations at once; every token and log-probability is what `generate` gives alone."""
    policy = policy_of(model, **changes)
    everything = await asyncio.gather(
        *(converse(policy, f"e{n}", ids, n, more) for n, ids in enumerate(prompts(count=count)))
    )
    await policy.close()
    for number, episode in enumerate(everything):
        for turn, (ids, said) in enumerate(episode):
            judge = (
                greedy if number % 5 == 0 else forced
            )  # `generate` is slow; one forward tells the same
            tokens, logps = judge(
                model, ids, 4 + more + (number + turn) % 5, STOP, said=said.ids.tolist()
            )
            assert said.ids.tolist() == tokens, (number, turn)
            assert np.abs(said.logp_policy - np.array(logps)).max() < 1e-4
            assert said.logp_sampled.tolist() == [0.0] * len(tokens)  # a greedy choice is certain
            assert (said.stop_reason is StopReason.STOP) == (tokens[-1] == STOP)
            assert (said.top_ids[:, 0] == said.ids).all() and said.top_ids.shape == (
                len(tokens),
                TOP_K,
            )
    return policy
