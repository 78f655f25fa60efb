"""The rollout's policy as one episode's session asks it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from agentrl_cli.agents.emit import MODEL
from agentrl_cli.hooks.own_time import OwnTime
from agentrl_cli.policies.protocols import OnToken
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.job import Job
from agentrl_cli.rollout.transcript import Transcript
from agentrl_cli.types import AgentState, Generation, Int32, Sampling


class EpisodePolicy:
    """A Policy that knows its episode: under its id, in its group, through the hooks.

    The first failure is kept: it is the infrastructure's, and the agent, which sees only a status of HTTP, must not
    have to answer for it.
    """

    name = MODEL
    untrainable = ""

    def __init__(
        self, context: RolloutContext, job: Job, transcript: Transcript, clock: OwnTime
    ) -> None:
        """Sample for an episode; `clock` is the agent's, and stands while the model answers."""
        self._context, self._job, self._transcript, self._clock = context, job, transcript, clock
        self._policy = context.policy
        self._numbers = 0
        self.context_length = self._policy.context_length
        self.weights_version = self._policy.weights_version
        """When the episode began; each answer has its own."""
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Done with the first error of the model or a hook."""
        self.called = asyncio.Event()
        """Set by the first call."""

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
        """Return one answer. `key` is the session's, which is secret: the policy and its logs get the episode's id."""
        self.called.set()
        room = sampling.max_new_tokens
        number, self._numbers = self._numbers, self._numbers + 1
        self._transcript.live(AgentState.GENERATING, "")
        try:
            fields = {"task": self._job.task, "turn": number, "run": self._context.run}
            sampling = await self._context.hooks.sampling(sampling, **fields)
            sampling = replace(
                sampling, max_new_tokens=min(sampling.max_new_tokens, room)
            )  # a hook may ask for more
            with self._clock.pause():
                return await self._policy.generate(
                    self._slot(key), ids, sampling, group=self._job.group_id or ""
                )
        except Exception as error:
            if not self.failed.done():
                self.failed.set_result(error)
            raise

    async def release(self, key: str) -> None:
        await self._policy.release(self._slot(key))

    async def close(self) -> None:
        """Do nothing: the rollout's policy outlives the episode."""

    def _slot(self, key: str) -> str:
        _, mark, number = key.partition("#")
        return f"{self._transcript.episode.id}{mark}{number}"
