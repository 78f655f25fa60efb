"""Training under the distribution that was sampled from: the tokens that truncation left are stored and used again."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.logprobs import head_logprobs
from agentrl_cli.learning.packing import Segment
from agentrl_cli.learning.update import Learner
from agentrl_cli.store.codec import token_columns, tokens_of
from agentrl_cli.types import Origin, Sampling, Tokens, supports
from tests.learning.test_update import config, episodes


@pytest.mark.parametrize("frozen", [False, True])
def test_log_probabilities_among_some_tokens(frozen: bool) -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, generator=g).requires_grad_()
    head = nn.Linear(4, 6).requires_grad_(not frozen)
    sets = [[0, 2, 5], None, [1]]
    support = supports([None if ids is None else np.array(ids, np.int32) for ids in sets])
    targets = torch.tensor([2, 4, 1])
    logp, entropy = head_logprobs(head, hidden, targets, temperature=0.7, support=support)
    wanted, uncertain = [], []
    for row, ids in enumerate(sets):
        kept = list(range(6)) if ids is None else ids
        among = torch.log_softmax(head(hidden[row])[kept] / 0.7, -1)
        wanted.append(among[kept.index(int(targets[row]))])
        uncertain.append(-(among.exp() * among).sum())
    torch.testing.assert_close(logp, torch.stack(wanted))
    torch.testing.assert_close(entropy, torch.stack(uncertain))
    own = [hidden, *([] if frozen else [head.weight, head.bias])]
    pushed = [torch.autograd.grad((a + 0.1 * b).sum(), own, retain_graph=True) for a, b in (
        (logp, entropy), (torch.stack(wanted), torch.stack(uncertain))
    )]  # fmt: skip
    for mine, plain in zip(*pushed, strict=True):
        torch.testing.assert_close(mine, plain)


async def test_what_was_sampled_is_what_is_trained(start: Any) -> None:
    """The trainer's log-probability among the stored tokens is the sampler's, and the store keeps them."""
    policy = LocalPolicy(start, context_length=128, rows=2)
    sampling = Sampling(top_p=0.6, max_new_tokens=12, seed=3, keep_support=True)
    prompt = np.arange(5, 20, dtype=np.int32)
    try:
        generation = await policy.generate("a", prompt, sampling)
    finally:
        await policy.close()
    given = Tokens.from_ids(prompt, np.full(len(prompt), Origin.USER, np.int8))
    tokens = Tokens.concat([given, Tokens.from_generation(generation)])
    assert tokens.support is not None and all(ids is None for ids in tokens.support[: len(prompt)])
    sizes = [len(ids) for ids in tokens.support[len(prompt) :]]
    assert min(sizes) > 0 and max(sizes) < 261
    read = tokens_of([token_columns(given), token_columns(Tokens.from_generation(generation))])
    assert read.support is not None
    for kept, was in zip(read.support, tokens.support, strict=True):
        np.testing.assert_equal(kept, was)
    mask = tokens.trained_mask
    with torch.no_grad():
        _, among = trained_logprobs(start, [[Segment(tokens.ids, mask, support=read.support)]])
        _, all_ = trained_logprobs(start, [[Segment(tokens.ids, mask)]])
    np.testing.assert_allclose(among.logp.numpy(), generation.logp_sampled, atol=1e-4)
    np.testing.assert_allclose(all_.logp.numpy(), generation.logp_policy, atol=1e-4)
    assert (generation.logp_sampled > generation.logp_policy + 0.1).all()


def test_a_step_has_ratios_of_one_and_no_correction(start: Any) -> None:
    groups, settings = (
        episodes(start, [[0, 1]]),
        config(rollout={"top_p": 0.9, "replay_truncation": True}),
    )
    with pytest.raises(ConfigError, match="no record"):
        Learner(copy.deepcopy(start), settings).update(groups, 0)
    assert Learner(copy.deepcopy(start), settings).loss_config.correction == "none"


def test_where_it_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="repetition_penalty changes"):
        Config.model_validate({"rollout": {"replay_truncation": True, "repetition_penalty": 1.1}})
