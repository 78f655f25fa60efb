"""Several vLLM or SGLang servers of the same model behind one policy.

An episode stays on its server, so that the server's prefix cache holds the beginning of the next turn. A server that
cannot be reached or fails gets no more turns: they are sampled again on another one with the same seed, and the episode
stays there. It is asked again after 1, 2, 4 … 60 s, is given the present weights, and takes new episodes.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from agentrl_cli.errors import BadAnswer, ConfigError, PolicyError
from agentrl_cli.plugins.engines.policy import HttpPolicy, drop_older
from agentrl_cli.plugins.engines.wires import SGLANG, VLLM, Wire
from agentrl_cli.policies.protocols import OnToken, Policy, PolicySource, Published
from agentrl_cli.policies.remote.http import ServerError, Unreachable
from agentrl_cli.types import Generation, Int32, Sampling

LONGEST_PAUSE = 60.0
"""Seconds between two attempts to reach a lost server, at most."""
WAIT = 0.1
"""Seconds between two looks for a server if there is none."""


class Member:
    """One of the servers."""

    def __init__(self, policy: HttpPolicy) -> None:
        self.policy = policy
        self.episodes: set[str] = set()
        self.lost = ""
        """Why it gets no turns; empty while it does."""
        self.returning: asyncio.Task[None] | None = None


class Servers:
    """A TrainablePolicy over several servers."""

    untrainable = ""
    separate_weights = True

    def __init__(self, policies: Sequence[HttpPolicy], patience: float, pause: float = 1.0) -> None:
        """Sample on `policies`.

        `patience`: seconds that a turn waits if no server can be reached; `pause`: before the first new attempt.
        """
        self.members = [Member(policy) for policy in policies]
        for policy in policies:
            policy.mark = policies[0].mark
        self.name = policies[0].name
        self.context_length = min(policy.context_length for policy in policies)
        self.weights_version = policies[0].weights_version
        self.patience = patience
        self.pause = pause
        self._folder: Path | None = None
        self._changing = asyncio.Lock()
        self._held = False
        self._homes: dict[str, Member] = {}
        self._moved = 0

    def servers(self) -> list[HttpPolicy]:
        """Return the servers that get turns."""
        return [member.policy for member in self.members if not member.lost]

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
        """Return one turn of the episode's server. Raises PolicyError if none can be reached for `patience` s."""
        alone_since = None
        while True:
            member = self._home(key)
            if member is None:
                alone_since = alone_since or time.monotonic()
                if time.monotonic() - alone_since > self.patience:
                    reasons = "; ".join(sorted({one.lost for one in self.members}))
                    raise PolicyError(
                        f"None of {len(self.members)} servers can be reached: {reasons}"
                    )
                await asyncio.sleep(WAIT)
                continue
            alone_since = None
            try:
                policy = member.policy
                return await policy.generate(
                    key, ids, sampling, group=group, on_token=on_token, images=images
                )
            except PolicyError as error:
                if not _is_lost(error):
                    raise
                self._moved += 1
                self._lose(member, error)

    async def publish(self, version: str) -> None:
        """Write the weights once and let every reachable server load them; the others do when they return."""
        folder = self.members[0].policy.write(version)
        async with self._changing:
            await self._each(lambda policy: policy.load_weights(folder, version))
            self._folder, self.weights_version = folder, version
        drop_older(folder)

    async def sleep(self) -> None:
        """Let all reachable servers free their memory."""
        await self._each(lambda policy: policy.sleep())

    def last_published(self) -> Published:
        """Return the weights of the last `publish`, and the servers that lack them."""
        assert self._folder is not None, "nothing was published"
        lost = frozenset(one.policy.endpoint.url for one in self.members if one.lost)
        return Published(
            self._folder, f"{self.weights_version}-{self.members[0].policy.mark}", lost
        )

    async def hold(self) -> None:
        """Hold all servers. A lost one is not given the old weights meanwhile."""
        self._held = True
        async with self._changing:
            await asyncio.gather(*(member.policy.hold() for member in self.members))

    async def adopt(self, version: str, published: Published | None) -> None:
        """Sample with weights that another process published.

        A server without them gets them from here before it gets turns.
        """
        async with self._changing:
            self.weights_version = version
            self._folder = published.folder if published is not None else self._folder
            for member in self.members:
                await member.policy.adopt(version, published)
                if (
                    published is not None
                    and member.policy.endpoint.url in published.lost
                    and not member.lost
                ):
                    self._lose(
                        member, PolicyError(f"{member.policy.endpoint.url} has older weights.")
                    )
            self._held = False

    async def release(self, key: str) -> None:
        """Forget an episode: its server has room for another."""
        member = self._homes.pop(key, None)
        if member is not None:
            member.episodes.discard(key)

    async def reach(self) -> None:
        """Raise PolicyError if a server does not answer within seconds: that is a wrong address more often than not."""
        asked = await asyncio.gather(
            *(member.policy.reach() for member in self.members), return_exceptions=True
        )
        for error in filter(None, asked):
            raise error

    async def close(self) -> None:
        tasks = [member.returning for member in self.members if member.returning is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members:
            await member.policy.close()

    async def rest(self) -> None:
        """Do nothing: there is nothing to free in this process."""

    def take_metrics(self) -> dict[str, float]:
        moved, self._moved = self._moved, 0
        return {"remote/servers": float(len(self.servers())), "remote/moved_turns": float(moved)}

    def describe(self) -> str:
        lost = len(self.members) - len(self.servers())
        return f"{self.name} on {len(self.members)} servers" + (
            f", {lost} of them unreachable" if lost else ""
        )

    def _home(self, key: str) -> Member | None:
        """Return the episode's server; a new episode gets the one with the fewest. None if all are lost."""
        member = self._homes.get(key)
        if member is None or member.lost:
            if member is not None:
                member.episodes.discard(key)
            reachable = [one for one in self.members if not one.lost]
            if not reachable:
                return None
            # By the key if several are as free: other processes sample from the same servers.
            order = {
                id(one): zlib.crc32(f"{one.policy.endpoint.url} {key}".encode())
                for one in reachable
            }
            member = self._homes[key] = min(
                reachable, key=lambda one: (len(one.episodes), order[id(one)])
            )
            member.episodes.add(key)
        return member

    async def _each(self, call: Callable[[HttpPolicy], Awaitable[None]]) -> None:
        """Call every reachable server at once. One that is lost meanwhile gets no turns; raises any other error."""
        members = [member for member in self.members if not member.lost]
        calls = [call(member.policy) for member in members]
        for member, error in zip(
            members, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(error, PolicyError) and _is_lost(error):
                self._lose(member, error)
            elif isinstance(error, BaseException):
                raise error

    def _lose(self, member: Member, error: PolicyError) -> None:
        member.lost = error.message
        if member.returning is None or member.returning.done():
            member.returning = asyncio.get_running_loop().create_task(self._return(member))

    async def _return(self, member: Member) -> None:
        # Ask a lost server until it answers, and give it the present weights.
        pause = self.pause
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                await member.policy.endpoint.reach()
                async with self._changing:
                    if self._held:
                        continue
                    if self._folder is not None:
                        await member.policy.restore(self._folder, self.weights_version)
                    member.lost = ""
                    return
            except PolicyError as error:
                member.lost = error.message


def _is_lost(error: PolicyError) -> bool:
    """Whether an error concerns the server and not the request alone."""
    failed = isinstance(error, ServerError) and error.status >= 500
    return not isinstance(error, BadAnswer) and (failed or isinstance(error, Unreachable))


def vllm(source: PolicySource) -> Policy:
    """Return a policy on one vLLM server, or on several."""
    policy = _connect(VLLM, source)
    if source.config.remote.backend.sleep and source.trainable:
        if source.config.rollout.async_staleness:
            raise ConfigError(
                "remote.backend.sleep and rollout.async_staleness exclude each other: a server asleep does not sample.",
                hint="Set one of them to its default.",
            )
        for server in policy.servers():
            server.sleeps = True
    return policy


def sglang(source: PolicySource) -> Policy:
    """Return a policy on one SGLang server, or on several."""
    return _connect(SGLANG, source)


def _connect(wire: Wire, source: PolicySource) -> HttpPolicy | Servers:
    remote = source.config.remote
    if not remote.urls:
        return HttpPolicy.of(wire, source)
    return Servers(
        [HttpPolicy.of(wire, source, url) for url in remote.urls], remote.request.patience
    )
