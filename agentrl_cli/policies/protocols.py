"""The protocol of a policy: token ids in; sampled ids, log-probabilities, stop reason and weights version out.

Messages, tools and rewards are not a policy's business. It serves many episodes at once; `key` names the episode, so
that a backend can keep its KV cache between turns. The protocols hold everything that the agent loop and the trainer
use: a class that fulfils `TrainablePolicy` can be trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from agentrl_cli.errors import ModelError
from agentrl_cli.types import (
    TOP_K,
    Float32,
    Generation,
    Int32,
    Message,
    Sampling,
    StopReason,
    ToolSchema,
)

if TYPE_CHECKING:
    from torch import nn

    from agentrl_cli.chat.render import Chat
    from agentrl_cli.config.records import PolicySettings

OnToken = Callable[[int], None]
"""Called with each id as it is sampled; a backend that gets whole turns calls it for each id at the end."""


@runtime_checkable
class Policy(Protocol):
    """Continues token ids."""

    name: str
    context_length: int
    """Most tokens of a context, prompt and answer together."""
    weights_version: str
    untrainable: str
    """Why the policy is for eval and chat only, as the end of a sentence; empty if it can be trained with."""

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | Int32,
        sampling: Sampling,
        *,
        group: str = "",
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Sample one assistant turn after `ids`, the whole context so far.

        `key` names the episode, `group` the episodes that share a prompt; `images` are those of the context in order.
        A sampled stop token is part of the result. Raises PolicyError if the backend fails, or if there are images
        and it reads none.
        """

    async def release(self, key: str) -> None:
        """Forget an episode. Unknown keys are ignored."""

    async def close(self) -> None:
        """Free everything."""


@runtime_checkable
class MessagePolicy(Protocol):
    """A policy whose server renders the messages with its own template."""

    def observe(
        self,
        key: str,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        choice: Any = "auto",
    ) -> bool:
        """Take the conversation so far, and OpenAI's `tool_choice` where it is another than "auto".

        Called before each `generate` of the episode. Returns whether the server follows the choice, so that the turn
        is not begun for it.
        """


@runtime_checkable
class TrainablePolicy(Policy, Protocol):
    """A policy that samples with the weights that are trained."""

    separate_weights: bool
    """True if it has the trained weights only after the first `publish`, as a server does."""

    async def rest(self) -> None:
        """Return once nothing is sampled, the step of a cancelled turn included: an update changes the model next.

        Frees the memory that sampling takes. A turn that comes meanwhile begins only after the caller awaits again.
        """

    async def publish(self, version: str) -> None:
        """Sample with the weights as they are now, under this name; drop all that the old ones computed.

        Waits for running turns, which finish with the weights they began with: a turn has one version. Raises
        PolicyError if the weights cannot be published.
        """

    def take_metrics(self) -> dict[str, float]:
        """Return numbers of the steps since the last call, under the names that the store gets."""

    def describe(self) -> str:
        """Return a few words on the engine, for people."""


@runtime_checkable
class Sleeping(Protocol):
    """A policy that can free the memory of its server."""

    async def sleep(self) -> None:
        """Return once the server has freed its memory; the next `publish` wakes it. No effect if it keeps it."""


@runtime_checkable
class Reachable(Protocol):
    """A policy on servers that may not be there."""

    async def reach(self) -> None:
        """Raise PolicyError unless they answer within seconds."""


@runtime_checkable
class Served(Protocol):
    """A policy whose weights are on servers."""

    def servers(self) -> Sequence[Policy]:
        """Return those that can be reached now, each as a policy."""


@dataclass(frozen=True, slots=True)
class Published:
    """Weights that one process had the servers load, for other processes that sample from the same servers."""

    folder: Path
    label: str
    """The servers' name of an adapter."""
    lost: frozenset[str] = frozenset()
    """Addresses of the servers that do not have them yet."""


@dataclass
class PolicySource:
    """The arguments of a backend. The model is loaded when it is first asked for."""

    config: PolicySettings
    chat: Chat
    """A backend whose model reads images may replace it by a chat that renders them."""
    name: str
    """The first weights version: the model's name, of a checkpoint with its step."""
    folder: Path | None
    """The model's files; None for a policy without any."""
    base: Path
    """The project folder."""
    trainable: bool
    """True if the policy will be trained with."""
    context_length: int
    """Positions that the model's configuration allows."""
    load: Callable[[], nn.Module]
    loaded: nn.Module | None = field(default=None, init=False)

    def model(self) -> nn.Module:
        """Return the module that is trained or sampled from. Raises ModelError if it cannot be loaded."""
        if self.loaded is None:
            self.loaded = self.load()
        return self.loaded

    def save(self, folder: Path) -> None:
        """Write the model as it is now, or its adapter, with the tokenizer's files."""
        from agentrl_cli.models.save import save_model  # imports torch

        assert self.folder is not None
        save_model(self.model(), self.folder, folder)


Backend = Callable[[PolicySource], Policy]
"""The meaning of a name of POLICIES, or of a `module:object`."""


def require_trainable(policy: Policy) -> TrainablePolicy:
    """Return the policy, for a training. Raises ModelError with the reason if it cannot be trained with."""
    if isinstance(policy, TrainablePolicy) and not policy.untrainable:
        return policy
    missing = [
        name
        for name in ("rest", "publish", "take_metrics", "describe")
        if not hasattr(policy, name)
    ]
    reason = (
        policy.untrainable
        or f"it lacks {', '.join(missing) or 'separate_weights'} of TrainablePolicy"
    )
    raise ModelError(
        f"Policy {policy.name} cannot be trained: {reason}.",
        hint="It works for `agentrl eval` and `agentrl chat`.",
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
    """Return a Generation of n ids without alternatives; log-probs are 0 (certain) unless given, entropy 0 then, else
    NaN.
    """
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
