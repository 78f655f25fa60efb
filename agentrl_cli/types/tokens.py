"""Token ids with their origins and log-probabilities: how they are drawn, one generation, parallel arrays over a span,
and the numbers that training adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum, StrEnum
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl_cli.types.old_names import OldAttribute

Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]
Support = NDArray[np.object_]
"""[n] for each token the ids that it was drawn from, an int32 array; None: the whole vocabulary, or not sampled."""

COLDEST = 1e-5
"""Temperatures below are greedy as 0 is: logits divided by them overflow float32."""
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
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_new_tokens: int = 512
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    slot: int = -1
    """Number of the episode in its step: a policy with fixed decode slots puts it there; -1: anywhere."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are taken away."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the context less likely."""
    bad_ids: tuple[int, ...] = ()
    """Tokens that are never drawn."""
    allow: Callable[[tuple[int, ...]], Sequence[int] | None] | None = None
    """Called before each token with the turn so far: the ids that may come next, None for all; a single one is forced.
    Local policies only."""

    keep_support: bool = False
    """Report the tokens that truncation left, for each token (`Generation.support`). Local policies only."""

    @property
    def problem(self) -> str:
        """Describes the first invalid value; empty if all are valid."""
        checks = (
            (0 <= self.temperature < inf, f"temperature {self.temperature:g} is not 0 or above"),
            (0 < self.top_p <= 1, f"top_p {self.top_p:g} is not above 0 and at most 1"),
            (self.top_k >= 0, f"top_k {self.top_k} is not 0 or above"),
            (0 <= self.min_p <= 1, f"min_p {self.min_p:g} is not in 0 to 1"),
            (
                0 < self.repetition_penalty < inf,
                f"repetition_penalty {self.repetition_penalty:g} is not above 0",
            ),
            (
                min(self.bad_ids, default=0) >= 0,
                f"bad_ids has {min(self.bad_ids, default=0)}, which is not a token",
            ),
            ("" not in self.stop_strings, "stop_strings has an empty text"),
        )
        return next((f"Sampling.{text}" for fits, text in checks if not fits), "")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken."""
        return self.temperature < COLDEST

    @property
    def cut(self) -> bool:
        """True if improbable tokens are removed."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def steered(self) -> bool:
        """True if logits are changed before the temperature is applied."""
        return self.repetition_penalty != 1.0 or bool(self.bad_ids) or self.allow is not None

    @property
    def truncated(self) -> bool:
        """True if the sampled distribution differs from the policy's own at this temperature."""
        return self.cut or self.steered


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


@dataclass(frozen=True, slots=True, repr=False)
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

    def __repr__(self) -> str:
        return f"Tokens({len(self)})"  # asyncio.run formats what its coroutine returned

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


REJECTED = 2
"""`algo.off_policy.reject` left the token out of the mini-batch."""
MASKED = 3
"""`algo.entropy.share` took the token's gradient."""
FAR = 4
"""`algo.off_policy.mask` or a masking correction took it: the weights have moved too far since sampling."""
NO_GRADIENT = ("in full", "CLIPPED", "REJECTED", "MASKED: certain", "MASKED: off-policy")
"""Words for the values of `clipped`."""


@dataclass(frozen=True, slots=True)
class TrainSignals:
    """Per-token facts that training adds to an episode, each [n] over the episode's tokens, NaN where untrained.

    `weight` is the effective gradient weight −∂L/∂log p of the policy term (zero where clipped).
    """

    advantage: Float32
    logp_train: Float32
    """log-prob before the first optimizer step."""
    ratio: Float32
    clipped: Int8
    """0, 1 if the ratio was clipped, REJECTED, MASKED or FAR."""
    weight: Float32
    logp_ref: Float32 | None = None
    value: Float32 | None = None
    returns: Float32 | None = None
    logp_teacher: Float32 | None = None
    """log-prob under the teacher of a distillation."""
    reward_advantage: Float32 | None = None
    """The advantage by the reward alone, beside a teacher's advantage; unweighted."""

    @property
    def push(self) -> Float32:
        """[n] float32: weight × (1 − p), NaN where untrained; by this much a step moves the sampled token's own logit.

        The gradient of log softmax for the sampled token's logit is 1 − p, so a token that was certain is hardly moved
        whatever its advantage. p is the probability before the first optimizer step.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(self.weight * -np.expm1(np.minimum(self.logp_train, 0)), np.float32)
