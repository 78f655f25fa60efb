"""Anthropic's messages: system text beside the messages, blocks in place of strings, tools with an input schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from agentrl_cli.agents.gateway.dialects.base import (
    STATUS_TYPES,
    Body,
    Dialect,
    field_of,
    request_of,
    schema_of,
    sse,
    stops_of,
)
from agentrl_cli.agents.gateway.messages import (
    assistant_message,
    message_list,
    text_of,
    tool_message,
)
from agentrl_cli.agents.gateway.request import (
    Choice,
    ModelRequest,
    Reply,
    bad,
    chosen_tool,
    read_tools,
)
from agentrl_cli.types import Message, ToolSchema

SIGNATURE = "agentrl"
"""Stands where Anthropic signs a thinking block: clients send it back as it is."""
EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""Kind of a block to the fields that its deltas fill in a stream."""
BLOCKS = (*EMPTY, "redacted_thinking")


def parse(body: Body) -> ModelRequest:
    """Return a messages body. Raises RequestError."""
    if field_of(body, "max_tokens", int, 1) is None:
        raise bad("max_tokens: field required.", "max_tokens")
    tools = read_tools(body.get("tools"))
    choice, name, parallel = _choice_of(body.get("tool_choice"), tools)
    config = body.get("output_config")
    form = config.get("format") if isinstance(config, Mapping) else None
    return request_of(
        body,
        messages=tuple(_messages(body)),
        tools=tools,
        max_tokens=field_of(body, "max_tokens", int),
        stop=stops_of(body.get("stop_sequences"), "stop_sequences"),
        tool_choice=choice,
        tool_name=name,
        parallel=parallel,
        schema=schema_of(form or body.get("output_format"), "output_config.format"),
    )


def _choice_of(value: Any, tools: tuple[ToolSchema, ...]) -> tuple[str, str, bool]:
    given = {"type": "auto"} if value is None else value if isinstance(value, Mapping) else {}
    parallel = not given.get("disable_parallel_tool_use")
    match given.get("type"):
        case "auto" | "none" as kind:
            return kind, "", parallel
        case "any":
            return "required" if tools else "auto", "", parallel
        case "tool":
            return "function", chosen_tool(given.get("name"), tools), parallel
    raise bad("tool_choice must be an object of type auto, any, tool or none.", "tool_choice")


def _messages(body: Body) -> Iterator[Message]:
    if system := text_of(body.get("system"), "system"):
        yield {"role": "system", "content": system}
    for number, message in enumerate(message_list(body.get("messages"))):
        param = f"messages[{number}]"
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            raise bad(f"{param}: content must be a string or a list of blocks.", param)
        match message.get("role"):
            case "user":
                yield from _user(blocks, param)
            case "assistant":
                yield _assistant(blocks, param)
            case "system":
                yield {"role": "system", "content": text_of(blocks, param)}
            case role:
                raise bad(f"{param}: the role {role!r} is unknown; use user or assistant.", param)


def _user(blocks: list[Mapping[str, Any]], param: str) -> Iterator[Message]:
    # The results come first, as they answer the turn before; then the user's own text.
    own = []
    for block in blocks:
        if block.get("type") == "tool_result":
            text = text_of(block.get("content"), param)
            if block.get("is_error") and not text:
                text = "error"
            yield tool_message(str(block.get("tool_use_id") or ""), text)
        else:
            own.append(block)
    if own or not blocks:
        yield {"role": "user", "content": text_of(own, param)}


def _assistant(blocks: list[Mapping[str, Any]], param: str) -> Message:
    for block in blocks:
        if (kind := block.get("type")) not in BLOCKS:
            why = f"{param}: blocks of type {kind!r} are not served."
            raise bad(why, param, "unsupported_content")
    texts = [block for block in blocks if block["type"] == "text"]
    calls = [
        (str(block.get("id") or ""), str(block.get("name") or ""), block.get("input") or {})
        for block in blocks
        if block["type"] == "tool_use"
    ]
    thoughts = [block.get("thinking") for block in blocks if block["type"] == "thinking"]
    thinking = "".join(str(thought or "") for thought in thoughts)
    return assistant_message(text_of(texts, param, ""), calls, thinking or None)


def answer(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """Return a message."""
    choice = reply.choices[0]
    return {
        **_head(reply),
        "content": list(_blocks(choice)),
        **_stop_fields(choice),
        "usage": _usage(reply),
    }


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _blocks(choice: Choice) -> Iterator[dict[str, Any]]:
    if choice.reasoning:
        yield {"type": "thinking", "thinking": choice.reasoning, "signature": SIGNATURE}
    if choice.text or not choice.calls:
        yield {"type": "text", "text": choice.text}
    for call in choice.calls:
        yield {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": call.arguments,
        }


def _stop_fields(choice: Choice) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = (
        "stop_sequence"
        if choice.stop_string and not choice.calls
        else reasons.get(choice.finish, "end_turn")
    )
    return {"stop_reason": reason, "stop_sequence": choice.stop_string or None}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": len(reply.prompt_ids) - reply.cached,
        "output_tokens": reply.sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached,
    }


def events(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """Yield message_start; start, delta and stop of each block; message_delta with usage; message_stop."""
    choice = reply.choices[0]
    started = {
        **_head(reply),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**_usage(reply), "output_tokens": 0},
    }
    yield _event("message_start", message=started)
    for index, block in enumerate(_blocks(choice)):
        empty = EMPTY[block["type"]]
        yield _event("content_block_start", index=index, content_block={**block, **empty})
        for name in empty:
            delta = {"type": f"{name}_delta", name: block[name]}
            if name == "input":
                written = json.dumps(block["input"], ensure_ascii=False)
                delta = {"type": "input_json_delta", "partial_json": written}
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_stop_fields(choice), usage=_usage(reply))
    yield _event("message_stop")


def _event(kind: str, **data: Any) -> str:
    return sse({"type": kind, **data}, kind)


def error(message: str, status: int, code: str = "", param: str = "") -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kinds = {**STATUS_TYPES, 413: "request_too_large"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


DIALECT = Dialect("messages", parse, answer, events, error, partial(sse, event="error"))
