"""What a step does with its episodes: a fact for every one of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agentrl_cli.learning.dispositions import decide
from agentrl_cli.types import Episode, Fact, Origin, Outcome, RewardPart, Tokens

SAMPLED = Tokens.from_ids([1, 2, 3], [Origin.USER, Origin.MODEL, Origin.MODEL])
GIVEN = Tokens.from_ids([1, 2], [Origin.USER, Origin.TEMPLATE])


def episode(
    name: str, reward: float = 0.0, outcome: Outcome = Outcome.FAILED, tokens: Tokens = SAMPLED
) -> Episode:
    return Episode(
        name, "t", reward_parts=(RewardPart("r", reward),), outcome=outcome, tokens=tokens
    )


def group(*rewards: float, name: str = "e") -> list[Episode]:
    return [episode(f"{name}{n}", reward) for n, reward in enumerate(rewards)]


def facts(
    *groups: Sequence[Episode], drift: dict[str, str] | None = None, **more: Any
) -> list[Fact]:
    found = decide(groups, drift=drift or {}, **more)
    assert set(found) == {e.id for g in groups for e in g}, "no silent drops"
    return [found[e.id] for g in groups for e in g]


def test_a_group_with_spread_is_trained_and_one_without_is_not() -> None:
    assert facts(group(0, 1, 0)) == [Fact.TRAINED] * 3
    assert facts(group(1, 1, 1)) == [Fact.SKIPPED_ZERO_VARIANCE] * 3
    assert facts(group(1, 1), drop_zero_variance=False) == [Fact.TRAINED] * 2
    assert (
        facts(group(0.3, 0.1 + 0.2)) == [Fact.SKIPPED_ZERO_VARIANCE] * 2
    )  # rounding is not spread
    both = facts(group(0, 1, name="a"), group(0, 0, name="b"))
    assert both == [Fact.TRAINED] * 2 + [Fact.SKIPPED_ZERO_VARIANCE] * 2


@pytest.mark.parametrize(
    ("outcome", "fact"),
    [
        (Outcome.ENV_ERROR, Fact.SKIPPED_ENV_ERROR),
        (Outcome.SANDBOX_ERROR, Fact.SKIPPED_SANDBOX_ERROR),
        (Outcome.TIMEOUT, Fact.SKIPPED_TIMEOUT),
        (Outcome.CANCELLED, Fact.SKIPPED_CANCELLED),
        (Outcome.TOO_LONG, Fact.SKIPPED_TOO_LONG),
        (Outcome.SOLVED, Fact.TRAINED),
        (Outcome.TRUNCATED_TURNS, Fact.TRAINED),
        (Outcome.TRUNCATED_TOKENS, Fact.TRAINED),
    ],
)
def test_every_outcome(outcome: Outcome, fact: Fact) -> None:
    assert facts([*group(0, 1), episode("x", 1, outcome)]) == [Fact.TRAINED, Fact.TRAINED, fact]
    # Facts of errors and the list of outcomes that are masked agree.
    assert outcome.is_error <= (fact is not Fact.TRAINED)


def test_an_error_gives_a_group_no_spread() -> None:
    broken = episode("x", 0.0, Outcome.ENV_ERROR)
    assert facts([*group(1, 1), broken]) == [Fact.SKIPPED_ZERO_VARIANCE] * 2 + [
        Fact.SKIPPED_ENV_ERROR
    ]


def test_a_group_that_errors_left_with_one_is_too_small_and_a_group_of_one_by_choice_is_not() -> (
    None
):
    broken = episode("x", 0.0, Outcome.TIMEOUT)
    assert facts([*group(1), broken]) == [Fact.SKIPPED_GROUP_TOO_SMALL, Fact.SKIPPED_TIMEOUT]
    assert facts(group(0.0)) == [Fact.TRAINED]
    assert facts([broken]) == [Fact.SKIPPED_TIMEOUT]


def test_drift() -> None:
    assert facts(group(0, 1, 1), drift={"e1": "structural"}) == [
        Fact.TRAINED,
        Fact.SKIPPED_DRIFT,
        Fact.TRAINED,
    ]
    assert facts(group(0, 1), drift={"e1": "structural"}, train_drifted=True) == [Fact.TRAINED] * 2
    for mild in ("resegmented", "reserialised", "by_design"):
        assert facts(group(0, 1), drift={"e1": mild}) == [Fact.TRAINED] * 2
    left = facts(group(0, 1), drift={"e1": "structural"})
    assert left == [Fact.SKIPPED_GROUP_TOO_SMALL, Fact.SKIPPED_DRIFT]


def test_nothing_sampled_is_nothing_to_train() -> None:
    mute = episode("x", 1.0, tokens=GIVEN)
    assert facts([*group(0, 1), mute]) == [Fact.TRAINED, Fact.TRAINED, Fact.SKIPPED_NO_MODEL_TOKENS]
    assert not np.any(GIVEN.trained_mask)


def test_nothing_at_all() -> None:
    assert facts() == [] and facts([]) == []


def test_what_is_stale_is_skipped_and_its_group_decided_without_it() -> None:
    found = facts(group(1.0, 0.0, 0.5), group(1.0, 0.0, name="f"), stale={"e1", "f0"})
    assert found == [
        Fact.TRAINED,
        Fact.SKIPPED_STALE,
        Fact.TRAINED,
        Fact.SKIPPED_STALE,
        Fact.SKIPPED_GROUP_TOO_SMALL,
    ]
