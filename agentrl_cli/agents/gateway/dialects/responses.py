"""OpenAI's responses: items in place of messages, flat tools, `instructions`, `previous_response_id`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_cli.agents.gateway.dialects.base import (
    Body,
    Dialect,
    field_of,
    flag_of,
    openai_error,
    refuse_fields,
    request_of,
    schema_of,
    sse,
    token_fields,
)
from agentrl_cli.agents.gateway.dialects.chat import tool_choice
from agentrl_cli.agents.gateway.messages import (
    assistant_message,
    read_message,
    text_of,
    tool_message,
)
from agentrl_cli.agents.gateway.request import ModelRequest, Reply, bad, read_tools
from agentrl_cli.types import Message

REFUSED = ("conversation", "prompt", "background")
"""Fields that need state which this server does not have."""


def parse(body: Body) -> ModelRequest:
    """Return a responses body. Raises RequestError."""
    refuse_fields(body, REFUSED)
    tools = read_tools(body.get("tools"))
    choice, name = tool_choice(body.get("tool_choice"), tools)
    text, include = body.get("text"), body.get("include")
    logprobs = isinstance(include, list) and "message.output_text.logprobs" in include
    return request_of(
        body,
        messages=tuple(_messages(body)),
        tools=tools,
        max_tokens=field_of(body, "max_output_tokens", int, 1),
        top_logprobs=(field_of(body, "top_logprobs", int, 0) or 0) if logprobs else None,
        tool_choice=choice,
        tool_name=name,
        parallel=flag_of(body, "parallel_tool_calls", True),
        schema=schema_of(text.get("format") if isinstance(text, Mapping) else None, "text.format"),
        remember=flag_of(body, "store", True),
        previous=str(body.get("previous_response_id") or "").removeprefix("resp_"),
    )


def _messages(body: Body) -> Iterator[Message]:
    if instructions := body.get("instructions"):
        yield {"role": "system", "content": text_of(instructions, "instructions")}
    given = body.get("input")
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    if not isinstance(given, list) or not all(isinstance(item, Mapping) for item in given):
        raise bad("input must be a string or a list of items.", "input")
    for number, item in enumerate(given):
        yield _message(item, f"input[{number}]")


def _message(item: Mapping[str, Any], param: str) -> Message:
    """Return an item as a message; reasoning and calls are merged with their neighbours later."""
    id_ = str(item.get("call_id") or item.get("id") or "")
    match item.get("type", "message"):
        case "message":
            return read_message(item, param)
        case "function_call":
            call = (id_, str(item.get("name") or ""), item.get("arguments"))
            return assistant_message("", [call], None)
        case "local_shell_call":  # Codex's
            return assistant_message("", [(id_, "local_shell", item.get("action"))], None)
        case "function_call_output" | "local_shell_call_output":
            return tool_message(id_, text_of(item.get("output"), param))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            texts = [str(part.get("text") or "") for part in parts if isinstance(part, Mapping)]
            return assistant_message("", [], "".join(texts))
    raise bad(
        f"{param}: items of type {item.get('type')!r} are not served.", param, "unsupported_content"
    )


def answer(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """Return a finished response."""
    cut = reply.choices[0].finish == "length"
    return {
        **_head(request, reply),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(reply)),
        "usage": {
            "input_tokens": len(reply.prompt_ids),
            "input_tokens_details": {"cached_tokens": reply.cached},
            "output_tokens": reply.sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(reply.prompt_ids) + reply.sampled,
        },
    }


def _head(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    raw = request.raw
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": raw.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "model": reply.model,
        "output": [],
        "parallel_tool_calls": request.parallel,
        "previous_response_id": f"resp_{request.previous}" if request.previous else None,
        "reasoning": {"effort": None, "summary": None},
        "store": request.remember,
        "temperature": request.sampling.get("temperature", 1.0),
        "text": raw.get("text") or {"format": {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        "top_p": request.sampling.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
        "metadata": raw.get("metadata") or {},
    }


def _items(reply: Reply) -> Iterator[dict[str, Any]]:
    choice = reply.choices[0]
    if choice.reasoning:
        content = [{"type": "reasoning_text", "text": choice.reasoning}]
        yield {
            "id": f"rs_{reply.id}",
            "type": "reasoning",
            "summary": [],
            "content": content,
            "status": "completed",
        }
    if choice.text or not choice.calls:
        part = {
            "type": "output_text",
            "text": choice.text,
            "annotations": [],
            "logprobs": [token_fields(token) for token in choice.tokens],
        }
        status = "incomplete" if choice.finish == "length" else "completed"
        yield {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }
    for number, call in enumerate(choice.calls):
        yield {
            "id": f"fc_{reply.id}_{number}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
            "status": "completed",
        }


def events(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """Yield response.created and in_progress; each item added, its parts, done; response.completed."""
    for number, (kind, data) in enumerate(_events(request, reply)):
        yield sse({"type": kind, "sequence_number": number, **data}, kind)


def _events(request: ModelRequest, reply: Reply) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = answer(request, reply)
    yield "response.created", {"response": _head(request, reply)}
    yield "response.in_progress", {"response": _head(request, reply)}
    for index, item in enumerate(whole["output"]):
        unfilled = "arguments" if item["type"] == "function_call" else "content"
        empty = {**item, "status": "in_progress", unfilled: type(item[unfilled])()}
        yield "response.output_item.added", {"output_index": index, "item": empty}
        for kind, data in _inner(item):
            yield kind, {"output_index": index, "item_id": item["id"], **data}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _inner(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events between those that add and finish an item."""
    match item["type"]:
        case "function_call":
            yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", done
        case "reasoning":
            text = item["content"][0]["text"]
            yield "response.reasoning_text.delta", {"content_index": 0, "delta": text}
            yield "response.reasoning_text.done", {"content_index": 0, "text": text}
        case _:
            part = item["content"][0]
            at = {"content_index": 0}
            yield (
                "response.content_part.added",
                {**at, "part": {**part, "text": "", "logprobs": []}},
            )
            if part["text"]:
                yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}


def late_error(body: dict[str, Any]) -> str:
    """Return an error in a stream that has begun."""
    return sse({**body["error"], "type": "error", "sequence_number": 0}, "error")


DIALECT = Dialect("responses", parse, answer, events, openai_error, late_error)
