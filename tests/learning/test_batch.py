"""The padded batch: layout by hand, masks, slicing."""

import numpy as np
import torch

from agentrl_cli.learning.batch import Batch
from agentrl_cli.types import Episode, Generation, Origin, RewardPart, StopReason, Tokens

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


def episodes() -> list[Episode]:
    tool = Tokens.concat(
        [given(Origin.USER, 1, 2), sampled(3, 4), given(Origin.TOOL, 5), sampled(6)]
    )
    plain = Tokens.concat([given(Origin.USER, 7, 8, 9), sampled(10)])
    forced = Tokens.concat([given(Origin.USER, 11), sampled(12), given(Origin.FORCED, 13)])
    return [
        Episode(id=f"e{i}", task_id="t", tokens=tokens, reward_parts=(RewardPart("x", float(i)),))
        for i, tokens in enumerate((tool, plain, forced))
    ]


def batch() -> Batch:
    gains = [np.array([1, 2, 3], np.float32), np.array([4], np.float32), np.array([5], np.float32)]
    return Batch.from_episodes(episodes(), advantages=gains, pad_id=PAD)


def test_layout_by_hand() -> None:
    b = batch()
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
    assert int(b.response_mask.sum()) == sum(e.trained_tokens for e in episodes())
    for row, episode in enumerate(episodes()):
        assert b.input_ids[row][b.attention_mask[row] == 1].tolist() == episode.tokens.ids.tolist()


def test_slices() -> None:
    b = batch()
    assert b[1].episode_ids == ("e1",) and b[-1].prompts.tolist() == [[PAD, PAD, 11]]
    assert b[1:].episode_ids == ("e1", "e2")
    assert b[[2, 0]].episode_ids == ("e2", "e0")
    assert b[torch.tensor([True, False, True])].episode_ids == ("e0", "e2")


def test_an_episode_with_nothing_sampled_and_no_episodes() -> None:
    quiet = Episode(id="q", task_id="t", tokens=given(Origin.USER, 1, 2))
    b = Batch.from_episodes([quiet])
    assert b.prompts.tolist() == [[1, 2]] and b.responses.shape == (1, 0)
    assert len(Batch.from_episodes([])) == 0
