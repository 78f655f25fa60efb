"""Episodes whose turns branch: paths, token sequences and masks, by hand."""

import numpy as np
import pytest

from agentrl_cli.types import ROOT, Branch, Episode, Turn
from agentrl_cli.types.branches import split_trained
from tests.helpers.trees import Said, chain, episode, fork, sub_agent, three_leaves


def spelled(one: Episode, branch: Branch) -> list[int]:
    return [int(i) for i in one.tokens.ids[branch.positions]]


def trained(one: Episode, branch: Branch) -> list[int]:
    return [int(i) for i in one.tokens.ids[branch.positions[branch.trained]]]


def test_a_turn_without_a_parent_continues_the_one_before() -> None:
    one = episode(chain())
    assert one.linear and one.branches == ((0, 1, 2, 3, 4, 5),)
    (only,) = one.sequences
    assert only.turns == (0, 1, 2, 3, 4, 5) and len(only) == len(one.tokens)
    assert np.array_equal(only.positions, np.arange(12)) and np.array_equal(
        only.trained, one.tokens.trained_mask
    )
    assert one.chain(only) is one
    named = episode([Said(s.role, s.ids, n - 1) for n, s in enumerate(chain())])
    assert named.linear and named.branches == one.branches
    assert [field.name for field in Turn.__dataclass_fields__.values()][-3:] == [
        "parent",
        "images",
        "player",
    ]


@pytest.mark.parametrize(
    ("said", "branches", "ids", "masked"),
    [
        (
            fork(),
            ((0, 1, 2, 3), (0, 1, 4, 5)),
            ([10, 11, 12, 20, 21, 30, 22, 23, 24], [10, 11, 12, 20, 21, 31, 32, 25]),
            ([20, 21, 22, 23, 24], [25]),
        ),
        (
            sub_agent(),
            ((2, 3), (0, 1, 4, 5)),
            ([40, 41, 26, 27], [10, 11, 12, 20, 21, 33, 28, 29]),
            ([26, 27], [20, 21, 28, 29]),
        ),
        (
            three_leaves(),
            ((0, 1, 2, 3), (0, 1, 4, 5), (0, 6)),
            ([10, 11, 12, 20, 21, 13, 22], [10, 11, 12, 20, 21, 14, 15, 23, 24], [10, 11, 12, 25]),
            ([20, 21, 22], [23, 24], [25]),
        ),
    ],
)
def test_a_branch_is_what_the_model_saw_and_a_sampled_token_is_trained_once(
    said: list[Said],
    branches: tuple[tuple[int, ...], ...],
    ids: tuple[list[int], ...],
    masked: tuple[list[int], ...],
) -> None:
    one = episode(said)
    assert not one.linear and one.branches == branches
    assert [spelled(one, branch) for branch in one.sequences] == list(ids)
    assert [trained(one, branch) for branch in one.sequences] == list(masked)
    assert sum(int(branch.trained.sum()) for branch in one.sequences) == one.trained_tokens


def test_a_branch_as_an_episode_of_its_own() -> None:
    one = episode(fork(), reward=0.5)
    alone = one.chain(one.sequences[1])
    assert (
        alone.linear
        and alone.reward == 0.5
        and alone.tokens.ids.tolist() == spelled(one, one.sequences[1])
    )
    assert [(turn.index, turn.role, turn.start, turn.end) for turn in alone.turns] == [
        (0, "user", 0, 3),
        (1, "assistant", 3, 5),
        (2, "tool", 5, 7),
        (3, "assistant", 7, 8),
    ]
    assert [message["content"] for message in alone.messages] == [
        "turn 0",
        "turn 1",
        "turn 4",
        "turn 5",
    ]


def test_values_of_sampled_tokens_go_to_the_branches() -> None:
    one = episode(three_leaves())
    values = np.arange(one.trained_tokens, dtype=np.float32)
    parts = split_trained(one.sequences, one.tokens.trained_mask, values)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4], [5]]


def test_odd_trees() -> None:
    assert (
        Episode("e", "t").branches == ()
        and Episode("e", "t").linear
        and len(Episode("e", "t").sequences) == 1
    )
    late = episode([Said("user", (1,)), Said("assistant", (2,), parent=5)])
    assert late.branches == ((0,), (1,))  # a parent that does not come earlier counts as none
    roots = episode([Said("user", (1,), parent=ROOT), Said("user", (2,), parent=ROOT)])
    assert roots.branches == ((0,), (1,)) and not roots.sequences[1].trained.any()
