"""An adapter is added to the weights while sampling: the same numbers, only in float32, and never older weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agentrl_cli.inference import merged_weights
from agentrl_cli.inference.engine import PagedEngine
from agentrl_cli.inference.merged_weights import MergedWeights, mergeable
from agentrl_cli.models.adapter import use_adapter
from agentrl_cli.types import Sampling
from tests.helpers.local import policy_of, tiny

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.is_gradient_checkpointing:FutureWarning"
    ),  # peft's, on transformers 5
    pytest.mark.filterwarnings("ignore:.lora_bias=True"),  # the layers of tiny models have no bias
]
IDS = torch.arange(7)[None]


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = get_peft_model(
        tiny("qwen3").to(dtype),
        LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **options),
    )
    return model.eval()


def layers(model: Any) -> list[Any]:
    return [layer for layer in model.modules() if mergeable(layer)]


def merged_logits(model: Any, merged: MergedWeights) -> torch.Tensor:
    with torch.inference_mode(), merged.apply():
        assert all("forward" in vars(layer) for layer in layers(model))
        found: torch.Tensor = model(IDS).logits
        return found


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
        return found


def test_the_numbers_are_those_of_the_adapted_model_and_its_layers_stay_as_they_are() -> None:
    model = adapted()
    count = len(layers(model))
    assert count == 2 * 7
    torch.testing.assert_close(
        merged_logits(model, MergedWeights(model)), logits(model), atol=1e-5, rtol=1e-5
    )
    assert len(layers(model)) == count and not any(
        "forward" in vars(layer) for layer in model.modules()
    )


def test_new_weights_and_another_adapter_are_seen_after_renew() -> None:
    model = adapted()
    merged, before = MergedWeights(model), logits(model)
    merged_logits(model, merged)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.add_(0.5)
    torch.testing.assert_close(merged_logits(model, merged), before, atol=1e-5, rtol=1e-5)
    merged.renew()
    torch.testing.assert_close(merged_logits(model, merged), logits(model), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(model), before, atol=1e-2)
    use_adapter(model, None)
    merged.renew()
    assert layers(model) == []
    torch.testing.assert_close(merged_logits(model, merged), logits(model), atol=0, rtol=0)


@pytest.mark.parametrize(
    "odd", [{"dtype": torch.bfloat16}, {"use_dora": True}, {"lora_bias": True}]
)
def test_what_is_more_than_two_float32_matrices_is_not_merged(odd: dict[str, Any]) -> None:
    assert layers(adapted(**odd)) == []


def test_a_large_model_is_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        merged_weights, "MOST_BYTES", 1000
    )  # a larger model would take memory and time for nothing
    model = adapted()
    with torch.inference_mode(), MergedWeights(model).apply():
        assert not any("forward" in vars(layer) for layer in model.modules())


async def test_a_policy_samples_with_new_weights_and_frees_the_sums() -> None:
    model = adapted()
    policy = policy_of(model)
    assert isinstance(policy._engine, PagedEngine)
    merged = policy._engine.runner.merged
    for version in ("one", "two"):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.mul_(-1.5)
        await policy.publish(version)
        said = await policy.generate(
            version, [1, 2, 3, 4], Sampling(temperature=0, max_new_tokens=6)
        )
        whole = torch.tensor([[1, 2, 3, 4, *said.ids.tolist()]])
        with torch.inference_mode():
            wanted = model(whole).logits[0, 3:-1].log_softmax(-1)
        assert torch.allclose(
            wanted.gather(1, whole[0, 4:, None])[:, 0], torch.tensor(said.logp_policy), atol=1e-4
        )
        await policy.release(version)
    assert merged._sums
    await policy.rest()
    assert not merged._sums
    await policy.close()
