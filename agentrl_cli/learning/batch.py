"""A batch of episodes as padded tensors under the field's names, for code that wants the usual rectangle.

Training here never pads (packing.py); this is for other trainers and notebooks. Prompts are
padded on the left and responses on the right, so that `input_ids` is the two side by side.

Not here: groups and losses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.errors import DataError
from agentrl_cli.learning.packing import Segment, segments_of
from agentrl_cli.types import Episode, Float32
from agentrl_cli.types.branches import split_trained

_LEFT = ("prompts",)
_RIGHT = ("responses", "response_mask", "advantages", "old_log_probs")


@dataclass(frozen=True)
class Batch:
    """B sequences, P the longest prompt, R the longest response. `batch[1:3]`, `batch[[4, 0]]`, `batch[mask]` select.

    A sequence is an episode, or one of its branches that train a token. A response begins at its first trained token:
    tool results in it are there, with a response_mask of 0, and what an earlier branch trains is in the prompt.
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

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the tensors that are there."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                yield name, value

    def split(self, size: int) -> list[Batch]:
        """Consecutive batches of at most `size` sequences."""
        return [self[start : start + size] for start in range(0, len(self), size)]

    def to(self, device: str | torch.device) -> Batch:
        """Return the same on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.items()}
        return replace(self, **moved)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        from safetensors.torch import save_file

        facts = {
            "batch": "1",
            "pad_id": str(self.pad_id),
            "episode_ids": json.dumps(self.episode_ids),
        }
        save_file({name: tensor.contiguous() for name, tensor in self.items()}, str(path), facts)

    @classmethod
    def load(cls, path: str | Path) -> Batch:
        """Read what `save` wrote. Raises DataError for any other file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"Cannot read the batch {path}: {error}", hint="Batch.save writes one."
            ) from error
        if facts.get("batch") != "1":
            raise DataError(
                f"{path} is a safetensors file but not a batch.", hint="Batch.save writes one."
            )
        given: dict[str, Any] = {
            "pad_id": int(facts["pad_id"]),
            "episode_ids": tuple(json.loads(facts["episode_ids"])),
        }
        return cls(**tensors, **given)

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """One batch from several, padded to the longest. All must have the same tensors and pad id."""
        if not batches:
            raise ValueError("no batches to concatenate")
        first = batches[0]
        names = [name for name, _ in first.items()]
        if any([n for n, _ in b.items()] != names or b.pad_id != first.pad_id for b in batches):
            raise ValueError("batches to concatenate must hold the same tensors and pad id")
        prompt = max(b.prompts.shape[1] for b in batches)
        response = max(b.responses.shape[1] for b in batches)
        joined: dict[str, Tensor] = {}
        for name in names:
            if name in {"input_ids", "attention_mask", "position_ids"}:
                continue
            parts = [
                _pad(dict(b.items())[name], name, prompt, response, first.pad_id) for b in batches
            ]
            joined[name] = torch.cat(parts)
        there = [_pad_mask(b, prompt, response) for b in batches]
        ids = sum((b.episode_ids for b in batches), ())
        return _assemble(joined, torch.cat(there), first.pad_id, ids)

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
        starts = [_first_trained(segment) for _, _, segment in rows]
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
        tensors = {
            "prompts": torch.from_numpy(whole[:, :prompt].copy()),
            "responses": torch.from_numpy(whole[:, prompt:].copy()),
            "response_mask": torch.from_numpy(mask[:, prompt:].copy()),
            "old_log_probs": torch.from_numpy(logps[:, prompt:].copy()),
            "rewards": torch.tensor(
                [
                    math.nan if (reward := episodes[n].reward) is None else reward
                    for n, _, _ in rows
                ],
                dtype=torch.float32,
            ),
        }
        if advantages is not None:
            tensors["advantages"] = torch.from_numpy(gains[:, prompt:].copy())
        return _assemble(
            tensors, torch.from_numpy(there), pad_id, tuple(episodes[n].id for n, _, _ in rows)
        )


def _first_trained(segment: Segment) -> int:
    """Return where the response begins; behind the last token if nothing is trained."""
    where = np.flatnonzero(segment.trained)
    return int(where[0]) if len(where) else len(segment.ids)


def _assemble(
    tensors: dict[str, Tensor], there: Tensor, pad_id: int, ids: tuple[str, ...]
) -> Batch:
    """Return a batch from its two halves and the mask of the tokens that are not padding."""
    given: dict[str, Any] = {
        **tensors,
        "input_ids": torch.cat([tensors["prompts"], tensors["responses"]], 1),
        "attention_mask": there,
        "position_ids": _positions(there),
        "pad_id": pad_id,
        "episode_ids": ids,
    }
    return Batch(**given)


def _positions(there: Tensor) -> Tensor:
    """[B, T] 0 on the left padding, counting from the first token on, over the right padding too."""
    started = torch.cummax(there, 1).values if there.numel() else there
    return (torch.cumsum(started, 1) - 1).clamp(min=0)


def _pad(tensor: Tensor, name: str, prompt: int, response: int, pad_id: int) -> Tensor:
    """To P = prompt or R = response columns, on the side that the field is padded on."""
    fill = pad_id if name in {"prompts", "responses"} else 0
    if name in _LEFT:
        return torch.nn.functional.pad(tensor, (prompt - tensor.shape[1], 0), value=fill)
    if name in _RIGHT:
        return torch.nn.functional.pad(tensor, (0, response - tensor.shape[1]), value=fill)
    return tensor


def _pad_mask(batch: Batch, prompt: int, response: int) -> Tensor:
    """Return the attention mask with its padding grown on both sides."""
    grow = (prompt - batch.prompts.shape[1], response - batch.responses.shape[1])
    return torch.nn.functional.pad(batch.attention_mask, grow)
