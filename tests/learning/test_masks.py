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


@pytest.mark.parametrize(
    ("rule", "upper", "lower", "accepted"),
    [
        ("token_k1", 1.5, None, [False, True, False]),
        ("token_k1", 2.1, 0.9, [False, True, True]),  # π_sampler / π_trainer is 0.5, 1, 2
        ("token_k2", 0.2, None, [False, True, False]),  # log² 2 / 2 = 0.24
        ("token_k3", 0.25, None, [False, True, True]),
        ("seq_sum_k1", 1.01, None, [True] * 3),
        ("seq_mean_k1", 1.01, None, [True] * 3),
        ("seq_mean_k3", 0.16, None, [False] * 3),  # (0.307 + 0.193) / 3 = 0.167
        ("seq_mean_k3", 0.17, None, [True] * 3),
        ("seq_sum_k2", 0.47, None, [False] * 3),  # 0.48
        ("seq_max_k3", 0.3, None, [False] * 3),
        ("seq_max_k2", 0.25, None, [True] * 3),
    ],
)
def test_rejection_by_hand(
    rule: str, upper: float, lower: float | None, accepted: list[bool]
) -> None:
    # log ratios trainer − sampler: log 2, 0, −log 2; mean 0, sum 0; k3 of log 2 is 1 − log 2 = 0.307, of −log 2 0.193
    sampler, trainer = np.zeros(3, np.float32), np.array([log(2), 0, -log(2)], np.float32)
    assert within_bounds(rule, trainer, sampler, upper, lower).tolist() == accepted
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
    values, weight = (
        np.concatenate([getattr(signals, one) for signals in update.signals.values()])
        for one in (name, "weight")
    )
    return np.asarray(values[~np.isnan(weight)])


def shifted(groups: list[list[Episode]], amount: float, of: str) -> list[list[Episode]]:
    """The groups with `amount` more in what was recorded of the episode `of`."""
    found: list[list[Episode]] = []
    for group in groups:
        found.append([])
        for e in group:
            more = np.float32(amount if e.id == of else 0)
            logps = {n: getattr(e.tokens, n) + more for n in ("logp_sampled", "logp_policy")}
            found[-1].append(e.with_(tokens=replace(e.tokens, **logps)))
    return found


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
    total = sum(tokens.values())
    rejected = {name: update.metrics[f"reject/{name}"] for name in ("tokens", "sequences")}
    assert rejected == pytest.approx({"tokens": tokens["0-1"] / total, "sequences": 1 / 6})
    for name, signals in update.signals.items():
        out, mask = name == "0-1", ~np.isnan(signals.weight)
        wanted = 0.0 if out else update.advantages[name] / (total - tokens["0-1"])
        assert signals.weight[mask] == pytest.approx(wanted, rel=1e-4)
        assert set(signals.clipped[mask]) == {REJECTED if out else 0}
    none = trained(start, groups, reject="seq_mean_k1", reject_upper=1.9).metrics
    assert none["reject/tokens"] == 0


def test_only_uncertain_tokens_are_pushed(start: Any) -> None:
    groups = episodes(start, SPREAD)
    plain, held = trained(start, groups), trained(start, groups, entropy_share=0.25)
    before, after = flat(plain, "weight"), flat(held, "weight")
    open_ = after != 0
    assert 0.2 < open_.mean() < 0.3 and (before != 0).sum() > open_.sum()
    assert (flat(held, "clipped") == np.where(open_, 0, MASKED)).all()
    assert after[open_] == pytest.approx(before[open_]), "and the totals stay"


def test_deepseeks_mask_holds_what_became_unlikely(start: Any) -> None:
    groups = shifted(episodes(start, [[0, 1, 1], [1, 0, 0]]), 0.5, "0-0")
    masked = trained(start, groups, off_policy_mask=0.4, correction="none")
    assert masked.metrics["sampling/off_policy_masked"] > 0
    corrected = trained(start, groups, correction="mis", correction_floor=0.7)  # of e^-0.5
    for found in (masked, corrected):
        for name, one in found.signals.items():
            mask, far = ~np.isnan(one.weight), name == "0-0"
            assert set(one.clipped[mask]) == {FAR if far else 0}
            assert found is corrected or (one.weight[mask] == 0).all() == far


def test_bypass_compares_with_the_sampler_and_saves_a_forward(start: Any) -> None:
    groups = episodes(start, SPREAD)
    update = trained(start, shifted(groups, 0.1, "0-1"), bypass=True, epochs=1)
    ratio = update.signals["0-1"].ratio
    assert ratio[~np.isnan(ratio)] == pytest.approx(exp(-0.1), rel=1e-3)
    assert "sampling/sampling_logp_difference/mean" not in update.metrics
    unknown = trained(start, shifted(groups, np.nan, "0-1"), bypass=True)
    assert flat(unknown, "ratio") == pytest.approx(1, abs=1e-3)


def test_a_reference_that_follows(start: Any) -> None:
    groups, model = episodes(start, SPREAD), copy.deepcopy(start)
    settings: dict[str, Any] = {"kl_coef": 0.1, "ref_ema": 0.5, "ref_ema_steps": 2}
    learner: Any = Learner(model, config(algo=settings))
    first = learner.update(groups, 0)
    own = flat(first, "logp_train")
    assert flat(first, "logp_ref") == pytest.approx(own, abs=1e-5), "it begins as the model"
    learner.update(groups, 1)
    begun, now = weights(start), [p for p in model.named_parameters() if p[1].requires_grad]
    for (name, after), value in zip(now, learner.compute.average.weights, strict=True):
        torch.testing.assert_close(value, (begun[name] + after.detach()) / 2)
    other = Learner(copy.deepcopy(model), config(algo=settings))
    other.load_state(copy.deepcopy(learner.state()))
    resumed, on = other.update(groups, 2), learner.update(groups, 2)
    assert resumed.metrics["kl"] == on.metrics["kl"] > 0


GOOD_CALL = ToolCall("1", "f", {}, "{}")
BAD_CALL = ToolCall("2", "f", None, "{", error="malformed_call")


@pytest.mark.parametrize(
    ("text", "more", "is_void"),
    [
        ("Answer: 1", {}, False),
        ("", {"calls": (GOOD_CALL,)}, False),
        ("", {"calls": (BAD_CALL, GOOD_CALL)}, False),
        (" ", {}, True),
        ("…", {"calls": (BAD_CALL,)}, True),
        ("thinking", {"stop_reason": StopReason.LENGTH}, True),
        ("", {"role": "user"}, False),
    ],
)
def test_void_turns(text: str, more: dict[str, Any], is_void: bool) -> None:
    said = ({"role": "assistant", "content": text},)
    turn = Turn(1, "assistant", said, 0, 1, stop_reason=StopReason.STOP)
    assert void(replace(turn, **more)) is is_void


@pytest.mark.parametrize("frozen", [False, True])
def test_log_probabilities_among_some_tokens(frozen: bool) -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, generator=g).requires_grad_()
    head = nn.Linear(4, 6).requires_grad_(not frozen)
    sets, targets = [[0, 2, 5], None, [1]], torch.tensor([2, 4, 1])
    support = supports([None if ids is None else np.array(ids, np.int32) for ids in sets])
    own = head_logprobs(head, hidden, targets, temperature=0.7, support=support)
    logps, entropies = [], []
    for row, ids in enumerate(sets):
        kept = list(range(6)) if ids is None else ids
        among = torch.log_softmax(head(hidden[row])[kept] / 0.7, -1)
        logps.append(among[kept.index(int(targets[row]))])
        entropies.append(-(among.exp() * among).sum())
    leaves = [hidden, *([] if frozen else [head.weight, head.bias])]
    found = [
        [*both, *torch.autograd.grad((both[0] + 0.1 * both[1]).sum(), leaves)]
        for both in (own, (torch.stack(logps), torch.stack(entropies)))
    ]
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain)


async def test_what_was_sampled_is_what_is_trained(start: Any) -> None:
    policy = LocalPolicy(start, context_length=128, rows=2)
    sampling = Sampling(top_p=0.6, max_new_tokens=12, seed=3, keep_support=True)
    prompt = np.arange(5, 20, dtype=np.int32)
    try:
        generation = await policy.generate("a", prompt, sampling)
    finally:
        await policy.close()
    parts = [given(Origin.USER, *prompt.tolist()), Tokens.from_generation(generation)]
    tokens: Any = Tokens.concat(parts)
    assert all(ids is None for ids in tokens.support[: len(prompt)])
    assert all(0 < len(ids) < 261 for ids in tokens.support[len(prompt) :])
    read: Any = tokens_of([token_columns(part) for part in parts])
    for kept, was in zip(read.support, tokens.support, strict=True):
        np.testing.assert_equal(kept, was)
    for support, logp in ((read.support, generation.logp_sampled), (None, generation.logp_policy)):
        segment = Segment(tokens.ids, tokens.trained_mask, support=support)
        with torch.no_grad():
            _, found = trained_logprobs(start, [[segment]])
        np.testing.assert_allclose(found.logp.numpy(), logp, atol=1e-4)
    assert (generation.logp_sampled > generation.logp_policy + 0.1).all()


def test_a_step_has_ratios_of_one_and_no_correction(start: Any) -> None:
    settings = config(rollout={"top_p": 0.9, "replay_truncation": True})
    learner = Learner(copy.deepcopy(start), settings)
    assert learner.loss_config.correction == "none"
    with pytest.raises(ConfigError, match="no record"):
        learner.update(episodes(start, [[0, 1]]), 0)


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


def padded() -> Any:
    tool = Tokens.concat(
        [given(Origin.USER, 1, 2), sampled(3, 4), given(Origin.TOOL, 5), sampled(6)]
    )
    plain = Tokens.concat([given(Origin.USER, 7, 8, 9), sampled(10)])
    forced = Tokens.concat([given(Origin.USER, 11), sampled(12), given(Origin.FORCED, 13)])
    episodes = [
        Episode(id=f"e{i}", task_id="t", tokens=tokens, reward_parts=(RewardPart("x", float(i)),))
        for i, tokens in enumerate((tool, plain, forced))
    ]
    gains = [np.array([1, 2, 3], np.float32), np.array([4], np.float32), np.array([5], np.float32)]
    return Batch.from_episodes(episodes, advantages=gains, pad_id=PAD)


def test_layout_by_hand() -> None:
    b = padded()
    wanted = {
        "prompts": [[PAD, 1, 2], [7, 8, 9], [PAD, PAD, 11]],
        "responses": [[3, 4, 5, 6], [10, PAD, PAD, PAD], [12, 13, PAD, PAD]],
        "attention_mask": [[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0]],
        "rewards": [0, 1, 2],
        "response_mask": [[1, 1, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0]],
        "advantages": [[1, 2, 0, 3], [4, 0, 0, 0], [5, 0, 0, 0]],
        "old_log_probs": [[-1, -2, 0, -1], [-1, 0, 0, 0], [-1, 0, 0, 0]],
    }
    assert {name: getattr(b, name).tolist() for name in wanted} == wanted
    assert b.position_ids[[0, 2]].tolist() == [[0, 0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3, 4]]
    assert b.episode_ids == ("e0", "e1", "e2") and len(b) == 3
    assert torch.equal(b.input_ids, torch.cat([b.prompts, b.responses], 1))


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (1, ("e1",)),
        (-1, ("e2",)),
        (slice(1, None), ("e1", "e2")),
        ([2, 0], ("e2", "e0")),
        (torch.tensor([True, False, True]), ("e0", "e2")),
    ],
    ids=str,
)
def test_slices(place: Any, names: tuple[str, ...]) -> None:
    found = padded()[place]
    rows = [["e0", "e1", "e2"].index(name) for name in names]
    assert found.episode_ids == names and torch.equal(found.prompts, padded().prompts[rows])


def test_an_episode_with_nothing_sampled_and_no_episodes() -> None:
    b = Batch.from_episodes([Episode(id="q", task_id="t", tokens=given(Origin.USER, 1, 2))])
    assert b.prompts.tolist() == [[1, 2]] and b.responses.shape == (1, 0)
    assert len(Batch.from_episodes([])) == 0
