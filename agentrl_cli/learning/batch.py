"""A batch of episodes as padded tensors under the field's names, for code that wants the usual rectangle.

Training here never pads (packing.py); this is for other trainers and notebooks. Prompts are
padded on the left and responses on the right, so that `input_ids` is the two side by side.

Not here: groups and losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.learning.packing import segments_of
from agentrl_cli.types import Episode, Float32
from agentrl_cli.types.branches import split_trained


@dataclass(frozen=True)
class Batch:
    """B sequences, P the longest prompt, R the longest response. `batch[1:3]`, `batch[[4, 0]]`, `batch[mask]` select.

    A sequence is an episode, or one of its branches that train a token. A response begins at its first trained token:
    tool results in it are there, with a response_mask of 0, and the tokens of an earlier branch are in the prompt.
    """

    prompts: Tensor
    """[B, P] int64, padded on the left."""
    responses: Tensor
    """[B, R] int64, padded on the right."""
    response_mask: Tensor
    """[B, R] int64: 1 on the trained tokens: those that the model sampled, each in the first branch that has it."""
    input_ids: Tensor
    """[B, P + R] int64: prompt and response side by side."""
    attention_mask: Tensor
    """[B, P + R] int64: 0 on padding."""
    position_ids: Tensor
    """[B, P + R] int64: position within the episode, 0 on the left padding, running on over the right."""
    advantages: Tensor | None = None
    """[B, R] float32, 0 outside response_mask."""
    old_log_probs: Tensor | None = None
    """[B, R] float32: the policy's log-probability when it sampled the token, 0 outside response_mask."""
    rewards: Tensor | None = None
    """[B] float32."""
    pad_id: int = 0
    episode_ids: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.prompts.shape[0]

    def __getitem__(self, which: int | slice | Sequence[int] | Tensor) -> Batch:
        """Return the chosen sequences, padding kept; an integer gives a batch of one."""
        rows = torch.arange(len(self))[[which] if isinstance(which, int) else which]
        tensors: dict[str, Any] = {
            name: tensor[rows.to(tensor.device)] for name, tensor in self.items()
        }
        ids = tuple(self.episode_ids[int(i)] for i in rows) if self.episode_ids else ()
        return replace(self, **tensors, episode_ids=ids)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the tensors that are there."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                yield name, value

    @classmethod
    def from_episodes(
        cls,
        episodes: Sequence[Episode],
        *,
        advantages: Sequence[Float32] | None = None,
        pad_id: int = 0,
    ) -> Batch:
        """Episodes to tensors; `advantages` as an estimator returns them, N arrays over the trained tokens."""
        rows = [
            (n, branch, segment)
            for n, e in enumerate(episodes)
            for branch, segment in segments_of(e)
        ]
        starts = [int(np.append(segment.trained, True).argmax()) for _, _, segment in rows]
        prompt = max(starts, default=0)
        response = max(
            (len(s.ids) - start for (_, _, s), start in zip(rows, starts, strict=True)), default=0
        )
        whole = np.full((len(rows), prompt + response), pad_id, np.int64)
        there, mask = np.zeros_like(whole), np.zeros_like(whole)
        logps, gains = np.zeros(whole.shape, np.float32), np.zeros(whole.shape, np.float32)
        for row, ((n, branch, segment), start) in enumerate(zip(rows, starts, strict=True)):
            place = slice(prompt - start, prompt - start + len(segment.ids))
            tokens, trained = episodes[n].tokens, segment.trained
            whole[row, place], there[row, place], mask[row, place] = segment.ids, 1, trained
            logps[row, place] = np.where(trained, tokens.logp_policy[branch.positions], 0.0)
            if advantages is not None:
                (gains[row, place][trained],) = split_trained(
                    [branch], tokens.trained_mask, advantages[n]
                )
        graded = (episodes[n].reward for n, _, _ in rows)
        rewards = [math.nan if reward is None else reward for reward in graded]
        started = np.maximum.accumulate(there, 1)
        right = [torch.from_numpy(each[:, prompt:].copy()) for each in (whole, mask, gains, logps)]
        return cls(
            prompts=torch.from_numpy(whole[:, :prompt].copy()),
            responses=right[0],
            response_mask=right[1],
            input_ids=torch.from_numpy(whole),
            attention_mask=torch.from_numpy(there),
            position_ids=torch.from_numpy((started.cumsum(1) - 1).clip(min=0)),
            advantages=None if advantages is None else right[2],
            old_log_probs=right[3],
            rewards=torch.tensor(rewards, dtype=torch.float32),
            pad_id=pad_id,
            episode_ids=tuple(episodes[n].id for n, _, _ in rows),
        )
