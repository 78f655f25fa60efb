"""Packing and sharing give the gradient of one episode at a time; mini-batches cut anyhow give that of the whole."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl_cli.config.losses import LOSSES
from agentrl_cli.learning.forward import logprobs
from agentrl_cli.learning.losses import AGGREGATIONS, LossConfig, LossInput, Totals, mark, objective, policy_loss
from agentrl_cli.learning.packing import Segment, pack
from tests.helpers.train import VOCABULARY, write_model
from tests.learning.test_losses import chosen

LIMIT = 1e-5
CONFIG = LossConfig(chosen("ppo_clip"), kl_coef=0.1, entropy_coef=0.02, correction="mis_sequence", correction_cap=3.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """The model now, before the step, and the reference: a little apart."""
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path_factory.mktemp("model") / "random", layers=1)
    now: Any = AutoModelForCausalLM.from_pretrained(folder).eval()  # type: ignore[no-untyped-call]
    found = [now]
    torch.manual_seed(0)
    for _ in range(2):
        other = copy.deepcopy(now).requires_grad_(False)
        for tensor in other.parameters():
            tensor += 0.02 * torch.randn_like(tensor)
        found.append(other)
    return found[0], found[1], found[2]


def segments(seed: int) -> list[list[Segment]]:
    """Two groups of one and three episodes that share a prompt; tool tokens lie between sampled ones."""
    rng = np.random.default_rng(seed)
    groups = []
    for size in (1, 3):
        prompt = rng.integers(5, VOCABULARY, int(rng.integers(4, 9)))
        group = []
        for _ in range(size):
            said = rng.integers(5, VOCABULARY, int(rng.integers(3, 14)))
            mask = np.concatenate([np.zeros(len(prompt), bool), rng.random(len(said)) < 0.7])
            mask[len(prompt)] = True
            group.append(Segment(np.concatenate([prompt, said]).astype(np.int32), mask))
        groups.append(group)
    return groups


def given(models: tuple[Any, Any, Any], groups: list[list[Segment]], advantage: list[Tensor], share: bool) -> LossInput:
    now, before, reference = models
    packed = pack(groups, share=share)
    out = logprobs(now, packed)
    with torch.no_grad():
        old, ref = logprobs(before, packed).logp, logprobs(reference, packed).logp
    noise = 0.3 * torch.sin(torch.arange(len(packed.targets)) * 1.0 + torch.from_numpy(packed.targets))
    return LossInput(
        out.logp,
        old,
        torch.cat(advantage),
        torch.from_numpy(packed.episode),
        entropy=out.entropy,
        ref=ref,
        sampled=old + noise if share else None,
    )


def gradient(model: Any, losses: list[Tensor]) -> Tensor:
    model.zero_grad(set_to_none=True)
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def advantages(groups: list[list[Segment]]) -> list[Tensor]:
    rng = np.random.default_rng(7)
    counts = [int(s.trained.sum()) for group in groups for s in group]
    return [torch.full((n,), float(a)) for n, a in zip(counts, rng.normal(size=len(counts)), strict=True)]


PAIRS = [
    *((name, "seq_mean") for name in sorted(set(LOSSES) - {"sapo"})),
    *(("sapo", name) for name in sorted(AGGREGATIONS)),
]
"""Every loss with every aggregation is in test_algo_settings.py, through the learner."""


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
def test_packed_and_shared_is_one_episode_at_a_time(models: Any, name: str, aggregation: str) -> None:
    groups = segments(seed=len(name) + len(aggregation))
    mine = advantages(groups)
    whole = given(models, groups, mine, share=True)
    c = replace(CONFIG, options=chosen(name, fraction=0.3, low=-9.0, high=9.0, clip_high=0.28))
    whole = replace(whole, marked=mark(c.options, whole.logp, whole.advantage))
    totals = Totals.of(whole.segment, 32)
    packed = gradient(models[0], [objective(whole, c, totals, policy_loss(name), AGGREGATIONS[aggregation]).loss])
    losses = []
    flat = [segment for group in groups for segment in group]
    for n, (segment, advantage) in enumerate(zip(flat, mine, strict=True)):
        here = whole.segment == n
        one = given(models, [[segment]], [advantage], share=False)
        assert whole.sampled is not None
        one = replace(one, sampled=whole.sampled[here], marked=None if whole.marked is None else whole.marked[here])
        torch.testing.assert_close(one.old, whole.old[here], atol=1e-5, rtol=1e-5)
        losses.append(objective(one, c, totals, policy_loss(name), AGGREGATIONS[aggregation]).loss)
    alone = gradient(models[0], losses)
    assert float((packed - alone).norm() / alone.norm()) < LIMIT
