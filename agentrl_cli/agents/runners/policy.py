"""Policies of an agent's episode: the rollout's as its session asks it, and one that repeats recorded answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl_cli.agents.emit import MODEL
from agentrl_cli.errors import PolicyError
from agentrl_cli.hooks.threads import OwnTime
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.policies.protocols import OnToken, Policy, generation
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.job import Job
from agentrl_cli.rollout.transcript import Transcript
from agentrl_cli.types import (
    AgentState,
    Episode,
    Generation,
    Int32,
    Origin,
    Sampling,
    StopReason,
    Turn,
)
from agentrl_cli.types.branches import path_to


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
            turn = waiting(f"the model, which samples turn {number}", self._transcript.episode.id)
            with self._clock.pause(), turn:
                return await self._policy.generate(
                    self._slot(key), ids, sampling, group=self._job.group_id or ""
                )
        except Exception as error:
            if not self.failed.done():
                self.failed.set_result(error)
            raise

    def frozen(self, policy: Policy) -> EpisodePolicy:
        """Return the same for another model, whose answers are context and never trained."""
        other = copy(self)
        other._policy, other.untrainable = policy, "its weights are frozen"
        other.context_length, other.weights_version = policy.context_length, policy.weights_version
        return other

    async def release(self, key: str) -> None:
        await self._policy.release(self._slot(key))

    async def close(self) -> None:
        """Do nothing: the rollout's policy outlives the episode."""

    def _slot(self, key: str) -> str:
        _, mark, number = key.partition("#")
        return f"{self._transcript.episode.id}{mark}{number}"


class RecordedPolicy:
    """Answers the contexts of an episode's model turns before turn `turn` as the model did there.

    Every other context is sampled by `policy`; that of `turn` itself gets `edit` if it is given. Without a policy a
    context that was not recorded gets the next recorded answer that was not given yet. Raises PolicyError if all were.
    """

    untrainable = "it repeats answers"

    def __init__(
        self,
        policy: Policy,
        episode: Episode,
        turn: int,
        *,
        edit: Sequence[int] | None = None,
        sample: bool = True,
    ) -> None:
        self._policy, self._sample, self._edit = policy, sample, edit
        self.name, self.context_length = policy.name, policy.context_length
        self.weights_version = policy.weights_version
        self.attempt = episode.sample
        self.reached = False
        """Whether the context of `turn` was asked for."""
        self._target: tuple[int, ...] | None = None
        self._left: list[tuple[tuple[int, ...], Generation]] = []
        for turn_made, context, answer in answers(episode):
            if turn_made.index < turn:
                self._left.append((context, answer))
            elif turn_made.index == turn:
                self._target = context

    async def generate(
        self, key: str, ids: Sequence[int] | Int32, sampling: Sampling, **more: Any
    ) -> Generation:
        """Return the recorded answer to this context, or a new one. Raises PolicyError."""
        context = tuple(int(id_) for id_ in ids)
        places = [n for n, (known, _) in enumerate(self._left) if known == context]
        if places or (self._left and not self._sample):
            return self._left.pop(places[0] if places else 0)[1]
        if not self._sample:
            raise PolicyError("The agent made more calls of its model than in the episode.")
        if context == self._target:
            self.reached = True
            if self._edit is not None:  # a turn that no model sampled
                unknown, version = [np.nan] * len(self._edit), self.weights_version
                made = generation(
                    self._edit, StopReason.STOP, weights_version=version, logps=unknown
                )
                return replace(made, forced=np.ones(len(self._edit), np.bool_))
        return await self._policy.generate(key, ids, sampling, **more)

    async def release(self, key: str) -> None:
        """Forget an episode."""
        await self._policy.release(key)

    async def close(self) -> None:
        """Do nothing: the policy behind this one is closed by its owner."""


def answers(episode: Episode) -> Iterator[tuple[Turn, tuple[int, ...], Generation]]:
    """Yield each turn that the model sampled, the ids that it continued, and its answer."""
    parents = episode.parents
    for turn in episode.turns:
        own = episode.tokens.slice(turn.start, turn.end)
        places = np.flatnonzero(own.origin == Origin.MODEL)
        if turn.role != "assistant" or not len(places):
            continue
        first, end = int(places[0]), int(places[-1]) + 1
        before = [
            episode.turns[index] for index in path_to(parents, turn.index) if index != turn.index
        ]
        context = [int(id_) for item in before for id_ in episode.tokens.ids[item.start : item.end]]
        sampled = own.slice(first, end)
        made = Generation(
            sampled.ids,
            sampled.logp_sampled,
            sampled.logp_policy,
            sampled.entropy,
            sampled.top_ids,
            sampled.top_logps,
            turn.stop_reason or StopReason.STOP,
            turn.weights_version,
            turn.seconds,
            forced=sampled.origin != Origin.MODEL,
            support=sampled.support,
        )
        yield turn, (*context, *(int(id_) for id_ in own.ids[:first])), made
