"""What a policy is: token ids in; sampled ids, log-probabilities, stop reason and weights version out.

A policy knows nothing of messages, tools or rewards. It serves many episodes at once; `key` names the episode, so that
a backend may keep its keys and values between turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from agentrl_cli.errors import ModelError
from agentrl_cli.types import TOP_K, Float32, Generation, Int32, Sampling, StopReason

OnToken = Callable[[int], None]
"""Called with each sampled id, as it is sampled, where a backend can."""


@runtime_checkable
class Policy(Protocol):
    """Something that continues token ids."""

    name: str
    context_length: int
    """Most tokens of a context, prompt and answer together."""
    weights_version: str
    trainable: bool
    """False where token ids or log-probabilities are not exact: usable for eval and chat only."""

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | Int32,
        sampling: Sampling,
        *,
        group: str = "",
        on_token: OnToken | None = None,
    ) -> Generation:
        """Sample one assistant turn after `ids`, the whole context so far.

        `key` names the episode, `group` episodes that share a prompt. The stop token, where one was sampled, is part
        of the result. Raises PolicyError where the backend fails.
        """
        ...

    async def release(self, key: str) -> None:
        """Forget an episode; unknown keys are fine."""
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


def require_trainable(policy: Policy) -> None:
    """Raise ModelError, with the policy's own reason, where it cannot be trained with."""
    if not policy.trainable:
        reason = getattr(policy, "untrainable", "its token ids or log-probabilities are not exact")
        raise ModelError(
            f"Policy {policy.name} cannot be trained: {reason}.", hint="It works for agentrl eval and agentrl chat."
        )


def generation(
    ids: Sequence[int],
    stop_reason: StopReason,
    *,
    weights_version: str,
    logps: Sequence[float] | Float32 | None = None,
    logp_policy: Sequence[float] | Float32 | None = None,
    seconds: float = 0.0,
) -> Generation:
    """A Generation of n ids without alternatives; log-probs are 0 (certain) unless given, entropy 0 then, else NaN."""
    n = len(ids)
    sampled = np.zeros(n, np.float32) if logps is None else np.asarray(logps, np.float32)
    own = sampled.copy() if logp_policy is None else np.asarray(logp_policy, np.float32)
    if len(sampled) != n or len(own) != n:
        raise ValueError(f"{len(sampled)} log-probs for {n} ids")
    return Generation(
        ids=np.asarray(ids, np.int32),
        logp_sampled=sampled,
        logp_policy=own,
        entropy=np.full(n, 0.0 if logps is None else np.nan, np.float32),
        top_ids=np.full((n, TOP_K), -1, np.int32),
        top_logps=np.full((n, TOP_K), np.nan, np.float32),
        stop_reason=stop_reason,
        weights_version=weights_version,
        seconds=seconds,
    )
