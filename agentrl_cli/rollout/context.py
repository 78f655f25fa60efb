"""The parts of a rollout that its attempts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from agentrl_cli.chat.render import Chat
from agentrl_cli.config import Config
from agentrl_cli.envs.tool_env import Env
from agentrl_cli.hooks import HookList
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.rollout.job import Job
from agentrl_cli.rollout.recorder import Recorder
from agentrl_cli.rollout.world import make_env
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Episode

if TYPE_CHECKING:
    from agentrl_cli.policies.load import Loaded
    from agentrl_cli.sandbox import Sandbox
    from agentrl_cli.store import RunRow, Store


class Workers(Protocol):
    """Other processes that make episodes."""

    count: int
    """How many there are."""

    def policy(self, loaded: Loaded) -> Policy:
        """Return the policy of a run with these workers, which publishes new weights to all of them."""

    async def attempt(self, job: Job, context: RolloutContext) -> Attempted:
        """Return the ended episode of a job, stored. Raises what `Attempt.run` raises."""


@dataclass(frozen=True)
class RolloutContext:
    """The policy, its chat template, the packs' tools and rewards, and where episodes are stored."""

    policy: Policy
    chat: Chat
    packs: Mapping[str, Pack]
    config: Config
    temperature: float
    bad_ids: tuple[int, ...]
    """Ids that are never sampled (`rollout.truncation.bad_tokens`)."""
    sandbox: Sandbox | None
    store: Store | None
    hooks: HookList
    with_tools: bool
    run: RunRow | None
    recorder: Recorder = field(default_factory=Recorder)
    """Where attempts write."""
    workers: Workers | None = None
    """Other processes that make the episodes; None: this one."""
    frozen: dict[str, Policy] = field(default_factory=dict)
    """Other models that agents call, by name, each loaded when an agent first needs it."""

    @property
    def concurrency(self) -> int:
        """Episodes that run at once, in all workers together."""
        return self.config.rollout.concurrency * (1 if self.workers is None else self.workers.count)

    async def make_env(self, pack: Pack, job: Job) -> Env:
        """Return the environment of an episode."""
        return await make_env(
            self.config.rollout, pack, job, self.sandbox, with_tools=self.with_tools
        )


@dataclass(frozen=True, slots=True)
class Attempted:
    """An attempt that ended."""

    episode: Episode
    drift: str = ""
    """The worst kind of drift in it; empty if there is none."""
    guard_seconds: float = 0.0
    """Time that the drift guard took."""
    foreign: str = ""
    """Name of a parser whose syntax a turn's calls have and the chat's own parser does not read; empty if none."""
