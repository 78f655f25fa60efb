"""Architectures of every kind of cache: sampled and trained with the numbers of their plain forward, or refused."""

import pytest

from agentrl_cli.errors import ModelError
from agentrl_cli.inference.cached_forward import Abilities, CachedForward
from agentrl_cli.inference.policy import LocalPolicy
from benchmarks.architectures import build, check, names

# Linear attention, convolutions, state spaces, latents, compression, chunks, positions and heads
# of their own.
WAYS = {
    "Qwen3_5ForCausalLM": ("fallback", "padded"),
    "Lfm2ForCausalLM": ("fallback", "padded"),
    "NemotronHForCausalLM": ("fallback", "padded"),
    "Mamba2ForCausalLM": ("fallback", "padded"),
    "DeepseekV3ForCausalLM": ("fallback", "packed"),
    "DeepseekV4ForCausalLM": ("fallback", "padded"),
    "Llama4ForCausalLM": ("fallback", "padded"),
    "BartForCausalLM": ("fallback", "padded"),
    "BertLMHeadModel": ("paged", "whole"),
    "Gemma3ForCausalLM": ("paged", "packed"),
    "GptOssForCausalLM": ("paged", "padded"),
    "CamembertForCausalLM": ("fallback", "whole"),
}


@pytest.mark.parametrize("name", WAYS)
def test_numbers_are_those_of_the_plain_forward(name: str) -> None:
    found = check(name)
    assert (found["engine"], found["training"]) == WAYS[name]
    assert found["logp"] < 1e-4 and found["gradient"] < 1e-3


REFUSED = ("CpmAntForCausalLM", "XLMWithLMHeadModel")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_causal_decoder_is_refused(name: str) -> None:
    assert check(name)["refused"].startswith(f"{name} ")


@pytest.mark.classes
@pytest.mark.parametrize("name", [name for name in names() if name not in {*WAYS, *REFUSED}])
def test_every_other_class_is_computed_or_refused(name: str) -> None:
    found = check(name)
    assert "failed" not in found
    if "refused" in found:
        assert found["refused"]
    else:
        assert found["logp"] < 1e-3 and found.get("gradient", 0.0) < 1e-2 and found["training"]


def test_what_a_cache_can_do() -> None:
    """Found by trying: Mamba does not add several tokens to a state; what compresses its keys is not batched."""
    found = {
        name: Abilities.of(CachedForward(build(f"{name}ForCausalLM")))
        for name in ("Lfm2", "Mamba", "DeepseekV4")
    }
    assert found["Lfm2"].extends and found["Lfm2"].pads and not found["Lfm2"].limits
    assert (
        not found["Mamba"].extends
        and found["Mamba"].batches == "any"
        and not found["Mamba"].columns
    )
    assert found["DeepseekV4"].batches == "single" and "one sequence" in found["DeepseekV4"].limits


def test_what_looks_ahead_is_refused_when_the_policy_is_made() -> None:
    with pytest.raises(ModelError, match="not a causal decoder"):
        LocalPolicy(build("BertLMHeadModel", is_decoder=False), context_length=64, memory=2**24)
