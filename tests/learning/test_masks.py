"""Tokens that are rejected or held, by hand and in whole steps; training under the distribution of sampling."""

import copy
from dataclasses import replace
from itertools import cycle
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from agentrl_cli.errors import ConfigError
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.learning.batch import Batch
from agentrl_cli.learning.compute import Compute
from agentrl_cli.learning.dispositions import void
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.logprobs import head_logprobs
from agentrl_cli.learning.losses import AGGREGATIONS
from agentrl_cli.learning.objective import off_policy
from agentrl_cli.learning.packing import Segment
from agentrl_cli.learning.protocols import Update
from agentrl_cli.learning.scoring import within_bounds
from agentrl_cli.learning.update import Learner
from agentrl_cli.store.codec import token_columns, tokens_of
from agentrl_cli.types import (
    Episode,
    Generation,
    Origin,
    RewardPart,
    Sampling,
    StopReason,
    Tokens,
    ToolCall,
    Turn,
    supports,
)
from agentrl_cli.types.tokens import FAR, MASKED, REJECTED
from tests.learning.test_update import SPREAD, config, episodes, weights


def test_rejection_by_hand() -> None:
    # log ratios trainer − sampler: log 2, 0, −log 2; mean 0, sum 0; k3 of log 2 is 1 − log 2 = 0.307, of −log 2 0.193
    sampler = np.zeros(3, np.float32)
    trainer = np.array([log(2), 0, -log(2)], np.float32)
    by = {
        ("token_k1", 1.5, None): [False, True, False],
        ("token_k1", 2.1, 0.9): [False, True, True],  # π_sampler / π_trainer is 0.5, 1, 2
        ("token_k2", 0.2, None): [False, True, False],  # log² 2 / 2 = 0.24
        ("token_k3", 0.25, None): [False, True, True],
        ("seq_sum_k1", 1.01, None): [True] * 3,
        ("seq_mean_k1", 1.01, None): [True] * 3,
        ("seq_mean_k3", 0.16, None): [False] * 3,  # (0.307 + 0.193) / 3 = 0.167
        ("seq_mean_k3", 0.17, None): [True] * 3,
        ("seq_sum_k2", 0.47, None): [False] * 3,  # 0.48
        ("seq_max_k3", 0.3, None): [False] * 3,
        ("seq_max_k2", 0.25, None): [True] * 3,
    }
    for (rule, upper, lower), expected in by.items():
        assert within_bounds(rule, trainer, sampler, upper, lower).tolist() == expected, rule
    unknown = np.array([np.nan, 0, 0], np.float32)
    assert within_bounds("token_k1", trainer, unknown, 1.5).tolist() == [True, True, False]


def test_off_policy_by_hand() -> None:
    # the first sequence lost 1 nat a token, the second nothing; a negative advantage alone is masked
    logp, sampled = torch.tensor([-3.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0, -1.0])
    advantage, segment = torch.tensor([-1.0, 1.0, -1.0]), torch.tensor([0, 0, 1])
    assert off_policy(logp, sampled, advantage, segment, 0.9).tolist() == [True, False, False]
    assert not off_policy(logp, sampled, advantage, segment, 1.1).any()


def trained(model: Any, groups: list[list[Episode]], **algo: Any) -> Update:
    return Learner(copy.deepcopy(model), config(algo=algo)).update(groups, 0)


def flat(update: Update, name: str) -> np.ndarray:
    values = np.concatenate([getattr(signals, name) for signals in update.signals.values()])
    weight = np.concatenate([signals.weight for signals in update.signals.values()])
    return np.asarray(values[~np.isnan(weight)])


def shifted(groups: list[list[Episode]], amount: float, of: str) -> list[list[Episode]]:
    return [
        [
            e.with_(
                tokens=replace(
                    e.tokens,
                    logp_sampled=e.tokens.logp_sampled + np.float32(amount * (e.id == of)),
                    logp_policy=e.tokens.logp_policy + np.float32(amount * (e.id == of)),
                )
            )
            for e in group
        ]
        for group in groups
    ]


@pytest.mark.parametrize(
    ("aggregation", "names"),
    [
        *zip(
            sorted(AGGREGATIONS),
            cycle([("gspo", "grpo"), ("clip_cov", "reinforce_pp")]),
            strict=False,
        )
    ],
)
def test_a_rejected_token_is_as_if_it_had_not_been_sampled(
    start: Any, aggregation: str, names: tuple[str, str]
) -> None:
    loss, advantage = names
    groups, far = episodes(start, SPREAD), np.float32(1.0)
    rejecting, forced = [], []
    for group in groups:
        for e in group:
            ours = np.flatnonzero(e.tokens.trained_mask)[1::3]
            logp, origin = e.tokens.logp_sampled.copy(), e.tokens.origin.copy()
            logp[ours] += far
            origin[ours] = Origin.FORCED
            tokens = replace(e.tokens, logp_sampled=logp, logp_policy=logp)
            rejecting.append(e.with_(tokens=tokens))
            forced.append(e.with_(tokens=replace(e.tokens, origin=origin)))
    size, found = len(groups[0]), []
    algo = {"loss": {"name": loss}, "aggregation": aggregation, "kl_coef": 0.1}
    algo["advantage"] = advantage
    rejection = {"reject": "token_k1", "reject_upper": 2.0}
    for flat_groups, more in ((rejecting, rejection), (forced, {})):
        model = copy.deepcopy(start)
        learner = Learner(model, config(algo=algo | more), copy.deepcopy(start))
        learner.update([flat_groups[:size], flat_groups[size:]], 0)
        found.append(weights(model))
    for name, weight in found[0].items():
        torch.testing.assert_close(weight, found[1][name], rtol=1e-4, atol=1e-6)


def test_sequences_far_from_what_was_sampled_leave_the_batch(start: Any) -> None:
    groups = shifted(episodes(start, SPREAD), 0.5, "0-1")
    update = trained(start, groups, reject="seq_mean_k1", reject_upper=1.2)
    tokens = {e.id: e.trained_tokens for group in groups for e in group}
    assert update.metrics["reject/tokens"] == pytest.approx(tokens["0-1"] / sum(tokens.values()))
    assert update.metrics["reject/sequences"] == pytest.approx(1 / 6)
    left = sum(tokens.values()) - tokens["0-1"]
    for name, signals in update.signals.items():
        wanted = 0.0 if name == "0-1" else update.advantages[name] / left
        assert signals.weight[~np.isnan(signals.weight)] == pytest.approx(wanted, rel=1e-4)
        assert set(signals.clipped[~np.isnan(signals.weight)]) == {REJECTED if name == "0-1" else 0}
    assert (
        trained(start, groups, reject="seq_mean_k1", reject_upper=1.9).metrics["reject/tokens"] == 0
    )


def test_only_uncertain_tokens_are_pushed(start: Any) -> None:
    groups = episodes(start, SPREAD)
    plain, held = trained(start, groups), trained(start, groups, entropy_share=0.25)
    open_, all_ = flat(held, "weight") != 0, flat(plain, "weight") != 0
    assert 0.2 < open_.sum() / len(open_) < 0.3 and all_.sum() > open_.sum()
    assert (flat(held, "clipped") == np.where(open_, 0, MASKED)).all()
    assert flat(held, "weight")[open_] == pytest.approx(flat(plain, "weight")[open_]), (
        "and the totals stay"
    )


def test_deepseeks_mask_holds_what_became_unlikely(start: Any) -> None:
    groups = shifted(episodes(start, [[0, 1, 1], [1, 0, 0]]), 0.5, "0-0")
    update = trained(start, groups, off_policy_mask=0.4, correction="none")
    zero = {
        name
        for name, one in update.signals.items()
        if (one.weight[~np.isnan(one.weight)] == 0).all()
    }
    assert zero == {"0-0"} and update.metrics["sampling/off_policy_masked"] > 0
    for found in (
        update,
        trained(start, groups, correction="mis", correction_floor=0.7),
    ):  # the ratio is e^-0.5
        for name, one in found.signals.items():
            assert set(one.clipped[~np.isnan(one.weight)]) == {FAR if name == "0-0" else 0}


def test_bypass_compares_with_the_sampler_and_saves_a_forward(start: Any) -> None:
    groups = shifted(episodes(start, SPREAD), 0.1, "0-1")
    update = trained(start, groups, bypass=True, epochs=1)
    ratio = update.signals["0-1"].ratio
    assert ratio[~np.isnan(ratio)] == pytest.approx(exp(-0.1), rel=1e-3)
    assert "sampling/sampling_logp_difference/mean" not in update.metrics
    unknown = shifted(episodes(start, SPREAD), np.nan, "0-1")
    assert flat(trained(start, unknown, bypass=True), "ratio") == pytest.approx(1, abs=1e-3)


def test_a_reference_that_follows(start: Any) -> None:
    groups, model = episodes(start, SPREAD), copy.deepcopy(start)
    settings: dict[str, Any] = {"kl_coef": 0.1, "ref_ema": 0.5, "ref_ema_steps": 2}
    learner = Learner(model, config(algo=settings))
    first = learner.update(groups, 0)
    assert flat(first, "logp_ref") == pytest.approx(flat(first, "logp_train"), abs=1e-5), (
        "it begins as the model"
    )
    learner.update(groups, 1)
    after = weights(model)
    assert isinstance(learner.compute, Compute)
    average = learner.compute.average
    assert average is not None
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    begun = weights(start)
    for name, value in zip(names, average.weights, strict=True):
        torch.testing.assert_close(value, (begun[name] + after[name]) / 2)
    other = Learner(copy.deepcopy(model), config(algo=settings))
    other.load_state(copy.deepcopy(learner.state()))
    resumed, on = other.update(groups, 2), learner.update(groups, 2)
    assert resumed.metrics["kl"] == on.metrics["kl"] > 0


def test_void_turns() -> None:
    def turn(text: str, *calls: ToolCall, stop: StopReason = StopReason.STOP) -> Turn:
        return Turn(
            1, "assistant", ({"role": "assistant", "content": text},), 0, 1, calls, stop_reason=stop
        )

    good, bad = ToolCall("1", "f", {}, "{}"), ToolCall("2", "f", None, "{", error="malformed_call")
    assert (
        not void(turn("Answer: 1")) and not void(turn("", good)) and not void(turn("", bad, good))
    )
    assert (
        void(turn(" ")) and void(turn("…", bad)) and void(turn("thinking", stop=StopReason.LENGTH))
    )
    assert not void(Turn(0, "user", ({"role": "user", "content": ""},), 0, 1))


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


# --- the padded batch ---


PAD = 99


def sampled(*ids: int) -> Tokens:
    n = len(ids)
    logp = -np.arange(1, n + 1, dtype=np.float32)
    top = np.zeros((n, 5))
    return Tokens.from_generation(
        Generation(
            np.array(ids, np.int32),
            logp,
            logp,
            -logp,
            top.astype(np.int32),
            top.astype(np.float32),
            StopReason.STOP,
            "v",
        )
    )


def given(origin: Origin, *ids: int) -> Tokens:
    return Tokens.from_ids(ids, [origin] * len(ids))


def three() -> list[Episode]:
    tool = Tokens.concat(
        [given(Origin.USER, 1, 2), sampled(3, 4), given(Origin.TOOL, 5), sampled(6)]
    )
    plain = Tokens.concat([given(Origin.USER, 7, 8, 9), sampled(10)])
    forced = Tokens.concat([given(Origin.USER, 11), sampled(12), given(Origin.FORCED, 13)])
    return [
        Episode(id=f"e{i}", task_id="t", tokens=tokens, reward_parts=(RewardPart("x", float(i)),))
        for i, tokens in enumerate((tool, plain, forced))
    ]


def padded() -> Batch:
    gains = [np.array([1, 2, 3], np.float32), np.array([4], np.float32), np.array([5], np.float32)]
    return Batch.from_episodes(three(), advantages=gains, pad_id=PAD)


def test_layout_by_hand() -> None:
    b = padded()
    assert b.prompts.tolist() == [[PAD, 1, 2], [7, 8, 9], [PAD, PAD, 11]]
    assert b.responses.tolist() == [[3, 4, 5, 6], [10, PAD, PAD, PAD], [12, 13, PAD, PAD]]
    assert b.input_ids.tolist()[0] == [PAD, 1, 2, 3, 4, 5, 6]
    assert b.attention_mask.tolist() == [
        [0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
    ]
    assert b.position_ids.tolist()[0] == [0, 0, 1, 2, 3, 4, 5]
    assert b.position_ids.tolist()[2] == [0, 0, 0, 1, 2, 3, 4]
    assert b.rewards is not None and b.rewards.tolist() == [0, 1, 2]
    assert b.episode_ids == ("e0", "e1", "e2") and len(b) == 3
    assert b.response_mask.tolist() == [[1, 1, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert b.advantages is not None and b.old_log_probs is not None
    assert b.advantages.tolist() == [[1, 2, 0, 3], [4, 0, 0, 0], [5, 0, 0, 0]]
    assert b.old_log_probs.tolist() == [[-1, -2, 0, -1], [-1, 0, 0, 0], [-1, 0, 0, 0]]
    assert int(b.response_mask.sum()) == sum(e.trained_tokens for e in three())
    for row, episode in enumerate(three()):
        assert b.input_ids[row][b.attention_mask[row] == 1].tolist() == episode.tokens.ids.tolist()


def test_slices() -> None:
    b = padded()
    assert b[1].episode_ids == ("e1",) and b[-1].prompts.tolist() == [[PAD, PAD, 11]]
    assert b[1:].episode_ids == ("e1", "e2")
    assert b[[2, 0]].episode_ids == ("e2", "e0")
    assert b[torch.tensor([True, False, True])].episode_ids == ("e0", "e2")


def test_an_episode_with_nothing_sampled_and_no_episodes() -> None:
    quiet = Episode(id="q", task_id="t", tokens=given(Origin.USER, 1, 2))
    b = Batch.from_episodes([quiet])
    assert b.prompts.tolist() == [[1, 2]] and b.responses.shape == (1, 0)
    assert len(Batch.from_episodes([])) == 0
