"""How tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf


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
