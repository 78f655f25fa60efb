"""A gateway over a scripted policy, served on a free port of this machine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli import Chat, Policy, ScriptedPolicy
from agentrl_cli.agents.gateway.app import Gateway, OneModel
from agentrl_cli.agents.gateway.http import listening
from agentrl_cli.agents.gateway.sampling import Limits
from agentrl_cli.agents.gateway.session import Session, Trace
from agentrl_cli.agents.gateway.sessions import Sessions
from agentrl_cli.errors import PolicyError
from agentrl_cli.types import Generation, Sampling
from tests.helpers.chat import CHAT

MODEL = "scripted"


class Held(ScriptedPolicy):
    """Answers, or fails, when it is let go; counts what it began and what was cancelled."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(lambda key, ids: f"Number {self.begun}.", CHAT.tokenizer)
        self.begun = self.cancelled = 0
        self.fails, self.open = fails, asyncio.Event()

    async def generate(self, *given: Any, **more: Any) -> Generation:
        self.begun += 1
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            raise PolicyError("The model could not generate.")
        return await super().generate(*given, **more)

    async def until(self, begun: int, cancelled: int = 0) -> None:
        """Wait until it has begun so many: a request is read in another thread first."""
        while self.begun < begun or self.cancelled < cancelled:
            await asyncio.sleep(0.001)


@dataclass
class World:
    gateway: Gateway
    policy: Policy
    traces: dict[str, Trace] = field(default_factory=dict)
    rewards: dict[str, float | None] = field(default_factory=dict)
    url: str = ""

    def base(self, key: str) -> str:
        return f"{self.url}/e/{key}/v1"

    async def end(self, key: str) -> Trace:
        return await self.gateway.sessions.end(key)


def session_of(replies: Any, key: str = "k", **limits: Any) -> Session:
    policy = (
        replies if isinstance(replies, ScriptedPolicy) else ScriptedPolicy(replies, CHAT.tokenizer)
    )
    return Session(
        key,
        CHAT,
        policy,
        Sampling(),
        Limits(**{"max_tokens": 32000, "max_new_tokens": 2000, **limits}),
    )


def world_of(
    replies: Any = ("Hello.",), *, policy: Policy | None = None, chat: Chat = CHAT, **more: Any
) -> World:
    """A gateway over given texts or a policy; `token` and `keep_alive` are the gateway's, the rest are limits."""
    policy = policy or ScriptedPolicy(replies, chat.tokenizer)
    given = {name: more.pop(name) for name in ("token", "keep_alive") if name in more}
    limits = Limits(**{"max_tokens": policy.context_length, "max_new_tokens": 2000, **more})

    def ended(session: Session, trace: Trace, reward: float | None) -> None:
        world.traces[session.key], world.rewards[session.key] = trace, reward

    sessions = Sessions(lambda key: Session(key, chat, policy, Sampling(), limits), ended)
    world = World(Gateway(sessions, OneModel(policy, MODEL), chat, **given), policy)
    return world


@contextlib.asynccontextmanager
async def served(world: World) -> AsyncIterator[World]:
    async with listening(world.gateway.app, "127.0.0.1", 0) as world.url:
        yield world
