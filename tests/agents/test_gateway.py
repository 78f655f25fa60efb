"""The gateway over HTTP: dialects, errors, streams, who is let in, what is refused and at what cost, who goes away."""

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl_cli import Chat, ScriptedPolicy
from agentrl_cli.agents.gateway.http import MAX_BODY, ROOM, body_limit
from agentrl_cli.agents.runners.remote import Board
from agentrl_cli.agents.serve.server import open_server
from agentrl_cli.chat.tokenizer import ByteTokenizer, Offsets, Tokenizer, overlaps
from agentrl_cli.paths import bundled_model
from agentrl_cli.policies.remote.text import OpenAIPolicy
from tests.agents.test_model_server import ask as ask_server
from tests.agents.test_model_server import settings
from tests.helpers.chat import CHAT, call, schema
from tests.helpers.gateway import MODEL, Held, World, served, session_of, world_of
from tests.helpers.remote import server

ADD = schema("add", {"a": "number"})
HI = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI, "modalities": ["text"]},
    "completions": {"prompt": "Hi."},
    "responses": {"input": "Hi."},
    "messages": {"messages": HI, "max_tokens": 50},
}
FUNCTIONS = {"messages": HI, "functions": [ADD["function"]]}


async def request(world: World, method: str, path: str, **more: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=world.gateway.app)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://test", timeout=None
    ) as client:
        return await client.request(method, path, **more)


async def post(world: World, path: str, body: Any, **more: Any) -> httpx2.Response:
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    return await request(world, "POST", path, **given, **more)


def error_of(response: httpx2.Response, path: str) -> str:
    """The message of an error, which must have its dialect's form."""
    body = response.json()
    assert set(body) == ({"type", "error"} if path == "messages" else {"error"})
    assert body["error"]["type"].endswith("_error")
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
        ({**good, "temperature": 10**400}, 400, "temperature must be a number"),
        ({**good, "top_k": 10**20}, 400, "top_k must be a 64-bit integer"),
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
                {
                    **good,
                    "messages": [
                        {
                            "role": "user",
                            "content": [
                                {
                                    "type": "image_url",
                                    "image_url": {"url": "data:image/png;base64,AAAA"},
                                }
                            ],
                        }
                    ],
                },
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
    if path == "messages":
        formed = {"output_config": {"effort": "low"}, "output_format": {"type": "xml"}}
        cases += [({**good, **formed}, 400, "type 'xml' is not served")]
    if path == "completions":
        cases += [
            ({"prompt": [7, 10**12]}, 400, "token 1000000000000, and the tokenizer has"),
            ({"prompt": [7], "echo": True}, 400, "echo is served for a text"),
            ({**good, "echo": True, "logprobs": 0}, 400, "without logprobs"),
        ]
    if path == "chat/completions":
        cases += [
            ({**good, "n": 2}, 400, "n = 2"),
            ({**good, "logit_bias": {"1": 2}}, 400, "logit_bias is not served"),
            ({**good, "modalities": ["text", "audio"]}, 400, "modalities text alone"),
            ({**good, "modalities": ["audio"]}, 400, "modalities text alone"),
            ({**good, "audio": {"voice": "alloy"}}, 400, "audio is not served"),
            ({**good, "web_search_options": {}}, 400, "web_search_options is not served"),
            ({**good, "prediction": {"type": "content"}}, 400, "prediction is not served"),
            ({**FUNCTIONS, "function_call": {"name": "sub"}}, 400, "function_call names 'sub'"),
            ({**FUNCTIONS, "tools": [ADD]}, 400, "tools or functions"),
            ({**FUNCTIONS, "functions": "add"}, 400, "functions must be a list"),
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
    for wrong in (b'{"reward": NaN}', *({"reward": value} for value in ("1", True, [1], 10**400))):
        response = await post(world, "/e/a/end", wrong)
        assert response.status_code == 400 and world.traces == {}
    done = await post(world, "/e/a/end", {"reward": 0.5})
    assert done.json() == {"turns": 2, "calls": 1, "forks": 0} and world.rewards == {"a": 0.5}
    assert (await post(world, "/e/nope/end", {})).status_code == 404


@pytest.mark.parametrize(
    ("more", "calls", "finish"),
    [
        ({"tools": [ADD]}, 2, "tool_calls"),
        ({"tools": [ADD], "parallel_tool_calls": False}, 1, "tool_calls"),
        ({"tools": [ADD], "tool_choice": "none"}, 0, "stop"),
        ({**FUNCTIONS, "function_call": "none"}, 0, "stop"),
    ],
)
async def test_tool_choice_stop_and_parallel_calls(
    more: dict[str, Any], calls: int, finish: str
) -> None:
    world = world_of([call("add", a=1) + "\n" + call("add", a=2)])
    found = await post(world, "/v1/chat/completions", {"messages": HI, **more})
    (choice,) = found.json()["choices"]
    assert len(choice["message"].get("tool_calls", ())) == calls
    assert choice["finish_reason"] == finish and "function_call" not in choice["message"]


@pytest.mark.parametrize(
    "forced",
    [
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"functions": [ADD["function"]], "function_call": {"name": "add"}},
    ],
)
async def test_a_call_that_is_forced_is_trained_but_for_its_beginning(
    forced: dict[str, Any],
) -> None:
    world = world_of(['{"a": 1}}\n</tool_call>'])
    found = await post(world, "/e/a/v1/chat/completions", {"messages": HI, **forced})
    said = found.json()["choices"][0]["message"]
    made = said.get("function_call") or said["tool_calls"][0]["function"]
    assert made == {"name": "add", "arguments": '{"a": 1}'}
    trace = await world.end("a")
    last = trace.tokens.slice(trace.turns[-1].start, trace.turns[-1].end)
    assert 0 < int(last.trained_mask.sum()) < len(last)


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ({"tools": [ADD]}, None),
        ({"tools": [ADD], "tool_choice": "none"}, "none"),
        ({"tools": [ADD], "tool_choice": "required"}, "required"),
        ({"functions": [ADD["function"]], "function_call": {"name": "add"}}, "add"),
    ],
)
async def test_an_endpoint_that_is_sent_messages_gets_the_choice_of_a_tool(
    more: dict[str, Any], sent: str | None
) -> None:
    asked: list[dict[str, Any]] = []
    made = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        calls = {} if body.get("tool_choice") == "none" else {"tool_calls": [made]}
        message = {"content": "Well.", **calls}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}

    async with server(handler) as url:
        policy = OpenAIPolicy(url, "m", CHAT, mode="chat")
        world = world_of(policy=policy)
        found = await post(world, "/v1/chat/completions", {"messages": HI, **more})
        await policy.close()
    named = {"type": "function", "function": {"name": sent}}
    assert asked[0].get("tool_choice") == (named if sent == "add" else sent)
    said = found.json()["choices"][0]["message"]
    calls = [one["function"] for one in said.get("tool_calls", [])]
    calls += [said["function_call"]] if "function_call" in said else []
    assert (said["content"], calls) == ("Well.", [] if sent == "none" else [made["function"]])


async def test_token_ids_and_log_probabilities() -> None:
    world = world_of(["Hi!"], policy=ScriptedPolicy(["Hi!"], CHAT.tokenizer, logp=-0.5))
    body = {"messages": HI, "return_token_ids": True, "logprobs": True, "top_logprobs": 2}
    found = (await post(world, "/v1/chat/completions", body)).json()
    choice = found["choices"][0]
    assert CHAT.decode(found["prompt_token_ids"]).endswith("<|im_start|>assistant\n")
    assert CHAT.decode(choice["token_ids"]) == "Hi!<|im_end|>"
    said = [(token["token"], token["logprob"]) for token in choice["logprobs"]["content"]]
    assert said[:2] == [("H", -0.5), ("i", -0.5)]
    parts = world_of(["漢"])  # a character of three tokens
    found = (await post(parts, "/v1/chat/completions", body)).json()["choices"][0]["logprobs"]
    spelled = b"".join(bytes(token["bytes"]) for token in found["content"])
    assert spelled.decode() == "漢<|im_end|>"
    chunks = data_of(await post(world, "/v1/chat/completions", {**body, "stream": True}))
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


def data_of(response: httpx2.Response) -> list[Any]:
    """What a stream of server-sent events holds."""
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        (
            "messages",
            "message_start content_block_start content_block_delta content_block_delta content_block_stop"
            " content_block_start content_block_delta content_block_stop"
            " content_block_start content_block_delta content_block_stop message_delta message_stop",
        ),
        (
            "responses",
            "response.created response.in_progress"
            " response.output_item.added response.reasoning_text.delta response.reasoning_text.done"
            " response.output_item.done"
            " response.output_item.added response.content_part.added response.output_text.delta"
            " response.output_text.done response.content_part.done response.output_item.done"
            " response.output_item.added response.function_call_arguments.delta"
            " response.function_call_arguments.done response.output_item.done response.completed",
        ),
    ],
)
async def test_streams_have_their_dialects_order(path: str, kinds: str) -> None:
    tool = {"name": "add", "parameters": ADD["function"]["parameters"]}
    tool |= {"input_schema": tool["parameters"]} if path == "messages" else {"type": "function"}
    world = world_of(["<think>Hm.</think>Wait.\n" + call("add", a=1)])
    text = (
        await post(world, f"/v1/{path}", {**BODIES[path], "tools": [tool], "stream": True})
    ).text
    found = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert found == kinds.split()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("fails", "wanted"), [(False, "Number 1."), (True, "could not generate")])
async def test_a_slow_stream_is_kept_alive_and_a_late_error_is_an_event(
    path: str, fails: bool, wanted: str
) -> None:
    policy = Held(fails=fails)
    world = world_of(policy=policy, keep_alive=0.01)

    def go_on(part: str) -> None:
        if part.startswith(":"):
            policy.open.set()

    body = json.dumps({**BODIES[path], "stream": True}).encode()
    _, text, _ = await send(world.gateway.app, f"/v1/{path}", [body], each=go_on)
    assert text.startswith(": keep-alive\n\n") and wanted in text
    whole = await post(world, f"/v1/{path}", BODIES[path])
    assert whole.status_code == (500 if fails else 200)
    assert not fails or wanted in error_of(whole, path)


async def test_a_token_or_an_opened_key_lets_in() -> None:
    world, path = world_of(lambda key, ids: "x", token="secret"), "chat/completions"
    world.gateway.sessions.open(session_of(world.policy, "unguessable"))
    cases: list[tuple[str, dict[str, str], int]] = [
        ("/v1", {}, 401),
        ("/e/other/v1", {"Authorization": "Bearer wrong"}, 401),
        ("/v1", {"Authorization": "Bearer secret"}, 200),
        ("/v1", {"x-api-key": "secret"}, 200),
        ("/e/unguessable/v1", {"Authorization": "Bearer anything"}, 200),
        ("/v1", {"Authorization": "Bearer unguessable"}, 200),
    ]
    for base, headers, status in cases:
        response = await post(world, f"{base}/{path}", BODIES[path], headers=headers)
        assert response.status_code == status, (base, headers)
    assert world.gateway.sessions.find("unguessable").calls == 2
    assert (await request(world, "GET", "/v1/models")).status_code == 401
    listed = await request(world, "GET", "/e/unguessable/v1/models")
    assert listed.json()["data"][0]["id"] == MODEL


async def test_an_episode_is_named_by_key_header_or_body() -> None:
    world, body = world_of(lambda key, ids: "x"), BODIES["chat/completions"]
    named: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "ep-1": ({}, {"Authorization": "Bearer ep-1"}),
        "s-1": ({}, {"X-Session-ID": "s-1"}),
        "s-2": ({"session_id": "s-2"}, {}),
        "s-3": ({"metadata": {"session_id": "s-3"}}, {}),
        "u": ({"user": "u"}, {}),
        "trace-": ({}, {}),  # no key: a session for its first messages
    }
    for more, headers in named.values():
        await post(world, "/v1/chat/completions", {**body, **more}, headers=headers)
    found = list(world.gateway.sessions._open)
    assert [*found[:-1], found[-1][:6]] == list(named)


async def test_a_call_of_the_local_shell_is_a_call_with_its_answer() -> None:
    world, action = world_of(["Two files."]), {"type": "exec", "command": ["ls"], "env": {}}
    items = [
        {"role": "user", "content": "What is here?"},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "action": action},
        {"type": "local_shell_call_output", "id": "c1", "output": "a b"},
    ]
    found = await post(world, "/e/a/v1/responses", {"input": items})
    assert found.status_code == 200, found.text
    _, said, answered, _ = (await world.end("a")).turns
    [made] = said.messages[0]["tool_calls"]
    assert made["function"] == {"name": "local_shell", "arguments": action}
    answer = answered.messages[0]
    assert [answer[name] for name in ("role", "content", "name")] == ["tool", "a b", "local_shell"]


async def test_instructions_are_those_of_the_request_alone() -> None:
    world, more = world_of(lambda key, ids: "x"), dict[str, Any]()
    for text in ("Be brief.", "Be brief.", "Be long."):
        body = {"input": "Hi.", "instructions": text, **more}
        found = (await post(world, "/e/a/v1/responses", body)).json()
        more = {"previous_response_id": found["id"]}
    trace = await world.end("a")
    roles, texts = zip(
        *((turn.role, turn.messages[0]["content"]) for turn in trace.turns), strict=True
    )
    assert roles[:6] == ("system", "user", "assistant", "user", "assistant", "system")
    assert texts.count("Be brief.") == texts.count("Be long.") == trace.forks == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_leaves_no_trace(stream: bool) -> None:
    policy = Held()
    async with (
        served(world_of(policy=policy, keep_alive=0.05)) as world,
        httpx2.AsyncClient(timeout=None) as client,
    ):
        url = f"{world.base('k')}/chat/completions"
        asked = asyncio.create_task(client.post(url, json={"messages": HI, "stream": stream}))
        await policy.until(1)
        await asyncio.sleep(0.1)  # a stream has begun by now
        asked.cancel()
        await policy.until(1, cancelled=1)
        policy.open.set()
        assert (await client.post(url, json={"messages": HI})).status_code == 200
        trace = await world.end("k")
    assert trace.calls == 1 and len(trace.turns) == 2


async def test_a_request_of_claude_code_is_read() -> None:
    world = world_of(["<think>Look.</think>" + call("add", a=1), "Done."])
    marked = {"cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 500,
        "stream": True,
        "system": [text("x-header: 1"), {**text("You are an agent."), **marked}],
        "thinking": {"type": "enabled", "budget_tokens": 200},
        "metadata": {"user_id": "user_1_session_2"},
        "tools": [{"name": "add", "input_schema": ADD["function"]["parameters"], **marked}],
        "messages": [
            {"role": "user", "content": [text("Note."), text("Go.")]},
            {"role": "system", "content": "Be careful."},
            {"role": "user", "content": "Now."},
        ],
    }
    events = data_of(await post(world, "/v1/messages?beta=true", body))
    blocks = [event["content_block"] for event in events if "content_block" in event]
    use = next(block for block in blocks if block["type"] == "tool_use")
    thinking = {"type": "thinking", "thinking": "Look.", "signature": "agentrl"}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [text("3")]}
    body["messages"] += [
        {"role": "assistant", "content": [thinking, {**use, "input": {"a": 1}}]},
        {"role": "user", "content": [result, text("Reminder.")]},
    ]
    last = (await post(world, "/v1/messages?beta=true", body)).text
    assert "Done." in last and '"stop_reason": "end_turn"' in last
    trace = await world.end("user_1_session_2")
    roles = "system user system user assistant tool user assistant"
    assert " ".join(turn.role for turn in trace.turns) == roles and trace.forks == 0
    assert events[0]["message"]["usage"]["input_tokens"] > 0


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


@pytest.mark.parametrize("base", ["/v1", "/e/a/v1"])
async def test_a_route_or_a_method_that_is_not_served_is_named_in_json(base: str) -> None:
    world = world_of()
    for path in BODIES:
        response = await request(world, "GET", f"{base}/{path}")
        assert response.status_code == 405 and response.headers["allow"] == "POST"
        assert error_of(response, path) == f"GET is not served at {base}/{path}; POST is."
    unserved = "embeddings images/generations audio/speech files batches moderations".split()
    gets = [("GET", "files"), ("GET", "responses/resp_1")]
    for method, path in [*(("POST", path) for path in unserved), *gets]:
        response = await request(world, method, f"{base}/{path}")
        assert f"{method} {base}/{path} is not served" in error_of(response, "")
        assert response.status_code == 404 and response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["type"] == "not_found_error"
    for method, path, said in (
        ("GET", "/", "chat/completions, completions, responses, messages, models"),
        ("DELETE", f"{base}/responses/resp_1", "previous_response_id"),
    ):
        assert said in (await request(world, method, path)).text
    unknown = {"input": "Hi.", "previous_response_id": "resp_nope"}
    response = await post(world, f"{base}/responses", unknown)
    assert response.status_code == 404 and "'resp_nope'" in response.text, "as it was sent"


async def test_functions_are_served_at_both_ends() -> None:
    two = f"Let me see.\n{call('add', a=1)}\n{call('add', a=2)}"
    world = world_of([two, "Three.", call("add", a=1)])
    body: dict[str, Any] = {**FUNCTIONS, "function_call": "auto"}
    made, path = {"name": "add", "arguments": '{"a": 1}'}, "/v1/chat/completions"
    choice = (await post(world, f"/e/a{path}", body)).json()["choices"][0]
    said = choice["message"]
    assert (choice["finish_reason"], said["function_call"]) == ("function_call", made)
    assert "tool_calls" not in said
    result = {"role": "function", "name": "add", "content": "3"}
    again = await post(world, f"/e/a{path}", {**body, "messages": [*HI, said, result]})
    choice = again.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Three.", "stop")
    streamed = data_of(await post(world, f"/e/b{path}", {**body, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert [one for one in deltas if "function_call" in one] == [{"function_call": made}]
    assert streamed[-1]["choices"][0]["finish_reason"] == "function_call"
    trace = await world.end("a")
    assert [turn.role for turn in trace.turns] == ["user", "assistant", "tool", "assistant"]
    assert trace.forks == 0


@pytest.mark.parametrize(("aliases", "wrong"), [(("gpt-4.1-mini", "claude"), 404), (("*",), 200)])
async def test_a_server_answers_to_the_names_that_agents_have_built_in(
    tmp_path: Path, model: Path, aliases: tuple[str, ...], wrong: int
) -> None:
    body, db = {"messages": HI, "max_tokens": 4}, tmp_path / "a.db"
    async with open_server(settings(model), base=tmp_path, db=db, aliases=aliases) as server:
        cards = (await ask_server(server, "/v1/models", None, "GET")).json()["data"]
        listed = [card["id"] for card in cards]
        assert listed == [str(model), *(alias for alias in aliases if alias != "*")]
        for name, status in ((str(model), 200), ("gpt-4.1-mini", 200), ("other", wrong)):
            response = await ask_server(server, "/v1/chat/completions", {**body, "model": name})
            assert response.status_code == status, response.text
            assert status != 200 or response.json()["model"] == name
            shown = await ask_server(server, f"/v1/models/{name}", None, "GET")
            assert shown.status_code == status
        refused = await ask_server(server, f"/v1/models/{listed[-1]}", None, "DELETE")
        assert refused.status_code == 400 and "the model itself" in refused.text


CONTEXT = 500


class Counting(ByteTokenizer):
    """Counts the characters that are tokenized. `at` is called before each text."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = 0
        self.at: Any = lambda: None

    def encode_offsets(
        self, text: str, plain: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], Offsets]:
        self.at()
        self.characters += len(text)
        return super().encode_offsets(text, plain)


def counted(reply: str = "Hello.") -> tuple[World, Counting]:
    tokenizer = Counting()
    policy = ScriptedPolicy(lambda key, ids: reply, tokenizer, context_length=CONTEXT)
    world = world_of(policy=policy, chat=Chat(tokenizer))
    tokenizer.characters = 0
    return world, tokenizer


async def send(
    app: Any,
    path: str,
    parts: Sequence[bytes],
    *,
    breaks: bool = False,
    each: Callable[[str], None] = lambda part: None,
) -> tuple[int, str, int]:
    """Status and body of the answer, and how many parts of the request's body were read; with `breaks` the client
    goes away after them. `each` is given every part of the answer as it comes."""
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
        each(message.get("body", b"").decode())

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
    }
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    await app({**scope, "query_string": b"", "headers": headers, "scheme": "http"}, receive, take)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent).decode(), read


async def ask(world: World, path: str, body: Any) -> tuple[int, Any]:
    status, text, _ = await send(world.gateway.app, path, [json.dumps(body).encode()])
    return status, json.loads(text)


LONG: dict[str, Any] = {
    "chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "completions": lambda text: {"prompt": text},
    "responses": lambda text: {"input": text},
    "messages": lambda text: {"max_tokens": 9, "messages": [{"role": "user", "content": text}]},
    "messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
}


@pytest.mark.parametrize("path", LONG)
async def test_what_a_long_request_costs_does_not_grow_with_it(path: str) -> None:
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
    long = {"name": "f", "description": "d " * 50_000, "parameters": {}}
    turns = [{"role": role, "content": "b"} for role in ("user", "system")]
    for body, words in (
        ({"messages": [hi] * (CONTEXT + 1)}, "maximum context length"),
        ({"messages": turns * 40}, "the role changes"),
        ({"messages": [hi], "functions": [long]}, "maximum context length"),
    ):
        world, tokenizer = counted()
        status, answer = await ask(world, "/e/a/v1/chat/completions", body)
        assert status == 400 and words in str(answer) and tokenizer.characters <= 2**14, answer


async def test_a_request_that_fits_is_answered_however_it_is_counted() -> None:
    world, tokenizer = counted()
    text = "<tool_response>" * 120  # one token each
    status, answer = await ask(world, "/e/a/v1/completions", {"prompt": text, "max_tokens": 5})
    assert status == 200 and answer["usage"]["prompt_tokens"] == 120, answer
    assert len(text) < CONTEXT * tokenizer.longest


async def test_requests_are_read_beside_the_event_loop() -> None:
    world, tokenizer = counted()
    loop, reading, healthy = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    here = threading.get_ident()

    def hold() -> None:
        assert threading.get_ident() != here, "a request is tokenized in the event loop"
        loop.call_soon_threadsafe(reading.set)
        healthy.wait()

    tokenizer.at, body = hold, LONG["chat/completions"]("Hi.")
    asked = asyncio.create_task(ask(world, "/e/a/v1/chat/completions", body))
    held = asyncio.create_task(reading.wait())
    await asyncio.wait({asked, held}, return_when=asyncio.FIRST_COMPLETED)
    assert held.done() and (await request(world, "GET", "/health")).is_success
    tokenizer.at = lambda: None
    healthy.set()
    assert (await asked)[0] == 200


async def test_answers_are_numbered_in_the_order_in_which_they_were_asked_for() -> None:
    class Seeds(ScriptedPolicy):
        async def generate(self, key: str, ids: Any, sampling: Any, **more: Any) -> Any:
            seeds[CHAT.decode(ids)[-40:]] = sampling.seed
            return await super().generate(key, ids, sampling, **more)

    bodies = [LONG["chat/completions"](said) for said in ("a " * 5000, "b", "c " * 3000, "d")]
    found = []
    for _ in range(3):
        seeds: dict[str, int] = {}
        world = world_of(policy=Seeds(lambda key, ids: "x", CHAT.tokenizer))
        await asyncio.gather(*(ask(world, "/e/a/v1/chat/completions", body) for body in bodies))
        found.append(seeds)
    assert len(found[0]) == 4 and found == [found[0]] * 3


async def test_no_body_is_read_beyond_its_limit() -> None:
    world, _ = counted()
    app, session, part = world.gateway.app, session_of(["x"], "b"), b" " * 2**16
    world.gateway.sessions.open(session)
    most = body_limit(CONTEXT * world.gateway.chat.tokenizer.longest)
    for place, path, limit in (
        (app, "/e/a/end", ROOM),
        (Board(app).app, "/tasks/claim", ROOM),
        (app, "/v1/chat/completions", most),
        (app, "/v1/messages/count_tokens", most),
        (app, "/e/b/v1/chat/completions", body_limit(32_000 * CHAT.tokenizer.longest)),
    ):
        status, answer, read = await send(place, path, [part] * 1000)
        assert status == 413 and str(limit) in answer, (path, answer)
        assert read == MAX_BODY // len(part) + 1, path
        status, answer, _ = await send(place, path, [part] * (limit // len(part) + 1))
        assert status == 413, (path, answer)
    refused: Any = session.refused
    assert (refused.calls, refused.code) == (0, "context_length_exceeded")


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/e/a/v1/messages", "/e/a/end", "/v1/messages/count_tokens"]
)
async def test_a_client_that_goes_away_while_it_sends_is_no_failure(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_of()
    with caplog.at_level(logging.WARNING):
        status, _, _ = await send(world.gateway.app, path, [b'{"messages": [{"role"'], breaks=True)
    assert (status, caplog.records, len(world.gateway.sessions)) == (499, [], 0)


def test_a_long_text_is_tokenized_like_a_short_one() -> None:
    tokenizer = Tokenizer.load(bundled_model())
    line = "<|im_start|>user\nWhat is 17 * 3? <tool_call> é 漢\n"
    once, offsets = tokenizer.encode_offsets(line)
    places = range(0, 2**15 - len(line), len(line))
    ids, found = tokenizer.encode_offsets(line * len(places))
    assert ids == once * len(places)
    assert found == [(start + at, end + at) for at in places for start, end in offsets]
    assert b"".join(map(tokenizer.token_bytes, once)).decode() == line
    texts = map(tokenizer.token_text, range(tokenizer.vocab_size))
    assert tokenizer.longest >= max(map(len, texts))


@pytest.mark.parametrize(("start", "end"), [*itertools.combinations(range(13), 2)])
def test_overlaps(start: int, end: int) -> None:
    ranges = [(2, 4), (6, 6), (8, 10)]
    assert overlaps((start, end), ranges) is any(a < end and start < b for a, b in ranges)
