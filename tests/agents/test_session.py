"""A session over time: retries, equal requests, clients that leave, and the end of the episode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl_cli.agents.gateway.dialects import chat
from agentrl_cli.agents.gateway.request import ModelRequest, RequestError
from agentrl_cli.agents.gateway.session import Session
from agentrl_cli.agents.gateway.sessions import Sessions
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.types import Generation
from tests.helpers.gateway import CHAT, session_of

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi."}]}


def ask(**more: Any) -> ModelRequest:
    return chat.parse({**BODY, **more})


class Slow(ScriptedPolicy):
    """Answers when it is let go; counts what it began and what was cancelled."""

    def __init__(self) -> None:
        super().__init__(lambda key, ids: f"Number {self.begun}.", CHAT.tokenizer)
        self.begun = self.cancelled = 0
        self.open = asyncio.Event()

    async def generate(self, *given: Any, **more: Any) -> Generation:
        self.begun += 1
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(*given, **more)

    async def until(self, begun: int) -> None:
        """Wait until it has begun so many: a request is read in another thread first."""
        while self.begun < begun:
            await asyncio.sleep(0.001)


async def test_a_retry_is_answered_from_what_is_stored() -> None:
    session = session_of(lambda key, ids: "Once.")
    first = await session.complete(ask())
    assert await session.complete(ask(), retry=True) is first
    fresh = await session.complete(ask())  # the same body without being a retry is a new turn
    assert fresh is not first and session.replayed == 1
    assert (await session.seal()).calls == 2


async def test_equal_requests_in_flight_are_one() -> None:
    policy = Slow()
    session = session_of(policy)
    both = [asyncio.create_task(session.complete(ask())) for _ in range(2)]
    others = [
        asyncio.create_task(session.complete(ask(**own))) for own in ({"seed": 1}, {"seed": 2})
    ]
    await policy.until(3)
    both[0].cancel()  # one of two clients leaves: the other still gets its answer
    await asyncio.sleep(0.01)
    policy.open.set()
    reply = await both[1]
    drawn = [(await other).choices[0].generation for other in others]
    assert len(session.tree.turns) == 1 + 3 and [len(one.ids) > 0 for one in drawn] == [True] * 2
    assert (
        policy.begun == 3 and policy.cancelled == 0 and reply.choices[0].text.startswith("Number")
    )


async def test_sampling_stops_when_the_last_client_leaves() -> None:
    policy = Slow()
    session = session_of(policy)
    both = [asyncio.create_task(session.complete(ask())) for _ in range(2)]
    await policy.until(1)
    for task in both:
        task.cancel()
    await asyncio.sleep(0)
    again = asyncio.create_task(
        session.complete(ask(), retry=True)
    )  # it must not join what is being cancelled
    await asyncio.wait(both)
    await policy.until(2)
    assert (policy.begun, policy.cancelled) == (2, 1) and session.tree.nodes == []
    policy.open.set()
    await again
    assert (await session.seal()).calls == 1


async def test_after_the_end_every_call_is_refused_even_one_in_flight() -> None:
    policy = Slow()
    sessions = Sessions(lambda key: session_of(policy, key))
    flying = asyncio.create_task(sessions.find("a").complete(ask()))
    await policy.until(1)
    trace = await sessions.end("a")
    with pytest.raises(RequestError) as error:
        await flying
    assert error.value.status == 409 and trace.turns == () and policy.cancelled == 1
    for refused in (sessions.find, lambda key: sessions.open(session_of(policy, key))):
        with pytest.raises(RequestError) as error:
            refused("a")
        assert error.value.status == 409
    with pytest.raises(RequestError):
        await sessions.end("a")


async def test_idle_sessions_end_and_only_so_many_are_open() -> None:
    ended: list[str] = []
    made: dict[str, Session] = {}

    def make(key: str) -> Session:
        made[key] = session_of(["x"], key)
        return made[key]

    sessions = Sessions(make, lambda session, trace, reward: ended.append(session.key), most=2)
    sessions.find("a")
    sessions.find("b")
    with pytest.raises(RequestError) as error:
        sessions.find("c")
    assert error.value.status == 429
    made["a"].used -= 100
    assert await sessions.sweep(50) == 1 and ended == ["a"] and len(sessions) == 1
    sessions.find("c")
    await sessions.close()
    assert sorted(ended) == ["a", "b", "c"] and len(sessions) == 0


async def test_slots_of_parallel_requests_are_released() -> None:
    keys: set[str] = set()
    together = asyncio.Barrier(3)

    class Watched(ScriptedPolicy):
        async def generate(self, key: str, *given: Any, **more: Any) -> Generation:
            keys.add(key)
            if len(session.tree.nodes) == 0:  # the first three
                await together.wait()
            return await super().generate(key, *given, **more)

        async def release(self, key: str) -> None:
            keys.discard(key)
            await super().release(key)

    session = session_of(Watched(lambda key, ids: "x", CHAT.tokenizer))
    await asyncio.gather(*(session.complete(ask(user=str(n))) for n in range(3)))
    await session.complete(ask())
    assert keys == {"k", "k#1", "k#2"}
    await session.seal()
    assert keys == set()


async def test_what_a_server_without_token_ids_says_is_context() -> None:
    class Upstream(ScriptedPolicy):
        """Renders the messages itself; its ids are guessed from its text."""

        untrainable = "its token ids are guessed"
        seen: list[Any]

        def observe(self, key: str, messages: Any, tools: Any = ()) -> None:
            self.seen = list(messages)

    policy = Upstream(["Hello."], CHAT.tokenizer)
    session = session_of(policy)
    await session.complete(ask())
    trace = await session.seal()
    assert policy.seen == [{"role": "user", "content": "Hi."}]
    assert trace.calls == 1 and not trace.tokens.trained_mask.any()


async def test_calls_in_another_syntax_are_named() -> None:
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    session = session_of(['[TOOL_CALLS][{"name": "add", "arguments": {}}]'])
    reply = await session.complete(ask(tools=[tool]))
    assert reply.choices[0].finish == "stop" and (await session.seal()).foreign == "mistral"
