"""What the gateway does not serve is refused by its name, and `functions`, the form before `tools`, is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl_cli.agents.serve.server import open_server
from tests.agents.test_gateway import BODIES, HI, error_of, post
from tests.agents.test_model_server import ask, settings
from tests.helpers.chat import schema
from tests.helpers.gateway import MODEL, World, call, world_of
from tests.helpers.train import write_model

ADD = schema("add", {"a": "number"})["function"]


async def asked(world: World, method: str, path: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=world.gateway.app)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://test", timeout=None
    ) as client:
        return await client.request(method, path)


@pytest.mark.parametrize("base", ["/v1", "/e/a/v1"])
async def test_a_route_that_is_not_served_is_named_in_json(base: str) -> None:
    world = world_of()
    unserved = "embeddings images/generations audio/speech files batches moderations".split()
    for method, path in [
        *(("POST", path) for path in unserved),
        ("GET", "files"),
        ("GET", "responses/resp_1"),
    ]:
        response = await asked(world, method, f"{base}/{path}")
        assert response.status_code == 404 and f"{method} {base}/{path} is not served" in error_of(
            response, ""
        )
        assert response.json()["error"]["type"] == "not_found_error"
        assert response.headers["x-should-retry"] == "false"
    assert (
        "chat/completions, completions, responses, messages, models"
        in (await asked(world, "GET", "/")).text
    )
    assert "previous_response_id" in (await asked(world, "DELETE", f"{base}/responses/resp_1")).text


@pytest.mark.parametrize("path", BODIES)
async def test_a_wrong_method_names_the_right_one(path: str) -> None:
    response = await asked(world_of(), "GET", f"/v1/{path}")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert error_of(response, path) == f"GET is not served at /v1/{path}; POST is."


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("modalities", ["audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
        ("prediction", {"type": "content", "content": "x"}),
    ],
)
async def test_a_field_that_is_not_served_is_refused_by_its_name(field: str, value: Any) -> None:
    world = world_of()
    response = await post(world, "/v1/chat/completions", {"messages": HI, field: value})
    assert response.status_code == 400 and response.json()["error"]["param"] == field
    assert (
        await post(world, "/v1/chat/completions", {"messages": HI, "modalities": ["text"]})
    ).status_code == 200


async def test_an_unknown_previous_response_is_reported_as_it_was_sent() -> None:
    response = await post(
        world_of(), "/v1/responses", {"input": "Hi.", "previous_response_id": "resp_nope"}
    )
    assert response.status_code == 404 and "'resp_nope'" in response.text


async def test_functions_are_served_at_both_ends() -> None:
    """The call comes as `function_call`, its answer as role `function`; a stream says the same; one call an answer."""
    world = world_of(
        [f"Let me see.\n{call('add', a=1)}\n{call('add', a=2)}", "Three.", call("add", a=1)]
    )
    body: dict[str, Any] = {"messages": HI, "functions": [ADD], "function_call": "auto"}
    path = "/e/a/v1/chat/completions"
    choice = (await post(world, path, body)).json()["choices"][0]
    said = choice["message"]
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in said
    assert said["function_call"] == {"name": "add", "arguments": '{"a": 1}'}
    body["messages"] = [*HI, said, {"role": "function", "name": "add", "content": "3"}]
    choice = (await post(world, path, body)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Three.", "stop")
    streamed = (
        await post(world, "/e/b/v1/chat/completions", {**body, "messages": HI, "stream": True})
    ).text
    chunks = [
        json.loads(line[6:])["choices"][0]
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    assert [chunk["delta"] for chunk in chunks if "function_call" in chunk["delta"]] == [
        {"function_call": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    assert chunks[-1]["finish_reason"] == "function_call"
    trace = await world.end("a")
    assert trace.forks == 0 and [turn.role for turn in trace.turns] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


async def test_a_function_can_be_forced_and_forbidden() -> None:
    world = world_of(lambda key, ids: "No call." if key == "b" else '"a": 1}}\n</tool_call>')
    body = {"messages": HI, "functions": [ADD]}
    forced = await post(
        world, "/e/a/v1/chat/completions", {**body, "function_call": {"name": "add"}}
    )
    assert forced.json()["choices"][0]["message"]["function_call"]["name"] == "add"
    trace = await world.end("a")
    last = trace.tokens.slice(trace.turns[-1].start, trace.turns[-1].end)
    assert 0 < int(last.trained_mask.sum()) < len(last), "the name was forced, and is never trained"
    none = await post(world, "/e/b/v1/chat/completions", {**body, "function_call": "none"})
    assert none.json()["choices"][0]["message"]["content"] == "No call."
    for more, text in (
        ({"function_call": {"name": "sub"}}, "function_call names 'sub'"),
        ({"tools": [{"type": "function", "function": ADD}]}, "tools or functions"),
        ({"functions": "add"}, "functions must be a list"),
    ):
        response = await post(world, "/e/c/v1/chat/completions", {**body, **more})
        assert response.status_code == 400 and text in response.text


@pytest.mark.parametrize(("aliases", "wrong"), [(("gpt-4.1-mini", "claude"), 404), (("*",), 200)])
async def test_a_server_answers_to_the_names_that_agents_have_built_in(
    tmp_path: Path, aliases: tuple[str, ...], wrong: int
) -> None:
    model = write_model(tmp_path / "model")
    body = {"messages": HI, "max_tokens": 4}
    async with open_server(
        settings(model), base=tmp_path, db=tmp_path / "a.db", aliases=aliases
    ) as server:
        listed = [
            card["id"] for card in (await ask(server, "/v1/models", None, "GET")).json()["data"]
        ]
        assert listed == [str(model), *(alias for alias in aliases if alias != "*")]
        for name, status in ((str(model), 200), ("gpt-4.1-mini", 200), ("other", wrong)):
            response = await ask(server, "/v1/chat/completions", {**body, "model": name})
            assert response.status_code == status, response.text
            assert status != 200 or response.json()["model"] == name
            assert (await ask(server, f"/v1/models/{name}", None, "GET")).status_code == status
        refused = await ask(server, f"/v1/models/{listed[-1]}", None, "DELETE")
        assert refused.status_code == 400 and "the model itself" in refused.text
        assert MODEL not in listed
