"""Long requests: refused before they are rendered, read beside the event loop, and never read whole beyond a limit."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl_cli.agents.gateway.http import MAX_BODY, ROOM, body_limit
from agentrl_cli.agents.runners.remote import Board
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer, Offsets, Tokenizer, overlaps
from agentrl_cli.paths import bundled_model
from agentrl_cli.policies.scripted import ScriptedPolicy
from tests.helpers.gateway import CHAT, World, session_of, world_of

CONTEXT = 500


class Counting(ByteTokenizer):
    """Counts the characters that are tokenized, and in which threads. `at` is called before each text."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = 0
        self.threads: set[int] = set()
        self.at: Any = lambda: None

    def encode_offsets(
        self, text: str, plain: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], Offsets]:
        self.at()
        self.characters += len(text)
        self.threads.add(threading.get_ident())
        return super().encode_offsets(text, plain)


def counted(reply: str = "Hello.") -> tuple[World, Counting]:
    """A world whose tokenizer counts from here on."""
    tokenizer = Counting()
    chat = Chat(tokenizer)
    policy = ScriptedPolicy(lambda key, ids: reply, tokenizer, context_length=CONTEXT)
    world = world_of(policy=policy, chat=chat)
    tokenizer.characters = 0
    tokenizer.threads.clear()
    return world, tokenizer


async def send(
    app: Any, path: str, parts: Sequence[bytes], *, breaks: bool = False
) -> tuple[int, Any, int]:
    """Status and body of the answer, and how many parts of the request's body were read; with `breaks` the client
    goes away after them."""
    read = 0

    async def receive() -> Any:
        nonlocal read
        if read < len(parts):
            read += 1
            return {
                "type": "http.request",
                "body": parts[read - 1],
                "more_body": breaks or read < len(parts),
            }
        if not breaks:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def take(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
    }
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    await app({**scope, "query_string": b"", "headers": headers, "scheme": "http"}, receive, take)
    return (
        sent[0]["status"],
        json.loads(b"".join(m.get("body", b"") for m in sent[1:]) or b"null"),
        read,
    )


async def ask(world: World, path: str, body: Any) -> tuple[int, Any]:
    return (await send(world.gateway.app, path, [json.dumps(body).encode()]))[:2]


LONG: dict[str, Any] = {
    "chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "completions": lambda text: {"prompt": text},
    "responses": lambda text: {"input": text},
    "messages": lambda text: {"max_tokens": 9, "messages": [{"role": "user", "content": text}]},
    "messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
}


@pytest.mark.parametrize("path", LONG)
async def test_what_a_long_request_costs_does_not_grow_with_it(path: str) -> None:
    """A request beyond the context is refused with as much tokenized as the context has room for."""
    costs = []
    for times in (8, 32, 128):
        world, tokenizer = counted()
        status, answer = await ask(world, f"/e/a/v1/{path}", LONG[path]("a " * (CONTEXT * times)))
        assert status == 400 and f"maximum context length is {CONTEXT} tokens" in str(answer), (
            answer
        )
        costs.append(tokenizer.characters)
    assert max(costs) <= 2 * 2**14, costs


async def test_many_messages_and_long_tools_are_refused_before_they_are_rendered() -> None:
    hi = {"role": "user", "content": "a"}
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d " * 50_000, "parameters": {}},
    }
    turns = [{"role": role, "content": "b"} for role in ("user", "system")]
    for body, words in (
        ({"messages": [hi] * (CONTEXT + 1)}, "maximum context length"),
        ({"messages": turns * 40}, "the role changes"),
        ({"messages": [hi], "tools": [tool]}, "maximum context length"),
    ):
        world, tokenizer = counted()
        status, answer = await ask(world, "/e/a/v1/chat/completions", body)
        assert status == 400 and words in str(answer) and tokenizer.characters <= 2**14, answer


async def test_a_request_that_fits_is_answered_however_it_is_counted() -> None:
    """Texts with more characters per token than usual are counted, and let through if they fit."""
    world, tokenizer = counted()
    text = "<tool_response>" * 120  # one token each
    status, answer = await ask(world, "/e/a/v1/completions", {"prompt": text, "max_tokens": 5})
    assert status == 200 and answer["usage"]["prompt_tokens"] == 120, answer
    assert len(text) < CONTEXT * tokenizer.longest


async def test_requests_are_read_beside_the_event_loop() -> None:
    """`/health` answers while a request is tokenized."""
    world, tokenizer = counted()
    loop, reading, healthy = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    here = threading.get_ident()

    def hold() -> None:
        assert threading.get_ident() != here, "a request is tokenized in the event loop"
        loop.call_soon_threadsafe(reading.set)
        healthy.wait()

    tokenizer.at = hold
    asked = asyncio.create_task(
        ask(world, "/e/a/v1/chat/completions", LONG["chat/completions"]("Hi."))
    )
    held = asyncio.create_task(reading.wait())
    await asyncio.wait({asked, held}, return_when=asyncio.FIRST_COMPLETED)
    assert held.done() and await _health(world) == 200
    tokenizer.at = lambda: None
    healthy.set()
    assert (await asked)[0] == 200


async def _health(world: World) -> int:
    sent: list[Any] = []

    async def take(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/health",
        "raw_path": b"",
        "root_path": "",
        "headers": [],
    }
    await world.gateway.app({**scope, "query_string": b""}, receive, take)
    return int(sent[0]["status"])


async def test_answers_are_numbered_in_the_order_in_which_they_were_asked_for() -> None:
    """The seeds of an episode do not depend on how long its requests take to read."""
    seeds: dict[str, int] = {}

    class Seeds(ScriptedPolicy):
        async def generate(self, key: str, ids: Any, sampling: Any, **more: Any) -> Any:
            seeds[CHAT.decode(ids)[-40:]] = sampling.seed
            return await super().generate(key, ids, sampling, **more)

    def bodies() -> list[Any]:
        texts = ["a " * 5000, "b", "c " * 3000, "d"]
        return [LONG["chat/completions"](text) for text in texts]

    async def play() -> dict[str, int]:
        seeds.clear()
        world = world_of(policy=Seeds(lambda key, ids: "x", CHAT.tokenizer))
        await asyncio.gather(*(ask(world, "/e/a/v1/chat/completions", body) for body in bodies()))
        return dict(seeds)

    one = await play()
    assert len(one) == 4 and [await play() for _ in range(3)] == [one] * 3


async def test_no_body_is_read_beyond_its_limit() -> None:
    """A body over the limit is read a little further, for its client to see the answer, and never to its end."""
    world, _ = counted()
    session = session_of(["x"], "b")
    world.gateway.sessions.open(session)
    part = b" " * 2**16
    parts = [part] * 1000
    board = Board(world.gateway.app)
    most = body_limit(CONTEXT * world.gateway.chat.tokenizer.longest)
    for app, path, limit in (
        (world.gateway.app, "/e/a/end", ROOM),
        (board.app, "/tasks/claim", ROOM),
        (world.gateway.app, "/v1/chat/completions", most),
        (world.gateway.app, "/v1/messages/count_tokens", most),
        (
            world.gateway.app,
            "/e/b/v1/chat/completions",
            body_limit(32_000 * CHAT.tokenizer.longest),
        ),
    ):
        status, answer, read = await send(app, path, parts)
        assert status == 413 and str(limit) in answer["error"]["message"], (path, answer)
        assert read == MAX_BODY // len(part) + 1, path
        status, answer, _ = await send(app, path, parts[: limit // len(part) + 1])
        assert status == 413, (path, answer)
    assert session.refused is not None
    assert (session.refused.calls, session.refused.code) == (0, "context_length_exceeded")


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/e/a/v1/messages", "/e/a/end", "/v1/messages/count_tokens"]
)
async def test_a_client_that_goes_away_while_it_sends_is_no_failure(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_of()
    with caplog.at_level(logging.DEBUG):
        status, _, _ = await send(world.gateway.app, path, [b'{"messages": [{"role"'], breaks=True)
    assert status == 499 and not [
        record for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert len(world.gateway.sessions) == 0


def test_a_long_text_is_tokenized_like_a_short_one() -> None:
    """Long texts go another way through the tokenizer, so that other threads go on."""
    tokenizer = Tokenizer.load(bundled_model())
    line = "<|im_start|>user\nWhat is 17 * 3? <tool_call> é 漢\n"
    once, offsets = tokenizer.encode_offsets(line)
    times = 2**15 // len(line)
    ids, found = tokenizer.encode_offsets(line * times)
    assert ids == once * times
    assert found == [
        (start + n * len(line), end + n * len(line)) for n in range(times) for start, end in offsets
    ]
    assert tokenizer.longest >= max(
        len(tokenizer.token_text(id_)) for id_ in range(tokenizer.vocab_size)
    )


def test_overlaps() -> None:
    ranges = [(2, 4), (6, 6), (8, 10)]
    for start in range(12):
        for end in range(start + 1, 13):
            want = any(a < end and start < b for a, b in ranges)
            assert overlaps((start, end), ranges) is want, (start, end)
