"""A policy that repeats the answers of a stored episode, so that its agent can be run again up to any of its turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.protocols import Policy, generation
from agentrl_cli.types import Episode, Generation, Int32, Origin, Sampling, StopReason, Turn
from agentrl_cli.types.branches import path_to


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
            if self._edit is not None:
                return self._edited_turn(self._edit)
        return await self._policy.generate(key, ids, sampling, **more)

    def _edited_turn(self, ids: Sequence[int]) -> Generation:
        """Return a turn that no model sampled."""
        unknown, version = [np.nan] * len(ids), self.weights_version
        made = generation(ids, StopReason.STOP, weights_version=version, logps=unknown)
        return replace(made, forced=np.ones(len(ids), np.bool_))

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
