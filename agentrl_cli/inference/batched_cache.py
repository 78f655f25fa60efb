"""Transformers' own caches as batches of sequences: joined, split and measured, whatever their layers hold.

Every tensor of a cache has one sequence per index of its first dimension (those in SECOND: of their second). Keys and
values are padded on the left, so that the newest token of all sequences is the last column; states of linear attention,
convolutions and recurrences have no columns and are stacked. Objects are copied, never changed: a cache that others
still hold stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl_cli.errors import ModelError
from agentrl_cli.inference.request import Request
from agentrl_cli.types import Int32

SECOND = {"indexer_position_ids"}
"""Attributes whose second dimension is the sequences."""
COLUMNS = {"keys": -2, "values": -2, "indexer_keys": 1, "indexer_position_ids": -1}
"""Attributes of cache layers that have a column per token, and its dimension."""
COUNTERS = {"cumulative_length", "seqlen_offset"}
"""Attributes that count columns: those of the longest sequence."""


class NotJoined(ModelError):
    """These caches cannot be one batch."""


@dataclass(eq=False, slots=True)
class Batch:
    """Sequences that share a cache."""

    requests: list[Request]
    lengths: list[int]
    """Tokens that the cache has of each."""
    cache: Any
    logits: Tensor | None = None
    """[B, V] after the newest token of each."""

    def part(self, which: Sequence[int]) -> Batch:
        """Return a batch of some of its sequences, in the order given."""
        lengths = [self.lengths[n] for n in which]
        cache = select(self.cache, which, max(lengths, default=0)) if which else None
        logits = None if self.logits is None else self.logits[list(which)]
        return Batch([self.requests[n] for n in which], lengths, cache, logits)


@dataclass(frozen=True, slots=True)
class Kept:
    """The cache of a finished turn."""

    ids: Int32
    cache: Any
    shift: int = 0
    """What the position of its next token is ahead of its number, after images."""


def merge(batches: Sequence[Batch]) -> Batch:
    """Several batches as one."""
    if len(batches) == 1:
        return batches[0]
    logits = [batch.logits for batch in batches if batch.logits is not None]
    return Batch(
        [request for batch in batches for request in batch.requests],
        [length for batch in batches for length in batch.lengths],
        join([batch.cache for batch in batches]),
        torch.cat(logits) if logits else None,
    )


def join(caches: Sequence[Any]) -> Any:
    """One cache with the sequences of several, in order. Raises NotJoined."""
    return caches[0] if len(caches) == 1 else _join(list(caches), "")


def select(cache: Any, sequences: Sequence[int], length: int | None = None) -> Any:
    """Return a cache of some sequences of another one, in the order given; one may be named several times.

    `length`: columns of the longest of them; padding beyond it is dropped.
    """
    return _select(cache, list(sequences), length, "")


def nbytes(held: Any) -> int:
    """Bytes of all tensors of a cache."""
    if isinstance(held, Tensor):
        return held.numel() * held.element_size()
    return sum(nbytes(part) for _, part in _parts(held))


def has_columns(held: Any) -> bool:
    """Whether some layer keeps keys and values: the width of the batch then shows in its masks."""
    return any(
        part.numel() > 0 if name in COLUMNS and isinstance(part, Tensor) else has_columns(part)
        for name, part in _parts(held)
    )


def _parts(held: Any) -> list[tuple[str, Any]]:
    """Return the contents of a container of a cache, by name."""
    if isinstance(held, dict):
        return [(str(key), value) for key, value in held.items()]
    if isinstance(held, list | tuple):
        return [("", value) for value in held]
    return list(vars(held).items()) if _is_cache(held) else []


def _is_cache(held: Any) -> bool:
    """Whether an object is a cache or a layer of one, of transformers or of a model's own file; no configuration."""
    return (
        type(held).__module__.startswith("transformers")
        and hasattr(held, "__dict__")
        and not hasattr(held, "to_dict")
    )


def _rebuilt(held: Any, parts: list[Any]) -> Any:
    """Return a container like `held` with other parts."""
    if isinstance(held, dict):
        return type(held)(zip(held, parts, strict=True))
    if isinstance(held, list | tuple):
        return type(held)(parts)
    new = copy.copy(held)
    vars(new).update(zip(vars(held), parts, strict=True))
    return new


def _join(values: list[Any], name: str) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if name in SECOND:
            return _stack([value.transpose(0, 1) for value in values], name).transpose(0, 1)
        return _stack(values, name)
    if name in COUNTERS:
        return max(values)
    if isinstance(first, dict | list | tuple) or _is_cache(first):
        columns = [_parts(value) for value in values]
        if len({len(column) for column in columns}) > 1:
            raise NotJoined(f"the parts of {name or type(first).__name__} differ in number")
        parts = [
            _join([part for _, part in each], each[0][0]) for each in zip(*columns, strict=True)
        ]
        return _rebuilt(first, parts)
    if any(value is not first and value != first for value in values):
        raise NotJoined(f"{name} differs between sequences")
    return first


def _stack(given: list[Any], name: str) -> Tensor:
    """Tensors of several batches as one, with as many columns as the widest."""
    values = [
        value for value in given if isinstance(value, Tensor) and value.dim() == given[0].dim()
    ]
    if len(values) < len(given):
        raise NotJoined(f"{name} has other dimensions in some sequences")
    if not values[0].dim():
        if name in COUNTERS:
            return torch.stack(values).amax(0)
        if any(not torch.equal(value, values[0]) for value in values):
            raise NotJoined(f"{name} differs between sequences")
        return values[0]
    if name not in COLUMNS:
        if len({value.shape[1:] for value in values}) > 1:
            raise NotJoined(f"{name} has other sizes in some sequences")
        return torch.cat(values)
    dim = COLUMNS[name] % values[0].dim()
    width = max(value.shape[dim] for value in values)
    shape = list(values[0].shape)
    shape[0], shape[dim] = sum(len(value) for value in values), width
    out, at = values[0].new_zeros(shape), 0
    for value in values:
        out[at : at + len(value)].narrow(dim, width - value.shape[dim], value.shape[dim]).copy_(
            value
        )
        at += len(value)
    return out


def _select(held: Any, sequences: list[int], length: int | None, name: str) -> Any:
    if isinstance(held, Tensor):
        if name in SECOND:
            return _take(held.transpose(0, 1), sequences, length, name).transpose(0, 1)
        return _take(held, sequences, length, name)
    if name in COUNTERS and length is not None:
        return min(held, length)
    if isinstance(held, dict | list | tuple) or _is_cache(held):
        return _rebuilt(held, [_select(part, sequences, length, key) for key, part in _parts(held)])
    return held


def _take(held: Tensor, sequences: list[int], length: int | None, name: str) -> Tensor:
    """Sequences of a tensor, cut to the newest `length` columns if it has any."""
    if not held.dim() or not held.numel():
        return held
    if name in COLUMNS and length is not None:
        dim = COLUMNS[name] % held.dim()
        held = held.narrow(dim, max(held.shape[dim] - length, 0), min(length, held.shape[dim]))
    if len(sequences) == 1:
        return held[sequences[0] : sequences[0] + 1].clone()
    return held.index_select(0, torch.tensor(sequences, device=held.device))
