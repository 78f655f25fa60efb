"""The policy of a run whose episodes workers make: it publishes new weights to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from agentrl_cli.cluster.service import Following
from agentrl_cli.policies.protocols import OnToken, Sleeping, TrainablePolicy
from agentrl_cli.types import Generation, Int32, Sampling

if TYPE_CHECKING:
    from torch import nn


class Publisher(Protocol):
    """Brings weights to workers."""

    async def publish_to_servers(self, version: str, policy: Following) -> None:
        """Let a policy publish to its servers while no worker samples from them; workers sample with it then."""

    async def publish(self, version: str, model: nn.Module | None) -> None:
        """Let every worker sample with the trained weights of `model` as they are now; None: only the name changes."""

    def take_metrics(self) -> dict[str, float]:
        """Numbers of all workers' policies since the last call."""

    def describe(self) -> str:
        """Return the workers, in a few words."""


class ClusterPolicy:
    """A trainable policy of this process, and the same one in every worker."""

    def __init__(self, inner: TrainablePolicy, model: Any, workers: Publisher) -> None:
        self.inner = inner
        self.model = model
        self.workers = workers
        self.name, self.context_length = inner.name, inner.context_length
        self.untrainable, self.separate_weights = inner.untrainable, inner.separate_weights

    @property
    def weights_version(self) -> str:
        return self.inner.weights_version

    @weights_version.setter
    def weights_version(self, version: str) -> None:
        self.inner.weights_version = version

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
        """One turn, sampled here."""
        return await self.inner.generate(
            key, ids, sampling, group=group, on_token=on_token, images=images
        )

    async def release(self, key: str) -> None:
        await self.inner.release(key)

    async def close(self) -> None:
        await self.inner.close()

    async def rest(self) -> None:
        await self.inner.rest()

    async def sleep(self) -> None:
        if isinstance(self.inner, Sleeping):
            await self.inner.sleep()

    async def publish(self, version: str) -> None:
        if isinstance(self.inner, Following):
            await self.workers.publish_to_servers(version, self.inner)
            return
        await self.inner.publish(version)
        await self.workers.publish(version, self.model)

    def take_metrics(self) -> dict[str, float]:
        return self.workers.take_metrics()

    def describe(self) -> str:
        return f"{self.inner.describe()}, {self.workers.describe()}"
