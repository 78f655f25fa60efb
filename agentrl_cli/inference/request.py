"""One turn of one episode that is being sampled: its tokens, its block table, and its result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from agentrl_cli.errors import EnvError, PolicyError
from agentrl_cli.types import TOP_K, Float32, Generation, Int32, Sampling, StopReason, supports

NUMBERS = 3
"""Of each token: log-probability as sampled, log-probability of the policy, entropy. After them in a record come the
ids (their bits) and the log-probabilities of the likeliest tokens."""


@dataclass(eq=False, kw_only=True)
class TokenSequence:
    """Tokens of an episode and their place in the KV cache."""

    key: str
    """Of the episode."""
    ids: Int32
    """[n ≥ 1] the whole context of the turn."""
    out: list[int] = field(default_factory=list)
    """What was drawn after it so far."""
    block_table: list[int] = field(default_factory=list)
    """Blocks of its positions, in order."""
    slot: int = -1
    """Its row of every decode step, where slots are fixed."""

    @property
    def context(self) -> Int32:
        """[length] the given and the drawn tokens."""
        return np.concatenate([self.ids, np.asarray(self.out, np.int32)]) if self.out else self.ids

    @property
    def length(self) -> int:
        """Positions so far; the last one is not in the cache yet."""
        return len(self.ids) + len(self.out)

    @property
    def last(self) -> int:
        """The token that is fed next."""
        return self.out[-1] if self.out else int(self.ids[-1])

    def tail(self, count: int) -> list[int]:
        """Return the last tokens, at most so many."""
        if len(self.out) >= count:
            return self.out[-count:]
        given: list[int] = self.ids[len(self.out) - count :].tolist()
        return given + self.out


@dataclass(eq=False, kw_only=True)
class Request(TokenSequence):
    """A turn of an episode: how to draw it, and who waits for it."""

    sampling: Sampling
    future: asyncio.Future[Generation]
    uniforms: list[float]
    """[max_new_tokens] number i decides token i."""
    started: float
    on_token: Callable[[int], None] | None = None
    decode: Callable[[list[int]], str] | None = None
    order: int = 0
    """Order of arrival: the youngest is preempted where memory is short."""
    images: tuple[bytes, ...] = ()
    """Images of the context, in order."""
    shift: int = 0
    """Distance between the position of its next token and its number, after images that were seen."""
    forced: list[bool] = field(default_factory=list)
    """Which tokens were the only ones allowed."""
    support: list[Int32 | None] = field(default_factory=list)
    """The tokens that each could be drawn from, if the sampling asks for them."""
    stop: StopReason | None = None
    error: EnvError | None = None
    """What its own `allow` did wrong: it ends, and others go on."""
    reported: int = 0
    """Tokens that were passed on."""
    _records: Float32 | None = None

    @property
    def abandoned(self) -> bool:
        """True if the result is not awaited any more: cancelled, failed, or its event loop is closed."""
        return self.future.done() or self.future.get_loop().is_closed()

    def take(
        self,
        token: int,
        record: Float32,
        limit: int,
        forced: bool = False,
        support: Int32 | None = None,
    ) -> None:
        """Append a drawn token and see whether the turn ends; `limit` is the most positions there may be."""
        if (
            self._records is None
        ):  # one array a turn: one a step would lie between the buffers of the logits
            most = min(self.sampling.max_new_tokens, limit - len(self.ids))
            self._records = np.empty((most, len(record)), np.float32)
        self._records[len(self.out)] = record
        self.out.append(token)
        self.forced.append(forced)
        self.support.append(support)
        if self.error is not None:
            self.stop = StopReason.CANCELLED
        elif token in self.sampling.stop_ids:
            self.stop = StopReason.STOP
        elif self.sampling.stop_strings and self._has_stop_string():
            self.stop = StopReason.STOP_STRING
        elif len(self.out) == len(self._records):
            self.stop = StopReason.LENGTH

    def report(self, version: str) -> None:
        """Pass on the newest token, and the whole turn once it has ended."""
        if self.abandoned:
            return
        if self.error is not None:
            self.future.set_exception(self.error)
            return
        if self.on_token is not None:
            for token in self.out[self.reported :]:
                self.on_token(token)
            self.reported = len(self.out)
        if self.stop is not None:
            self.future.set_result(self.result(version))

    def fail(self, problem: Exception) -> None:
        """End with an error."""
        if not self.abandoned:
            self.future.set_exception(problem)

    def _has_stop_string(self) -> bool:
        if self.decode is None:
            return False
        longest = max(len(text) for text in self.sampling.stop_strings)
        tail = self.decode(self.out[-4 * longest :])
        return any(text in tail for text in self.sampling.stop_strings)

    def result(self, version: str) -> Generation:
        """Return the drawn tokens as the policy's answer."""
        count = len(self.out)
        records = (
            np.empty((0, NUMBERS), np.float32) if self._records is None else self._records[:count]
        )
        top_ids = np.full((count, TOP_K), -1, np.int32)
        top_logps = np.full((count, TOP_K), np.nan, np.float32)
        known = (
            records.shape[1] - NUMBERS
        ) // 2  # fewer than TOP_K where the vocabulary is smaller
        top_ids[:, :known] = np.ascontiguousarray(records[:, NUMBERS : NUMBERS + known]).view(
            np.int32
        )
        top_logps[:, :known] = records[:, NUMBERS + known :]
        sampled, policy, entropy = np.ascontiguousarray(records[:, :NUMBERS].T)
        return Generation(
            ids=np.asarray(self.out, np.int32),
            logp_sampled=sampled,
            logp_policy=policy,
            entropy=entropy,
            top_ids=top_ids,
            top_logps=top_logps,
            stop_reason=self.stop or StopReason.CANCELLED,
            weights_version=version,
            seconds=time.monotonic() - self.started,
            forced=np.asarray(self.forced, np.bool_) if any(self.forced) else None,
            support=supports(self.support) if self.sampling.keep_support else None,
        )


def check_context(ids: Int32, length: int, vocabulary: int, *, bounded: bool) -> None:
    """Raise PolicyError for a context that cannot be continued. `bounded`: `length` is the memory's limit."""
    if not len(ids):
        raise PolicyError("There is nothing to continue: the context is empty.")
    if len(ids) >= length and bounded:
        raise PolicyError(
            f"The context of {len(ids)} tokens does not fit into the memory for keys and values, which holds {length}.",
            hint="Raise rollout.memory, or lower rollout.max_tokens.",
        )
    if len(ids) >= length:
        raise PolicyError(f"The context of {len(ids)} tokens leaves no room in {length}.")
    if int(ids.max()) >= vocabulary or int(ids.min()) < 0:
        raise PolicyError(
            f"The context has token {int(ids.max())}, and the model knows {vocabulary}.",
            hint="The tokenizer does not belong to this model.",
        )
