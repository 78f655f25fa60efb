"""What sampling multiplies with: adapters added in float32 alone, never older weights, and the model as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agentrl_cli.inference import sampling_weights
from agentrl_cli.inference.engine import PagedEngine
from agentrl_cli.inference.products import WAYS, fastest_way
from agentrl_cli.inference.sampling_weights import SamplingWeights, find_parts, linear_layers
from agentrl_cli.models.adapter import use_adapter
from agentrl_cli.types import Sampling
from tests.helpers.local import policy_of, tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:.lora_bias=True"
)  # the layers of tiny models have no bias
IDS = torch.arange(7)[None]


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = get_peft_model(
        tiny("qwen3").to(dtype),
        LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **options),
    )
    return model.eval()


def layers(model: Any) -> list[Any]:
    found = [(layer, find_parts(layer)) for (layer,) in linear_layers(model)]
    return [layer for layer, part in found if part is not None and part[1]]


def merged_logits(model: Any, merged: SamplingWeights) -> torch.Tensor:
    with torch.inference_mode():
        merged.refresh()
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
        merged_logits(model, SamplingWeights(linear_layers(model))),
        logits(model),
        atol=1e-5,
        rtol=1e-5,
    )
    assert len(layers(model)) == count and not any(
        "forward" in vars(layer) for layer in model.modules()
    )


def test_new_weights_and_another_adapter_are_seen_after_renew() -> None:
    model = adapted()
    merged, before = SamplingWeights(linear_layers(model)), logits(model)
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


def test_a_large_model_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_weights, "copied", lambda weights: False)
    model = adapted()
    weights = SamplingWeights(linear_layers(model))
    with torch.inference_mode():
        weights.refresh()
        with weights.apply():
            assert not any("forward" in vars(layer) for layer in model.modules())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("biased", [False, True])
def test_every_way_is_the_same_product(way: str, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(n, 48, generator=generator) for n in (80, 5))
    bias = torch.randn(80, generator=generator) if biased else None
    with torch.inference_mode():
        found = WAYS[way](weight, bias)(rows)
    torch.testing.assert_close(found, torch.nn.functional.linear(rows, weight, bias))


def test_a_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = fastest_way(torch.empty(0), 80, 48)
    file = tmp_path / "agentrl" / "products.json"
    assert found in WAYS and f'"{found}"' in file.read_text()
    other = next(way for way in WAYS if way != found)
    file.write_text(file.read_text().replace(f'"{found}"', f'"{other}"'))
    assert fastest_way(torch.empty(0), 80, 48) == other  # read, not tried
    file.write_text("damaged")
    assert fastest_way(torch.empty(0), 80, 48) in WAYS


async def test_a_policy_samples_with_new_weights_and_frees_the_sums() -> None:
    model = adapted()
    policy = policy_of(model)
    assert isinstance(policy._engine, PagedEngine)
    merged = policy._engine.runner.weights
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
    assert merged._products
    await policy.rest()
    assert not merged._products
