"""What must hold of every advantage estimator: order, shift, scale, zero mean; and unbiasedness where it is defined."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from agentrl_cli.config.estimators import ESTIMATORS
from agentrl_cli.learning.advantages import function as estimator
from agentrl_cli.learning.estimator_inputs import AdvantageInput
from agentrl_cli.learning.turn_advantages import gae_raw

PER_EPISODE = ("rewards", "groups", "lengths", "parts", "baseline", "bootstrap")
PER_TOKEN = (
    *("turn_lengths", "turn_rewards", "turn_parts", "turn_states", "values", "token_penalty"),
    *("logp_teacher", "logp_student"),
)


def anything(seed: int = 0) -> AdvantageInput:
    """Eight episodes in three groups with one to three turns, and everything that any estimator reads."""
    rng = np.random.default_rng(seed)
    groups = np.array([0, 1, 0, 2, 1, 0, 2, 0])
    turns = [rng.integers(1, 4, int(rng.integers(1, 4))) for _ in groups]
    lengths = np.array([int(t.sum()) for t in turns])
    parts = rng.normal(size=(8, 2))
    return AdvantageInput(
        parts @ np.array([1.0, 0.5]),
        groups,
        lengths,
        turn_lengths=tuple(turns),
        turn_rewards=tuple(rng.normal(size=len(t)) for t in turns),
        turn_states=tuple(tuple(rng.integers(0, 2, len(t)).tolist()) for t in turns),
        parts=parts,
        part_weights=np.array([1.0, 0.5]),
        baseline=rng.normal(size=8),
        values=tuple(rng.normal(size=n) for n in lengths),
        logp_teacher=tuple(rng.normal(size=n) for n in lengths),
        logp_student=tuple(rng.normal(size=n) for n in lengths),
        turn_parts=tuple(rng.normal(size=(len(t), 2)) for t in turns),
        gamma=0.9,
        lam=0.8,
        eps=0.0,
    )


def rows(x: AdvantageInput, order: list[int]) -> AdvantageInput:
    fields: dict[str, Any] = {
        name: getattr(x, name)[order] for name in PER_EPISODE if getattr(x, name) is not None
    }
    tokens: dict[str, Any] = {
        name: tuple(getattr(x, name)[i] for i in order)
        for name in PER_TOKEN
        if getattr(x, name) is not None
    }
    return replace(x, **fields, **tokens)


def flat(name: str, x: AdvantageInput) -> np.ndarray[Any, Any]:
    return np.concatenate(estimator(name)(x))


def affine(x: AdvantageInput, scale: float = 1.0, shift: float = 0.0) -> AdvantageInput:
    """Everything that is worth reward, `scale` times as much and, for whole episodes, `shift` more."""
    assert (
        x.turn_rewards is not None
        and x.parts is not None
        and x.baseline is not None
        and x.values is not None
    )
    weights = np.array([1.0, 0.5]) if x.part_weights is None else x.part_weights
    return replace(
        x,
        rewards=scale * x.rewards + shift,
        parts=scale * x.parts + shift / weights.sum(),
        turn_rewards=tuple(scale * r for r in x.turn_rewards),
        turn_parts=tuple(scale * r for r in x.turn_parts or ()),
        baseline=scale * x.baseline + shift,
        values=tuple(scale * v for v in x.values),
    )


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"rae"}))  # whose mean follows the order
def test_the_order_of_the_episodes_does_not_matter(name: str) -> None:
    x = anything()
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    straight, shuffled = estimator(name)(x), estimator(name)(rows(x, order))
    assert [len(a) for a in straight] == x.lengths.tolist(), "a float for each trained token"
    assert all(a.dtype == np.float32 and np.isfinite(a).all() for a in straight)
    for place, original in enumerate(order):
        np.testing.assert_allclose(shuffled[place], straight[original], rtol=1e-5, atol=1e-6)


# Not maxrl, which is for rewards of 0 and 1. Not turn_returns and gigpo: with a discount below 1 a
# constant is worth more to those with fewer turns to go.
SHIFTED = sorted(
    {n for n, e in ESTIMATORS.items() if e.compares == "rewards" and n != "maxrl"}
    | {"gdpo", "remax", "mt_grpo"}
)


@pytest.mark.parametrize("name", SHIFTED)
def test_a_constant_on_all_rewards_changes_nothing(name: str) -> None:
    np.testing.assert_allclose(
        flat(name, anything()), flat(name, affine(anything(), shift=3)), atol=1e-4
    )


@pytest.mark.parametrize("name", ["turn_returns", "gigpo", "reinforce_pp"])
def test_without_a_discount_neither_in_what_is_relative_or_whitened(name: str) -> None:
    x = replace(anything(), gamma=1.0)
    np.testing.assert_allclose(flat(name, x), flat(name, affine(x, shift=3)), atol=1e-4)


UNNORMALISED = {"dr_grpo", "rloo", "remax", "opo", "rae"}


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - UNNORMALISED))
def test_the_scale_of_rewards_does_not_matter_where_they_are_normalised(name: str) -> None:
    np.testing.assert_allclose(
        flat(name, anything()), flat(name, affine(anything(), scale=4)), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("name", sorted(UNNORMALISED))
def test_and_is_kept_where_they_are_not(name: str) -> None:
    np.testing.assert_allclose(
        4 * flat(name, anything()), flat(name, affine(anything(), scale=4)), rtol=1e-4
    )


@pytest.mark.parametrize(
    "name", sorted({"grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "turn_returns", "gigpo"})
)
def test_other_groups_do_not_matter(name: str) -> None:
    x = anything()
    alone = rows(x, [0, 2, 5, 7])
    found, expected = estimator(name)(alone), estimator(name)(x)
    for place, original in enumerate([0, 2, 5, 7]):
        np.testing.assert_allclose(found[place], expected[original], rtol=1e-5, atol=1e-6)


# --- a bandit small enough to sum over everything that can happen ---------------------------------------------------

ARMS = np.array([0.2, 1.0, 0.4])
CHANCE = np.array([0.5, 0.2, 0.3])
SIZE = 3


def expected_gradient(
    estimate: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
) -> np.ndarray[Any, Any]:
    """[3] E[mean over the group of A · ∇log p(arm)] by the logits, over all groups of three draws."""
    total = np.zeros(3)
    for arms in product(range(3), repeat=SIZE):
        advantages = estimate(ARMS[list(arms)])
        scores = np.eye(3)[list(arms)] - CHANCE
        total += np.prod(CHANCE[list(arms)]) * (advantages[:, None] * scores).mean(0)
    return total


TRUE = CHANCE * (ARMS - CHANCE @ ARMS)


def of(name: str, **fields: Any) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    def estimate(rewards: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        x = AdvantageInput(rewards, np.zeros(SIZE, np.int64), np.ones(SIZE, np.int64), **fields)
        return np.array([float(a[0]) for a in estimator(name)(x)])

    return estimate


def test_rloo_and_remax_are_unbiased() -> None:
    np.testing.assert_allclose(expected_gradient(of("rloo")), TRUE, atol=1e-7)
    greedy = np.full(SIZE, ARMS[int(CHANCE.argmax())])
    np.testing.assert_allclose(expected_gradient(of("remax", baseline=greedy)), TRUE, atol=1e-7)


@pytest.mark.parametrize("name", ["dr_grpo", "opo"])
def test_a_baseline_with_the_episode_in_it_shrinks_the_gradient_and_turns_it_not(name: str) -> None:
    """By 1 − 1/n: https://arxiv.org/abs/2503.20783, appendix; OPO is the same where all are equally long."""
    np.testing.assert_allclose(expected_gradient(of(name)), TRUE * (1 - 1 / SIZE), atol=1e-7)


def test_dividing_by_the_deviation_is_biased() -> None:
    """Which is why it is there as a choice: it turns the gradient, a little."""
    found = expected_gradient(of("grpo"))
    cosine = found @ TRUE / np.linalg.norm(found) / np.linalg.norm(TRUE)
    assert 0.9 < cosine < 0.9999


# --- two turns, the second only where the policy goes on -------------------------------------------------------------

# Chances of going on after the first turn, and of a good second turn, which earns 1 where a bad
# one earns 0.5.
GO_ON, GOOD = 0.3, 0.6


def test_mt_grpo_is_unbiased_where_the_policy_decides_when_to_stop() -> None:
    """But for the episode's share in its own mean. Over those alone that go on, going on would be worth nothing."""
    ends = ((1 - GO_ON, None), (GO_ON * GOOD, 1.0), (GO_ON * (1 - GOOD), 0.5))
    found = np.zeros(2)
    large = 1e6  # the deviation does not count beside it
    for drawn in product(ends, repeat=SIZE):
        n = np.array([1 if earned is None else 2 for _, earned in drawn])
        x = AdvantageInput(
            np.zeros(SIZE),
            np.zeros(SIZE, np.int64),
            n,
            turn_lengths=tuple(np.ones(k, np.int64) for k in n),
            turn_rewards=tuple(np.array([np.nan] if e is None else [np.nan, e]) for _, e in drawn),
            eps=large,
        )
        chance = np.prod([p for p, _ in drawn])
        for (_, earned), a in zip(drawn, estimator("mt_grpo")(x), strict=True):
            scores = np.array(
                [-GO_ON if earned is None else 1 - GO_ON, 0.0]
            )  # ∇log p by the logits of both choices
            found += chance * a[0] * large * scores / SIZE
            if earned is not None:
                found += (
                    chance
                    * a[1]
                    * large
                    * np.array([0.0, (1.0 if earned == 1.0 else 0.0) - GOOD])
                    / SIZE
                )
    worth = GOOD + 0.5 * (1 - GOOD)
    true = np.array([GO_ON * (1 - GO_ON) * worth, GO_ON * GOOD * (1 - GOOD) * 0.5])
    np.testing.assert_allclose(found, true * (1 - 1 / SIZE), rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.7])
def test_gae_with_lambda_1_is_unbiased_whatever_the_values(value: float) -> None:
    def estimate(rewards: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        values = tuple(np.array([value]) for _ in rewards)
        x = AdvantageInput(rewards, np.arange(SIZE), np.ones(SIZE, np.int64), values=values)
        return np.concatenate(gae_raw(x))

    np.testing.assert_allclose(expected_gradient(estimate), TRUE, atol=1e-7)


def test_pass_at_k_follows_the_best_of_k() -> None:
    """Times its deviation, the advantage has the direction of the gradient of E[max of k]."""
    found = np.zeros(3)
    for arms in product(range(3), repeat=SIZE):
        rewards = ARMS[list(arms)]
        best = [max(rewards[i], rewards[j]) for i in range(SIZE) for j in range(i)]
        advantages = of("pass_at_k", k=2, eps=0.0)(rewards) * np.std(best)
        found += np.prod(CHANCE[list(arms)]) * (
            advantages[:, None] * (np.eye(3)[list(arms)] - CHANCE)
        ).mean(0)
    pairs = list(product(range(3), repeat=2))
    weight = np.array([np.prod(CHANCE[list(p)]) * max(ARMS[list(p)]) for p in pairs])
    true = sum(w * (np.eye(3)[list(p)] - CHANCE).sum(0) for w, p in zip(weight, pairs, strict=True))
    cosine = found @ true / np.linalg.norm(found) / np.linalg.norm(true)
    assert cosine == pytest.approx(1, abs=1e-6)
