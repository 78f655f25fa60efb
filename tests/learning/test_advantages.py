"""Advantage estimators against numbers worked out by hand, and what must hold of every one: order, shift, scale."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from agentrl_cli.config.estimators import ESTIMATORS
from agentrl_cli.errors import ConfigError
from agentrl_cli.learning.advantages import episode_advantage
from agentrl_cli.learning.advantages import function as estimator
from agentrl_cli.learning.estimator_inputs import AdvantageInput, turn_parts, turn_rewards
from agentrl_cli.learning.turn_advantages import gae_raw, value_targets
from agentrl_cli.types import (
    Episode,
    Origin,
    RewardPart,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
)


def given(rewards: list[float], groups: list[int] | None = None, **fields: Any) -> AdvantageInput:
    n = len(rewards)
    rows = {"lengths": np.ones(n, np.int64), "eps": 0.0, **fields}
    return AdvantageInput(np.array(rewards, np.float64), np.array(groups or [0] * n), **rows)


def turns(*rows: list[float]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(row, np.float64) for row in rows)


def counts(*rows: list[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(row, np.int64) for row in rows)


def scalars(name: str, x: AdvantageInput) -> list[float]:
    return [float(a[0]) for a in estimator(name)(x)]


S = 1 / np.sqrt(2)
U = np.sqrt(3) / 3
TWO: dict[str, Any] = {"lengths": np.array([2, 2]), "turn_lengths": counts([1, 1], [1, 1])}
BY_HAND: list[tuple[str, AdvantageInput, Any]] = [
    # mean 0.25, deviations .75 -.25 -.25 -.25, sample std sqrt(.75/3) = 0.5; eps 0.5 doubles the denominator
    ("grpo", given([1, 0, 0, 0]), [1.5, -0.5, -0.5, -0.5]),
    ("grpo", given([1, 0, 0, 0], eps=0.5), [0.75, -0.25, -0.25, -0.25]),
    # three times 0.1 is not quite 0.3: each differed from the mean by 0.82 of the deviation
    ("grpo", given([0.1, 0.1, 0.1]), [0, 0, 0]),
    # groups apart, in any order: [2, 4] has std sqrt(2)
    ("grpo", given([2, 1, 4, 3], [7, 1, 7, 1]), [-S, -S, S, S]),
    # the second episode has no trained token: it is in the mean and gets none; deviations 2/3 -1/3 -1/3, std U
    ("grpo", given([1, 0, 0], lengths=np.array([2, 0, 1])), [2 * U, 2 * U, -U]),
    ("opo", given([1, 0, 0], lengths=np.array([2, 0, 1])), [1 / 3, 1 / 3, -2 / 3]),
    ("reinforce_pp", given([1, 0, 0], lengths=np.array([2, 0, 1])), [U, U, -2 * U]),
    ("dr_grpo", given([1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25]),
    # all rewards 1 0 2 4: mean 1.75, squares .5625+3.0625+.0625+5.0625 = 8.75, std sqrt(8.75/3)
    ("batch", given([1, 0, 2, 4], [0, 0, 1, 1]), np.array([0.5, -0.5, -1, 1]) / np.sqrt(8.75 / 3)),
    # others' means: 0, 1/3, 1/3, 1/3
    ("rloo", given([1, 0, 0, 0]), [1, -1 / 3, -1 / 3, -1 / 3]),
    # gamma 1/2, lengths 2 and 1, rewards 1 and 0: returns .5 1 | 0, mean .5, sample variance .25
    ("reinforce_pp", given([1, 0], lengths=np.array([2, 1]), gamma=0.5), [0, 1, -1]),
    # 0 1 | 9 rejected: mean .5, sample variance .5; 8.5 / sqrt(.5)
    (
        "reinforce_pp",
        given([0, 1, 9], accepted=tuple(np.array([[True], [True], [False]]))),
        [-S, S, 17 * S],
    ),
    # 1 0 0 0 less .25 over lengths 3 1 1 1: .75×3, -.25×3: mean .25, squares 6×.25 = 1.5, variance 1.5/5 = .3
    (
        "reinforce_pp_baseline",
        given([1, 0, 0, 0], lengths=np.array([3, 1, 1, 1])),
        np.array([1, 1, 1, -1, -1, -1]) * 0.5 / np.sqrt(0.3),
    ),
    ("remax", given([1, 0.25], baseline=np.array([0.5, 0.5])), [0.5, -0.25]),
    # means 0, then (0 + 1)/2, then (0.5 − 1)/2 = −0.25; each episode is counted after it was compared
    ("rae", given([1, -1, 1], decay=0.5), [1, -1.5, 1.25]),
    # two players with means of their own, the opponent's turn without tokens: 1 − 0.5 and −1 − 0.25
    (
        "rae",
        given(
            [0],
            lengths=np.array([3]),
            turn_lengths=counts([1, 0, 2]),
            turn_players=(("g/w", "g/x", "g/b"),),
            player_rewards=({"g/w": 1.0, "g/b": -1.0},),
            means={"g/w": 0.5, "g/b": 0.25},
        ),
        [0.5, -1.25, -1.25],
    ),
    # one turn of 2 tokens that earned 0.5, one of 1; 1 at the end; a penalty of 0.25 on the second token
    (
        "remax",
        given(
            [1],
            lengths=np.array([3]),
            turn_lengths=counts([2, 1]),
            turn_rewards=turns([0.5, np.nan]),
            token_penalty=turns([0, 0.25, 0]),
            baseline=np.array([0.5]),
        ),
        [0.75, 0.75, 0.5],
    ),
    # the best by what it is better than the next, over the group's deviation (0, 1, 3: sqrt(7/3)); a tie tells nothing
    (
        "grpo_passk",
        given([0, 3, 1, 2, 2, 0, 5], [0, 0, 0, 1, 1, 1, 2]),
        [0, 2 / np.sqrt(7 / 3), 0, 0, 0, 0, 0],
    ),
    # lengths 1 and 3, rewards 1 and 0: baseline 1·1/4
    ("opo", given([1, 0], lengths=np.array([1, 3])), [0.75, -0.25, -0.25, -0.25]),
    # each part normalises to ±1/sqrt2; part b is turned round and weighs 1/2, so the sum is ±1/(2 sqrt2), std 1/2
    (
        "gdpo",
        given([10.0, 0.05], parts=np.array([[10, 0.0], [0, 0.1]]), part_weights=np.array([1, 0.5])),
        [S, -S],
    ),
    # a part that does not apply is left out; s = 1/sqrt2: sums 2s -2s s -s, std sqrt(10 s²/3) = sqrt(5/3)
    (
        "gdpo",
        given(
            [2, 0, 1, 0],
            [0, 0, 1, 1],
            parts=np.array([[1, 1.0], [0, 0.0], [1, np.nan], [0, np.nan]]),
        ),
        np.array([2, -2, 1, -1]) * S / np.sqrt(5 / 3),
    ),
    # 1 of 4 right, k 2: 3 of 6 pairs hold it: mean 1/2, std 1/2. With it 1; a wrong one has it in 1 of 3 pairs.
    ("pass_at_k", given([0, 1, 0, 0]), [-1 / 3, 1, -1 / 3, -1 / 3]),
    # paper's closed form for 3 of 5 right, k 2: mean 1 - C(2,2)/C(5,2) = .9, std .3, wrong: 1 - C(1,1)/C(4,1) = .75
    ("pass_at_k", given([1, 0, 1, 0, 1]), [1 / 3, -0.5, 1 / 3, -0.5, 1 / 3]),
    # every pair holds a right one: nothing to tell
    ("pass_at_k", given([1, 1, 1, 0], eps=1e-4), [0, 0, 0, 0]),
    # gamma .5, lam .5, values .2 .4, reward 1 at the end: A = .15, .6, whitened
    (
        "gae",
        given([1], lengths=np.array([2]), values=turns([0.2, 0.4]), gamma=0.5, lam=0.5),
        [-S, S],
    ),
    # gamma .5. First: turn rewards 1, then 2+0 at the end: 2, 2. Second: 0, then 1: .5, 1. Differences 1.5 and 1.
    (
        "turn_returns",
        given(
            [2, 1],
            lengths=np.array([3, 2]),
            turn_lengths=counts([2, 1], [1, 1]),
            turn_rewards=turns([1, np.nan], [0, 0]),
            gamma=0.5,
        ),
        [S, S, S, -S, -S],
    ),
    # a late turn is compared with where the sibling ended
    (
        "turn_returns",
        given([1, 0], lengths=np.array([1, 2]), turn_lengths=counts([1], [1, 1])),
        [S, -S, -S],
    ),
    # episode ±s; turn rewards at the first turn 0 against 1: ∓s, weighed 2; the last turns have none
    (
        "mt_grpo",
        given(
            [1, 0],
            lengths=np.array([2, 3]),
            turn_lengths=counts([1, 1], [2, 1]),
            turn_rewards=turns([0, np.nan], [1, np.nan]),
            turn_coef=2.0,
        ),
        [-S, S, S, S, -S],
    ),
    # no turn has a reward of its own
    ("mt_grpo", given([1, 0], turn_rewards=turns([np.nan], [np.nan])), [S, -S]),
    # two go on and earn 1 and 3 in their second turn, one stops: to go 1 3 0 at both turns, mean 4/3, std sqrt(7/3)
    (
        "mt_grpo",
        given(
            [0, 0, 0],
            lengths=np.array([2, 2, 1]),
            turn_lengths=counts([1, 1], [1, 1], [1]),
            turn_rewards=turns([np.nan, 1], [0, 3], [np.nan]),
        ),
        (np.array([1, 1, 3, 3, 0]) - 4 / 3) / np.sqrt(7 / 3),
    ),
    # both start in a; the second comes back to a: returns 1 | 0 0 in state a (mean 1/3, std sqrt(1/3)), b met once
    (
        "gigpo",
        given([1, 0], **TWO, turn_states=(("a", "b"), ("a", "a")), eps=1e-12),
        [S + 2 * U, S, -S - U, -S - U],
    ),
    # rewards only of turns, gamma 1/2: totals 2 and 1, so ±s; both start in a with returns 1 + ½·1 and ½·1, so ±s again
    (
        "gigpo",
        given(
            [0, 0],
            **TWO,
            turn_rewards=turns([1, 1], [np.nan, 1]),
            turn_states=(("a", "b"), ("a", "c")),
            gamma=0.5,
            eps=1e-12,
        ),
        [2 * S, S, -2 * S, -S],
    ),
    # the same state in two groups
    ("gigpo", given([1, 0], [0, 1], turn_states=(("a",), ("a",)), eps=1e-4), [0, 0]),
    ("maxrl", given([1, 0, 0, 0]), [3, -1, -1, -1]),
    ("maxrl", given([1, 1, 1, 0]), [1 / 3, 1 / 3, 1 / 3, -1]),
    ("maxrl", given([0, 0]), [0, 0]),
    ("maxrl", given([1, 1]), [0, 0]),
]


@pytest.mark.parametrize(("name", "x", "wanted"), BY_HAND, ids=[name for name, *_ in BY_HAND])
def test_by_hand(name: str, x: AdvantageInput, wanted: Any) -> None:
    found = estimator(name)(x)
    assert [len(a) for a in found] == x.lengths.tolist()
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-5, atol=1e-6)


def test_pass_at_k_of_any_reward_against_all_subsets() -> None:
    rewards = [0.1, 0.7, 0.4, 0.9, 0.4]
    subsets = list(combinations(range(5), 3))
    best = [max(rewards[i] for i in s) for s in subsets]
    expected = [
        (np.mean([b for b, s in zip(best, subsets, strict=True) if i in s]) - np.mean(best))
        / np.std(best)
        for i in range(5)
    ]
    np.testing.assert_allclose(scalars("pass_at_k", given(rewards, k=3)), expected, rtol=1e-5)


def test_gae_by_hand() -> None:
    # gamma .5, lam .5, values .2 .4, reward 1 at the end: deltas 0+.2-.2 = 0, 1-.4 = .6; A = .25·.6, .6
    x = given([1], lengths=np.array([2]), values=turns([0.2, 0.4]), gamma=0.5, lam=0.5)
    np.testing.assert_allclose(gae_raw(x)[0], [0.15, 0.6])
    np.testing.assert_allclose(value_targets(x)[0], [0.35, 1.0])
    # cut off with value 2 to come: the last delta grows by .5·2
    np.testing.assert_allclose(gae_raw(replace(x, bootstrap=np.array([2.0])))[0], [0.4, 1.6])
    # with lambda 1 the return less the value
    x = given([1, 2], lengths=np.array([3, 2]), values=turns([0.1, 0.2, 0.3], [0.5, 0.6]))
    np.testing.assert_allclose(np.concatenate(gae_raw(x)), [0.9, 0.8, 0.7, 1.5, 1.4])


@pytest.mark.parametrize(
    "name",
    "grpo dr_grpo batch rloo opo pass_at_k turn_returns mt_grpo gigpo".split(),
)
def test_a_group_of_one_and_a_group_of_equals_are_zero(name: str) -> None:
    x = given(
        [3, 2, 2, 2],
        [0, 1, 1, 1],
        turn_rewards=turns([0], [0], [0], [0]),
        turn_states=(("a",),) * 4,
        eps=1e-4,
    )
    np.testing.assert_allclose(scalars(name, x), 0, atol=1e-7)


def test_turn_gdpo_by_hand() -> None:
    # a tool that gives 100 at the first turn of one, the world 1 at its second: each source by itself is ±S at its turn
    x = given(
        [1, 0],
        lengths=np.array([2, 2]),
        turn_lengths=counts([1, 1], [1, 1]),
        parts=np.array([[1.0], [0.0]]),
        turn_parts=(np.array([[100, np.nan], [np.nan, 1]]), np.full((2, 2), np.nan)),
    )
    # the episode's part ±S; the tool's to go (100, 0) against (0, 0): ±S at depth 0; the world's (1, 1): ±S at both
    raw = np.array([3 * S, 2 * S, -3 * S, -2 * S])
    # an episode counts once
    std = np.sqrt((np.mean(raw[:2] ** 2) + np.mean(raw[2:] ** 2)) / (2 - 1))
    np.testing.assert_allclose(np.concatenate(estimator("turn_gdpo")(x)), raw / std, rtol=1e-6)


def test_turn_gdpo_without_turn_rewards_is_gdpo_whatever_the_number_of_turns() -> None:
    # a batch mean over turns would push the second group, whose rewards are equal
    x = given(
        [0, 1, 1, 1],
        [0, 0, 1, 1],
        lengths=np.array([4, 1, 1, 1]),
        turn_lengths=counts([1, 1, 1, 1], [1], [1], [1]),
        parts=np.array([[0.0], [1.0], [1.0], [1.0]]),
        turn_parts=tuple(np.full((n, 1), np.nan) for n in (4, 1, 1, 1)),
    )
    found = scalars("turn_gdpo", x)
    assert found == pytest.approx(scalars("gdpo", x), rel=1e-6) and found[2:] == [0, 0]


@pytest.mark.parametrize(
    "name", ["remax", "gdpo", "gae", "mt_grpo", "turn_gdpo", "gigpo", "distill"]
)
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        estimator(name)(given([1, 0]))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_nothing_gives_nothing(name: str) -> None:
    none: tuple[Any, ...] = ()
    x = AdvantageInput(
        np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64), None, none, none, np.zeros((0, 1)), None,
        np.zeros(0), none,
    )  # fmt: skip
    assert estimator(name)(x) == []


def test_an_episode_without_trained_tokens_has_no_advantage() -> None:
    given = [np.array(values, np.float32) for values in ([0.5, 0.5], [], [-0.25])]
    assert episode_advantage(given).tolist() == [0.5, 0, -0.25]


def test_input_read_off_episodes() -> None:
    def episode(group: str, answer: float, tool: float | None) -> Episode:
        origins = [Origin.USER] * 2 + [Origin.MODEL] * 3 + [Origin.TOOL] + [Origin.MODEL] * 2
        calls = (ToolCall("1", "search", {}, ""), ToolCall("2", "sum", {}, ""))
        results = (ToolResult("ok", reward=tool), ToolResult("ok"))
        return Episode(
            "e",
            "t",
            group_id=group,
            tokens=Tokens.from_ids([1, 2, 0, 1, 2, 7, 0, 1], origins),
            turns=(
                Turn(0, "user", (), 0, 2),
                Turn(1, "assistant", (), 2, 5, calls),
                Turn(2, "tool", (), 5, 6, results=results),
                Turn(3, "assistant", (), 6, 8),
            ),
            reward_parts=(
                RewardPart("tests", answer, primary=True),
                RewardPart("format", 1.0, 0.5),
            ),
        )

    episodes = [episode("g", 1, 2.0), episode("g", 0, None), episode("h", 0, None)]
    x: Any = AdvantageInput.of(episodes, gamma=0.9)
    assert x.gamma == 0.9 and x.turn_states[0] == x.turn_states[1]
    assert len(set(x.turn_states[0])) == 2
    names = "rewards groups lengths parts part_weights turn_lengths turn_rewards turn_parts".split()
    np.testing.assert_equal(
        [getattr(x, name) for name in names],
        [
            np.array([1.5, 0.5, 0.5]),
            np.array([0, 0, 1]),
            np.array([5, 5, 5]),
            np.array([[1, 1], [1, 0], [1, 0]]),
            np.array([0.5, 1]),
            counts([3, 2], [3, 2], [3, 2]),
            turns([2, np.nan], [np.nan, np.nan], [np.nan, np.nan]),
            tuple(np.array([[first], [np.nan]]) for first in (2, np.nan, np.nan)),
        ],
    )


@pytest.mark.parametrize(
    ("second", "third", "by_turn", "by_source"),
    [
        # what user and environment gave counts too; each of the tools and the world apart
        ({"role": "user", "results": (), "reward": 0.75}, {}, [0.75, np.nan], None),
        ({"reward": 0.5}, {}, [2.5, np.nan], [[0.5, 2.0], [np.nan, np.nan]]),
        ({}, {"reward": 2.0}, [2.0, 2.0], None),
    ],
)
def test_turn_rewards_of_results_users_and_worlds(
    second: dict[str, Any], third: dict[str, Any], by_turn: list[float], by_source: Any
) -> None:
    calls = (ToolCall("1", "search", {}, ""), ToolCall("2", "sum", {}, ""))
    results = (ToolResult("", reward=2.0), ToolResult(""))
    answered = replace(Turn(2, "tool", (), 2, 3, results=results), **second)
    last = replace(Turn(3, "assistant", (), 3, 4), **third)
    asked = (Turn(0, "user", (), 0, 1), Turn(1, "assistant", (), 1, 2, calls))
    episode = Episode("e", "t", turns=(*asked, answered, last))
    np.testing.assert_equal(turn_rewards(episode), by_turn)
    if by_source is not None:
        np.testing.assert_equal(turn_parts([episode])[0], by_source)


# --- what must hold of every estimator ---

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


def affine(x: Any, scale: float = 1.0, shift: float = 0.0) -> Any:
    """Everything that is worth reward, `scale` times as much and, for whole episodes, `shift` more."""
    return replace(
        x,
        rewards=scale * x.rewards + shift,
        parts=scale * x.parts + shift / x.part_weights.sum(),
        turn_rewards=tuple(scale * r for r in x.turn_rewards),
        turn_parts=tuple(scale * r for r in x.turn_parts),
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


@pytest.mark.parametrize(
    ("name", "gamma"),
    [
        *((name, 0.9) for name in SHIFTED),
        # without a discount neither in what is relative or whitened
        *((name, 1.0) for name in ("turn_returns", "gigpo", "reinforce_pp")),
    ],
)
def test_a_constant_on_all_rewards_changes_nothing(name: str, gamma: float) -> None:
    x = replace(anything(), gamma=gamma)
    np.testing.assert_allclose(flat(name, x), flat(name, affine(x, shift=3)), atol=1e-4)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_the_scale_of_rewards_matters_where_they_are_not_normalised(name: str) -> None:
    kept = name in ("dr_grpo", "rloo", "remax", "opo", "rae")
    before, after = flat(name, anything()), flat(name, affine(anything(), scale=4))
    np.testing.assert_allclose((4 if kept else 1) * before, after, 1e-4, 0 if kept else 1e-6)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "turn_returns", "gigpo"]
)
def test_other_groups_do_not_matter(name: str) -> None:
    x, own = anything(), [0, 2, 5, 7]
    alone, whole = estimator(name)(rows(x, own)), estimator(name)(x)
    for place, original in enumerate(own):
        np.testing.assert_allclose(alone[place], whole[original], rtol=1e-5, atol=1e-6)
