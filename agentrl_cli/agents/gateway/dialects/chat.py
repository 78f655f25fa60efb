"""OpenAI's chat completions and completions, with vLLM's field names for token ids and both names for reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from agentrl_cli.agents.gateway.dialects.base import (
    Body,
    Dialect,
    completion_request,
    ending,
    field_of,
    flag_of,
    last_events,
    openai_error,
    prompt_ids,
    sse,
    token_fields,
    usage,
)
from agentrl_cli.agents.gateway.messages import message_list, read_message
from agentrl_cli.agents.gateway.request import (
    Choice,
    ModelRequest,
    Reply,
    bad,
    chosen_tool,
    read_tools,
)
from agentrl_cli.types import ToolSchema


def parse(body: Body) -> ModelRequest:
    """Return a chat-completions body. Raises RequestError."""
    messages = message_list(body.get("messages"))
    tools = read_tools(body.get("tools"))
    choice, name = tool_choice(body.get("tool_choice"), tools)
    if legacy := body.get("functions"):
        if tools:
            raise bad("A request has tools or functions, not both.", "functions")
        nested = isinstance(legacy, list) and [{"function": function} for function in legacy]
        tools = read_tools(nested, "functions")
    if body.get("function_call") is not None:
        choice, name = tool_choice(body["function_call"], tools, "function_call")
    return completion_request(
        body,
        messages=tuple(
            read_message(message, f"messages[{n}]") for n, message in enumerate(messages)
        ),
        tools=tools,
        max_tokens=field_of(body, "max_completion_tokens", int, 1)
        or field_of(body, "max_tokens", int, 1),
        top_logprobs=(field_of(body, "top_logprobs", int, 0) or 0)
        if flag_of(body, "logprobs")
        else None,
        tool_choice=choice,
        tool_name=name,
        parallel=not legacy and flag_of(body, "parallel_tool_calls", True),
    )


def tool_choice(
    value: Any, tools: tuple[ToolSchema, ...], param: str = "tool_choice"
) -> tuple[str, str]:
    """Return (choice, name) of `tool_choice`, nested or flat. Raises RequestError."""
    if value is None or value in ("auto", "none"):
        return value or "auto", ""
    if value in ("required", "any"):
        if not tools:
            raise bad(f"{param} is {value!r} in a request without tools.", param)
        return "required", ""
    if isinstance(value, Mapping):
        inner = value.get("function", value)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        return "function", chosen_tool(name, tools, param)
    raise bad(f"{param} must be none, auto, required, or an object that names a function.", param)


def answer(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """Return a chat completion."""
    messages = [
        {
            "role": "assistant",
            "content": choice.text or (None if choice.calls else ""),
            **_reasoning(choice),
            **_calls(request, choice),
        }
        for choice in reply.choices
    ]
    return {
        **_head(reply, "chat.completion"),
        "choices": [
            {"index": n, "message": message, **_ending(request, reply.choices[n])}
            for n, message in enumerate(messages)
        ],
        "usage": usage(reply),
        **prompt_ids(request, reply),
    }


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": reply.weights_version,
    }


def _reasoning(choice: Choice) -> dict[str, str]:
    return (
        {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning}
        if choice.reasoning
        else {}
    )


def _calls(request: ModelRequest, choice: Choice) -> dict[str, Any]:
    """Return the calls of a choice; the first alone for a request with `functions`, the form before `tools`."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in choice.calls
    ]
    if calls and request.raw.get("functions"):
        return {"function_call": calls[0]["function"]}
    return {"tool_calls": calls} if calls else {}


def _ending(request: ModelRequest, choice: Choice) -> dict[str, Any]:
    logprobs = (
        None
        if request.top_logprobs is None
        else {"content": [token_fields(token) for token in choice.tokens]}
    )
    legacy = "function_call" in _calls(request, choice)
    found = ending(request, choice, logprobs)
    return found | ({"finish_reason": "function_call"} if legacy else {})


def events(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """Yield chunks: the role, the reasoning, the text, each call, the finish reason, usage if wanted, then [DONE]."""
    head, choice = _head(reply, "chat.completion.chunk"), reply.choices[0]
    calls = _calls(request, choice)
    listed = [
        {"tool_calls": [{"index": n, **c}]} for n, c in enumerate(calls.get("tool_calls", ()))
    ]
    text = {"content": choice.text} if choice.text else {}
    deltas = [_reasoning(choice), text, *(listed or [calls])]
    chunks: list[dict[str, Any]] = [
        {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        *({"delta": delta, "finish_reason": None} for delta in deltas if delta),
        {"delta": {}, **_ending(request, choice)},
    ]
    for n, chunk in enumerate(chunks):
        ids = {} if n else prompt_ids(request, reply)
        yield sse({**head, "choices": [{"index": 0, **chunk}], **ids})
    yield from last_events(request, reply, head)


DIALECT = Dialect("chat/completions", parse, answer, events, openai_error, sse)


MAX_TOKENS = 16
"""Tokens of an answer unless the client asks for more, as at OpenAI and vLLM."""


def parse_completion(body: Body) -> ModelRequest:
    """Return a completions body. Raises RequestError."""
    if body.get("suffix"):
        raise bad("suffix is not served.", "suffix", "unsupported_parameter")
    if (field_of(body, "best_of", int, 1) or 1) > 1:
        raise bad("best_of is not served.", "best_of", "unsupported_parameter")
    prompt, echo = _prompt(body.get("prompt")), flag_of(body, "echo")
    if echo and (body.get("logprobs") is not None or not isinstance(prompt, str)):
        raise bad("echo is served for a text without logprobs.", "echo", "unsupported_parameter")
    return completion_request(
        body,
        prompt=prompt,
        echo=echo,
        max_tokens=field_of(body, "max_tokens", int, 1) or MAX_TOKENS,
        top_logprobs=field_of(body, "logprobs", int, 0),
    )


def _prompt(value: Any) -> str | tuple[int, ...]:
    """Return the one prompt: a text, ids, or a list that holds one of these."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(id_) is int and id_ >= 0 for id_ in value):
        return tuple(value)
    raise bad("prompt must be one text or one list of token ids, not empty.", "prompt")


def answer_completion(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """Return a completion."""
    echo = str(request.prompt) if request.echo else ""
    choices = []
    for n, choice in enumerate(reply.choices):
        texts = [token.text for token in choice.tokens]
        logprobs = {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in choice.tokens],
            "top_logprobs": [
                {one.text: one.logprob for one in token.top} for token in choice.tokens
            ],
            "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
        }
        ended = ending(request, choice, None if request.top_logprobs is None else logprobs)
        choices.append(
            {"index": n, "text": echo + choice.text, **ended, **prompt_ids(request, reply)}
        )
    return {
        "id": f"cmpl-{reply.id}",
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
        "usage": usage(reply),
    }


def completion_events(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """Yield the text with its finish reason, usage if wanted, then [DONE]."""
    whole = answer_completion(request, reply)
    del whole["usage"]
    yield sse(whole)
    yield from last_events(request, reply, whole)


COMPLETIONS = Dialect(
    "completions",
    parse_completion,
    answer_completion,
    completion_events,
    openai_error,
    sse,
)
