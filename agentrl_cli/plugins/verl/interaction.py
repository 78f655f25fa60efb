"""A verl `BaseInteraction` as a simulated user, unchanged: its four coroutines around one episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.envs.user_simulator import Maker, Reply, kwargs_of
from agentrl_cli.plugins.verl.stand_ins import wants_verl
from agentrl_cli.types import Message, Task


class VerlInteraction:
    """One instance of the class, for one episode."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self._id: str | None = None
        self._kwargs: dict[str, Any] = {}

    async def start(self, task: Task) -> None:
        self._kwargs = {key: value for key, value in kwargs_of(task).items() if key != "name"}
        self._id = await self.wrapped.start_interaction(None, **self._kwargs)

    async def reply(self, messages: Sequence[Message]) -> Reply:
        answer = await self.wrapped.generate_response(
            self._id, [dict(m) for m in messages], **self._kwargs
        )
        ends, text, score, *_ = answer
        return Reply(str(text) or None, float(score), bool(ends))

    async def stop(self) -> None:
        if self._id is not None:
            await self.wrapped.finalize_interaction(self._id)


def adapt_interaction(kind: type, config: Mapping[str, Any]) -> Maker | None:
    """Return a maker of an interaction for each episode; None if the class is not one of verl's."""
    made = lambda: VerlInteraction(kind(dict(config)))  # noqa: E731
    return made if wants_verl(kind, "generate_response") else None
