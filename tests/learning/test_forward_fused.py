"""Our own training forward under an adapter: the log-probabilities and gradients of transformers' and peft's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl_cli.config.models import LoraConfig
from agentrl_cli.learning import forward, fused_forward
from agentrl_cli.learning.forward import logprobs
from agentrl_cli.learning.packing import Packed, Segment, pack
from agentrl_cli.learning.update import Learner
from agentrl_cli.models.adapter import add_adapter
from tests.helpers import local
from tests.helpers.train import VOCABULARY
from tests.learning.test_update import config, episodes

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")


def make(family: str, dtype: torch.dtype = torch.float32, **adapter: Any) -> Any:
    more = {"sliding_window": None} if family == "mistral" else {}
    model = local.tiny(family, vocab_size=VOCABULARY, **more).to(dtype)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.1 * torch.randn_like(tensor)
    adapted: Any = add_adapter(model, LoraConfig(enabled=True, r=4, alpha=8, **adapter), Path())
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_" in name:
                tensor.copy_(0.2 * torch.randn_like(tensor))
    return adapted


def row(seed: int = 0) -> Packed:
    """Two groups, sharing prompts; answers of several turns, so that some positions predict nothing that is trained."""
    rng = np.random.default_rng(seed)
    groups = []
    for size in (1, 3):
        prompt, group = rng.integers(5, VOCABULARY, 7), []
        for _ in range(size):
            said = rng.integers(5, VOCABULARY, int(rng.integers(6, 14)))
            mask = np.concatenate([np.zeros(7, bool), rng.random(len(said)) < 0.6])
            mask[7] = True
            group.append(Segment(np.concatenate([prompt, said]).astype(np.int32), mask))
        groups.append(group)
    return pack(groups)


def both(
    model: Any, packed: Packed, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[tuple[Tensor, Tensor]]:
    """(log-probabilities, gradient) by our forward and by transformers'."""
    found = []
    for ours in (True, False):
        with monkeypatch.context() as patch:
            if not ours:
                # the way of models that it does not serve; the two are compared on one model
                patch.setattr(forward, "fused_states", lambda *given, **more: None)
            model.zero_grad()
            out = logprobs(model, packed, temperature=0.9, **options)
            weight = torch.randn(len(out.logp), generator=torch.Generator().manual_seed(1))
            ((out.logp * weight).sum() + 0.3 * out.entropy.sum()).backward()  # type: ignore[no-untyped-call]
            grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
            found.append((out.logp.detach(), torch.cat(grads)))
    return found


def used(model: Any, packed: Packed) -> bool:
    return fused_forward.fused_states(model.get_base_model(), packed, checkpoint=False) is not None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_numbers_and_gradients_are_the_models_own(
    family: str, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, packed = make(family, torch.float64), row()
    assert used(model, packed)
    ours, theirs = both(model, packed, monkeypatch, checkpoint=checkpoint)
    torch.testing.assert_close(ours[0], theirs[0], atol=2e-6, rtol=0)
    assert float((ours[1] - theirs[1]).norm() / theirs[1].norm()) < 1e-5


def test_in_float32_by_prepacked_products_and_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, logp, gradient in ((torch.float32, 1e-4, 1e-4), (torch.bfloat16, 0.15, 0.05)):
        model, packed = make("qwen3", dtype), row()
        assert used(model, packed)
        ours, theirs = both(model, packed, monkeypatch)
        assert float((ours[0] - theirs[0]).abs().max()) < logp
        assert float((ours[1] - theirs[1]).norm() / theirs[1].norm()) < gradient
        names = {name for name, p in model.named_parameters() if p.grad is not None}
        assert names and all("lora_" in name for name in names)


def test_some_projections_and_rslora_and_the_adapter_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed = (
        make("qwen3", torch.float64, target_modules=["q_proj", "down_proj"], use_rslora=True),
        row(),
    )
    assert used(model, packed)
    ours, theirs = both(model, packed, monkeypatch)
    torch.testing.assert_close(ours[0], theirs[0], atol=2e-6, rtol=0)
    assert float((ours[1] - theirs[1]).norm() / theirs[1].norm()) < 1e-5
    with torch.no_grad(), model.disable_adapter():
        plain = logprobs(model, packed).logp
        own = logprobs(model.get_base_model(), packed).logp
    assert torch.equal(plain, own) and float((plain - ours[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("what", ["dora", "dropout", "full", "hook"])
def test_what_it_does_not_know_takes_the_models_own_forward(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft: dict[str, dict[str, Any]] = {"dora": {"use_dora": True}, "dropout": {"dropout": 0.5}}
    model, packed = make("qwen3", **peft.get(what, {})), row()
    model.train()
    if what == "full":
        model.requires_grad_(True)
    if what == "hook":
        model.get_base_model().model.layers[0].register_forward_hook(lambda *given: None)
    assert not used(model, packed)
    out = logprobs(model, packed)
    assert torch.isfinite(out.logp).all()
    if what == "dropout":
        model.eval()
        assert used(model, packed)


def test_a_model_whose_numbers_differ_is_not_run_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed = make("qwen3"), row()
    layer = type(model.get_base_model().model.layers[0].mlp)
    # as a later transformers would change it
    monkeypatch.setattr(
        layer,
        "forward",
        lambda self, x: 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * x.mean()),
    )
    assert not used(model, packed)


@pytest.mark.parametrize("lora", [True, False])
def test_training_in_bfloat16_learns(lora: bool) -> None:
    model = make("qwen3", torch.bfloat16)
    if not lora:
        model = model.unload().requires_grad_(True)
    groups = episodes(model, [[0, 1, 1, 0], [1, 0, 0, 1]])
    rates = {"lr": 2e-2 if lora else 3e-3}
    learner = Learner(model, config(train=rates))

    def gap() -> float:
        packed = pack([[Segment.of(e) for e in group] for group in groups])
        with torch.no_grad():
            flat = logprobs(model, packed).logp.numpy()
        logps = [flat[packed.episode == n] for n in range(8)]
        rewards = [e.graded_reward for group in groups for e in group]
        return float(
            np.mean([(r - 0.5) * one.mean() for r, one in zip(rewards, logps, strict=True)])
        )

    before = gap()
    norms = [learner.update(groups, step).metrics["grad_norm"] for step in range(8)]
    assert all(np.isfinite(norms)) and gap() > before + 0.02
    kinds = {("adapter" if "lora_" in n else "base"): p.dtype for n, p in model.named_parameters()}
    assert kinds["base"] is torch.bfloat16 and kinds.get("adapter", torch.float32) is torch.float32
