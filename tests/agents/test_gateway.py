"""The gateway over HTTP: dialects with their errors and streams, who is let in, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from agentrl_cli.agents.gateway.app import OneModel
from agentrl_cli.agents.gateway.sampling import Limits
from agentrl_cli.agents.gateway.session import Session
from agentrl_cli.agents.gateway.sessions import Sessions
from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.types import Generation, Sampling
from tests.helpers.chat import schema
from tests.helpers.gateway import CHAT, MODEL, World, call, served, world_of

ADD = schema("add", {"a": "number"})
HI = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI},
    "completions": {"prompt": "Hi."},
    "responses": {"input": "Hi."},
    "messages": {"messages": HI, "max_tokens": 50},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


async def post(world: World, path: str, body: Any, **more: Any) -> httpx2.Response:
    """Through the ASGI application, without a socket."""
    transport = httpx2.ASGITransport(app=world.gateway.app)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://test", timeout=None
    ) as client:
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await client.post(path, **given, **more)


def error_of(response: httpx2.Response, path: str) -> str:
    """The message of an error, which must have its dialect's form."""
    body = response.json()
    assert set(body) == ({"type", "error"} if path == "messages" else {"error"})
    kind = body["error"]["type"]
    assert kind.endswith("_error")
    assert path == "messages" or set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", BODIES)
async def test_every_dialect_answers_under_every_address(path: str) -> None:
    world = world_of(lambda key, ids: "Hello.")
    for base in (
        "/v1",
        "/e/a/v1",
        "/e/a",
        "/rollout/r/attempt/1/v1",
        "/proxy/rollout/r/attempt/2/mode/train/openai/v1",
    ):
        response = await post(world, f"{base}/{path}", {"model": MODEL, **BODIES[path]})
        assert response.status_code == 200 and "Hello." in response.text, response.text
    assert {"a", "r/1", "r/2"} < {session.key for session in world.gateway.sessions._open.values()}


@pytest.mark.parametrize("path", BODIES)
async def test_bad_requests_have_their_dialects_error(path: str) -> None:
    world = world_of(max_tokens=300)
    good = BODIES[path]
    long = {name: "word " * 200 if isinstance(good[name], str) else [{"role": "user", "content": "word " * 200}]
            for name in ("messages", "prompt", "input") if name in good}  # fmt: skip
    cases: list[tuple[Any, int, str]] = [
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b"[" * 200 + b"]" * 200, 400, "levels deep"),
        ({}, 400, "must be" if path != "messages" else "max_tokens"),
        ({**good, "model": "gpt-9"}, 404, "'gpt-9' is not" if path == "x" else "gpt-9"),
        ({**good, "temperature": "hot"}, 400, "temperature must be a number"),
        ({**good, "temperature": -1}, 400, "temperature -1"),
        ({**good, "top_p": 7}, 400, "top_p 7"),
        ({**good, **long}, 400, "maximum context length is 300"),
    ]
    if path != "completions":
        cases += [
            (
                {**good, "tools": [{"type": "web_search_20260101", "name": "w"}]},
                400,
                "web_search_20260101",
            ),
            (
                {
                    **good,
                    "tools": [
                        {"name": "f", "input_schema": {"type": 7}, "parameters": {"type": 7}}
                    ],
                },
                400,
                "JSON Schema",
            ),
            ({**good, "tools": "add"}, 400, "tools"),
            ({**good, "tool_choice": {"type": "tool", "name": "no"}}, 400, "'no'"),
        ]
    if path in ("chat/completions", "messages"):
        cases += [
            (
                {**good, "messages": [{"role": "user", "content": [IMAGE]}]},
                400,
                "Images are not served",
            ),
            (
                {**good, "messages": [{"role": "pope", "content": "x"}]},
                400,
                "role 'pope' is unknown",
            ),
            (
                {**good, "messages": [*HI, {"role": "assistant", "content": "x"}]},
                400,
                "nothing to answer",
            ),
        ]
    if path == "chat/completions":
        cases += [
            ({**good, "n": 2}, 400, "n = 2"),
            ({**good, "logit_bias": {"1": 2}}, 400, "logit_bias is not served"),
        ]
    for body, status, text in cases:
        response = await post(world, f"/e/a/v1/{path}", body)
        assert response.status_code == status and text in error_of(response, path), (
            body,
            response.text,
        )
        assert response.headers["x-should-retry"] == "false"
    assert all(not session.tree.nodes for session in world.gateway.sessions._open.values())
    await post(world, f"/e/b/v1/{path}", good)
    await post(world, "/e/b/end", {})
    late = await post(world, f"/e/b/v1/{path}", good)
    assert late.status_code == 409 and "has ended" in error_of(late, path)


async def test_a_reward_must_be_a_number() -> None:
    world = world_of()
    await post(world, "/e/a/v1/chat/completions", BODIES["chat/completions"])
    for wrong in ("1", True, [1]):
        response = await post(world, "/e/a/end", {"reward": wrong})
        assert response.status_code == 400 and "finite number" in response.text
    assert (
        await post(world, "/e/a/end", b'{"reward": NaN}')
    ).status_code == 400 and world.traces == {}
    done = await post(world, "/e/a/end", {"reward": 0.5})
    assert done.json() == {"turns": 2, "calls": 1, "forks": 0} and world.rewards == {"a": 0.5}
    assert (await post(world, "/e/nope/end", {})).status_code == 404


async def test_tool_choice_stop_and_parallel_calls() -> None:
    two = call("add", a=1) + "\n" + call("add", a=2)
    body = {"messages": HI, "tools": [ADD]}
    path = "/e/{}/v1/chat/completions"

    async def ask(reply: str, key: str, **more: Any) -> tuple[Any, World]:
        world = world_of([reply])
        response = await post(world, path.format(key), {**body, **more})
        return response.json()["choices"][0], world

    choice, _ = await ask(two, "a")
    assert len(choice["message"]["tool_calls"]) == 2 and choice["finish_reason"] == "tool_calls"
    choice, _ = await ask(two, "b", parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    choice, _ = await ask(two, "c", tool_choice="none")
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
    named = {"type": "function", "function": {"name": "add"}}
    choice, world = await ask(
        '": 1}}\n</tool_call>'.replace('": 1', '"a": 1').lstrip('"'), "d", tool_choice=named
    )
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    trace = await world.end("d")
    last = trace.tokens.slice(trace.turns[-1].start, trace.turns[-1].end)
    assert 0 < int(last.trained_mask.sum()) < len(last)  # the forced prefix is not trained


async def test_token_ids_and_log_probabilities() -> None:
    world = world_of(["Hi!"], policy=ScriptedPolicy(["Hi!"], CHAT.tokenizer, logp=-0.5))
    body = {"messages": HI, "return_token_ids": True, "logprobs": True, "top_logprobs": 2}
    found = (await post(world, "/v1/chat/completions", body)).json()
    choice = found["choices"][0]
    assert CHAT.decode(found["prompt_token_ids"]).endswith("<|im_start|>assistant\n")
    assert CHAT.decode(choice["token_ids"]) == "Hi!<|im_end|>"
    assert [(token["token"], token["logprob"]) for token in choice["logprobs"]["content"]][:2] == [
        ("H", -0.5),
        ("i", -0.5),
    ]
    text = (await post(world, "/v1/chat/completions", {**body, "stream": True})).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "prompt_token_ids" in chunks[0] and all(
        "prompt_token_ids" not in chunk for chunk in chunks[1:]
    )


async def test_streams_have_their_dialects_order() -> None:
    reply = "<think>Hm.</think>Wait.\n" + call("add", a=1)
    wanted = {
        "messages": (
            "message_start content_block_start content_block_delta content_block_delta content_block_stop"
            " content_block_start content_block_delta content_block_stop"
            " content_block_start content_block_delta content_block_stop message_delta message_stop"
        ),
        "responses": (
            "response.created response.in_progress"
            " response.output_item.added response.reasoning_text.delta response.reasoning_text.done"
            " response.output_item.done"
            " response.output_item.added response.content_part.added response.output_text.delta"
            " response.output_text.done response.content_part.done response.output_item.done"
            " response.output_item.added response.function_call_arguments.delta"
            " response.function_call_arguments.done response.output_item.done response.completed"
        ),
    }
    for path, kinds in wanted.items():
        tool = {"name": "add", "parameters": ADD["function"]["parameters"]}
        tool |= {"input_schema": tool["parameters"]} if path == "messages" else {"type": "function"}
        body = {**BODIES[path], "tools": [tool], "stream": True}
        text = (await post(world_of([reply]), f"/v1/{path}", body)).text
        assert [
            line[7:] for line in text.splitlines() if line.startswith("event: ")
        ] == kinds.split()


async def streamed(world: World, path: str, seen: asyncio.Event) -> str:
    """The text of a stream; `seen` is set with its first comment."""
    body = json.dumps({**BODIES[path], "stream": True}).encode()
    parts: list[str] = []
    inbox = asyncio.Queue[Any]()
    inbox.put_nowait({"type": "http.request", "body": body})

    async def send(message: Any) -> None:
        parts.append(message.get("body", b"").decode())
        if parts[-1].startswith(":"):
            seen.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/v1/{path}",
        "query_string": b"",
        "headers": [],
    }
    await world.gateway.app({**scope, "raw_path": b"", "root_path": ""}, inbox.get, send)
    return "".join(parts)


@pytest.mark.parametrize("path", BODIES)
async def test_a_slow_stream_is_kept_alive_and_a_late_error_is_an_event(path: str) -> None:
    class Held(ScriptedPolicy):
        """Answers, or fails, when it is let go."""

        def __init__(self, fails: bool) -> None:
            super().__init__(["Late."], CHAT.tokenizer)
            self.fails, self.open = fails, asyncio.Event()

        async def generate(self, *given: Any, **more: Any) -> Generation:
            await self.open.wait()
            if self.fails:
                raise PolicyError("The model could not generate.")
            return await super().generate(*given, **more)

    for fails, wanted in ((False, "Late."), (True, "could not generate")):
        policy = Held(fails)
        world = world_of(policy=policy, keep_alive=0.01)
        text = await streamed(world, path, policy.open)
        assert text.startswith(": keep-alive\n\n") and wanted in text
    whole = await post(world, f"/v1/{path}", BODIES[path])
    assert whole.status_code == 500 and "could not generate" in error_of(whole, path)


async def test_a_token_or_an_opened_key_lets_in() -> None:
    world = world_of(lambda key, ids: "x", token="secret")
    body = BODIES["chat/completions"]
    policy = world.policy
    world.gateway.sessions.open(Session("unguessable", CHAT, policy, Sampling(), Limits(1000, 100)))
    cases: list[tuple[str, dict[str, str], int]] = [
        ("/v1", {}, 401),
        ("/e/other/v1", {"Authorization": "Bearer wrong"}, 401),
        ("/v1", {"Authorization": "Bearer secret"}, 200),
        ("/v1", {"x-api-key": "secret"}, 200),
        ("/e/unguessable/v1", {"Authorization": "Bearer anything"}, 200),
        ("/v1", {"Authorization": "Bearer unguessable"}, 200),
    ]
    for base, headers, status in cases:
        response = await post(world, f"{base}/chat/completions", body, headers=headers)
        assert response.status_code == status, (base, headers)
    assert world.gateway.sessions.find("unguessable").calls == 2
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=world.gateway.app), base_url="http://test", timeout=None
    ) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/e/unguessable/v1/models")).json()["data"][0]["id"] == MODEL


async def test_an_episode_is_named_by_key_header_or_body() -> None:
    world = world_of(lambda key, ids: "x")
    body = BODIES["chat/completions"]
    for more, headers in (
        ({}, {"Authorization": "Bearer ep-1"}),
        ({}, {"X-Session-ID": "s-1"}),
        ({"session_id": "s-2"}, {}),
        ({"metadata": {"session_id": "s-3"}}, {}),
        ({"user": "u"}, {}),
    ):
        await post(world, "/v1/chat/completions", {**body, **more}, headers=headers)
    keys = set(world.gateway.sessions._open)
    assert keys == {"ep-1", "s-1", "s-2", "s-3", "u"}
    await post(world, "/v1/chat/completions", body)  # no key: a session for its first messages
    (trace,) = set(world.gateway.sessions._open) - keys
    assert trace.startswith("trace-")


async def test_a_training_opens_its_keys_itself() -> None:
    policy = ScriptedPolicy(lambda key, ids: "x", CHAT.tokenizer)
    world = world_of()
    world.gateway.sessions = Sessions()
    for path in ("/v1", "/e/unknown/v1"):
        response = await post(world, f"{path}/chat/completions", BODIES["chat/completions"])
        assert response.status_code == 404
    session = Session(
        "k", CHAT, policy, Sampling(temperature=1.0), Limits(1000, 100, client_sampling=False)
    )
    world.gateway.sessions.open(session)
    world.gateway.models = OneModel(policy, MODEL)
    assert (
        await post(world, "/e/k/v1/chat/completions", {"messages": HI, "temperature": 0})
    ).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_leaves_no_trace(stream: bool) -> None:
    class Held(ScriptedPolicy):
        """Never answers the first request."""

        begun, stopped = asyncio.Event(), asyncio.Event()

        async def generate(self, *given: Any, **more: Any) -> Generation:
            if self.begun.is_set():
                return await super().generate(*given, **more)
            self.begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.stopped.set()
            raise AssertionError

    policy = Held(lambda key, ids: "x", CHAT.tokenizer)
    async with (
        served(world_of(policy=policy, keep_alive=0.05)) as world,
        httpx2.AsyncClient(timeout=None) as client,
    ):
        url = f"{world.base('k')}/chat/completions"
        asked = asyncio.create_task(client.post(url, json={"messages": HI, "stream": stream}))
        await policy.begun.wait()
        await asyncio.sleep(0.1)  # a stream has begun by now
        asked.cancel()
        await policy.stopped.wait()
        assert (await client.post(url, json={"messages": HI})).status_code == 200
        trace = await world.end("k")
    assert trace.calls == 1 and len(trace.turns) == 2


async def test_a_request_of_claude_code_is_read() -> None:
    """System texts in several places, cache marks, thinking, results beside a text, and a session in the metadata."""
    world = world_of(["<think>Look.</think>" + call("add", a=1), "Done."])
    tools = [
        {
            "name": "add",
            "input_schema": ADD["function"]["parameters"],
            "cache_control": {"type": "ephemeral"},
        }
    ]
    marked = {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 500,
        "stream": True,
        "system": [{"type": "text", "text": "x-header: 1"}, marked],
        "thinking": {"type": "enabled", "budget_tokens": 200},
        "metadata": {"user_id": "user_1_session_2"},
        "tools": tools,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Note."}, {"type": "text", "text": "Go."}],
            },
            {"role": "system", "content": "Be careful."},
            {"role": "user", "content": "Now."},
        ],
    }
    text = (await post(world, "/v1/messages?beta=true", body)).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    use = next(
        e["content_block"] for e in events if e.get("content_block", {}).get("type") == "tool_use"
    )
    thinking = {"type": "thinking", "thinking": "Look.", "signature": "agentrl"}
    result = {
        "type": "tool_result",
        "tool_use_id": use["id"],
        "content": [{"type": "text", "text": "3"}],
    }
    body["messages"] += [
        {"role": "assistant", "content": [thinking, {**use, "input": {"a": 1}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "Reminder."}]},
    ]
    text = (await post(world, "/v1/messages?beta=true", body)).text
    assert "Done." in text and '"stop_reason": "end_turn"' in text
    trace = await world.end("user_1_session_2")
    roles = [turn.role for turn in trace.turns]
    assert roles == ["system", "user", "system", "user", "assistant", "tool", "user", "assistant"]
    assert trace.forks == 0 and events[0]["message"]["usage"]["input_tokens"] > 0
