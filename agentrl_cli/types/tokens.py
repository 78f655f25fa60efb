"""Token ids with their origins and log-probabilities: one generation, and parallel arrays over a span."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl_cli.types.old_names import OldAttribute

Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]
Support = NDArray[np.object_]
"""[n] for each token the ids that it was drawn from, an int32 array; None: the whole vocabulary, or not sampled."""

TOP_K = 5
"""How many alternatives are stored per sampled token."""


class Origin(IntEnum):
    """Where a token came from. Only MODEL tokens are ever trained."""

    TEMPLATE = 0
    """Written by the chat template: role markers, separators, generation prompts."""
    SYSTEM = 1
    USER = 2
    TOOL = 3
    MODEL = 4
    """Sampled by the policy (the stop token included)."""
    FORCED = 5
    """Written in the model's turn by us, a closed truncated turn for instance: never trained."""


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model sampled a stop token; it is part of the ids."""
    STOP_STRING = "stop_string"
    LENGTH = "length"
    """The token limit of this turn or of the episode was reached."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens that a policy sampled for one turn of one episode. All arrays have length n, top ones [n, TOP_K]."""

    ids: Int32
    logp_sampled: Float32
    """log-prob under the distribution really sampled (after penalties, forbidden tokens, top-k, top-p, min-p)."""
    logp_policy: Float32
    """log-prob under the policy at the sampling temperature, untruncated; ratios use this one."""
    entropy: Float32
    """Entropy in nats of the untruncated distribution at the sampling temperature."""
    top_ids: Int32
    top_logps: Float32
    stop_reason: StopReason
    weights_version: str
    seconds: float = 0.0
    forced: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None
    """True where the token was the only one that `Sampling.allow` allowed; None: nowhere."""
    support: Support | None = None
    """The tokens that could be drawn, with `Sampling.keep_support`."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Parallel per-token arrays of one span. NaN in the float arrays where a token was not sampled."""

    ids: Int32
    origin: Int8
    logp_sampled: Float32
    logp_policy: Float32
    entropy: Float32
    top_ids: Int32
    """[n, TOP_K]; -1 if absent."""
    top_logps: Float32
    support: Support | None = None
    """Where it was stored (`rollout.truncation.replay`)."""

    given = OldAttribute("from_ids")
    sampled = OldAttribute("from_generation")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_mask(self) -> NDArray[np.bool_]:
        """[n] bool: the tokens a loss may touch, which are the sampled ones."""
        return np.asarray(self.origin == Origin.MODEL)

    def slice(self, start: int, end: int) -> Tokens:
        """Return the tokens of a span."""
        return self._each(lambda array: array[start:end])

    def take(self, positions: NDArray[np.int64]) -> Tokens:
        """Return the tokens at some positions, in that order."""
        return self._each(lambda array: array[positions])

    def _each(self, change: Callable[[Any], Any]) -> Tokens:
        found: list[Any] = [None if array is None else change(array) for array in self._arrays()]
        return Tokens(*found)

    def _arrays(self) -> list[Any]:
        return [getattr(self, item.name) for item in fields(self)]

    @classmethod
    def empty(cls) -> Tokens:
        return cls.from_ids([], [])

    @classmethod
    def from_ids(cls, ids: Sequence[int] | Int32, origin: Sequence[int] | Int8) -> Tokens:
        """Return tokens that were not sampled (template, system, user, tool)."""
        n = len(ids)
        nan = np.full(n, np.nan, np.float32)
        return cls(
            np.asarray(ids, np.int32),
            np.asarray(origin, np.int8),
            nan,
            nan.copy(),
            nan.copy(),
            np.full((n, TOP_K), -1, np.int32),
            np.full((n, TOP_K), np.nan, np.float32),
        )

    @classmethod
    def from_generation(cls, generation: Generation) -> Tokens:
        """Return the tokens of a generation: of origin MODEL, except the forced ones."""
        origin = np.full(len(generation.ids), Origin.MODEL, np.int8)
        if generation.forced is not None:
            origin[generation.forced] = Origin.FORCED
        return cls(
            generation.ids,
            origin,
            generation.logp_sampled,
            generation.logp_policy,
            generation.entropy,
            generation.top_ids,
            generation.top_logps,
            generation.support,
        )

    @classmethod
    def concat(cls, parts: Sequence[Tokens]) -> Tokens:
        if not parts:
            return cls.empty()
        if any(part.support is not None for part in parts):
            parts = [
                replace(part, support=no_support(len(part))) if part.support is None else part
                for part in parts
            ]
        columns = zip(*(part._arrays() for part in parts), strict=True)
        found: list[Any] = [
            None if column[0] is None else np.concatenate(column) for column in columns
        ]
        return cls(*found)


def no_support(count: int) -> Support:
    """[count] tokens without one."""
    return np.full(count, None, np.object_)


def supports(sets: Sequence[Int32 | None]) -> Support:
    """[n] from one set of ids for each token."""
    out = no_support(len(sets))
    for place, ids in enumerate(sets):
        out[place] = ids
    return out
