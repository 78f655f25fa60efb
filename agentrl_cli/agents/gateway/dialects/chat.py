"""OpenAI's chat completions and completions, with vLLM's field names for token ids and both names for reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_cli.agents.gateway.dialects.base import (
    Body,
    Dialect,
    ending,
    flag_of,
    integer_of,
    last_events,
    openai_error,
    prompt_ids,
    request_of,
    sse,
    usage,
)
from agentrl_cli.agents.gateway.messages import message_list, read_message
from agentrl_cli.agents.gateway.request import (
    Choice,
    ModelRequest,
    Reply,
    Token,
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
        if not isinstance(legacy, list):
            raise bad("functions must be a list.", "functions")
        tools = read_tools([{"function": function} for function in legacy], "functions")
    if body.get("function_call") is not None:
        choice, name = tool_choice(body["function_call"], tools, "function_call")
    return request_of(
        body,
        messages=tuple(
            read_message(message, f"messages[{n}]") for n, message in enumerate(messages)
        ),
        tools=tools,
        max_tokens=integer_of(body, "max_completion_tokens", 1)
        or integer_of(body, "max_tokens", 1),
        top_logprobs=(integer_of(body, "top_logprobs", 0) or 0)
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
    return {
        **_head(reply, "chat.completion"),
        "choices": [_choice(request, n, choice) for n, choice in enumerate(reply.choices)],
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


def _choice(request: ModelRequest, index: int, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text or (None if choice.calls else ""),
    }
    message |= _reasoning(choice)
    if choice.calls:
        message |= _legacy_call(request, choice) or {"tool_calls": _calls(choice)}
    return {"index": index, "message": message, **_ending(request, choice)}


def _reasoning(choice: Choice) -> dict[str, str]:
    return (
        {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning}
        if choice.reasoning
        else {}
    )


def _calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in choice.calls
    ]


def _legacy_call(request: ModelRequest, choice: Choice) -> dict[str, Any]:
    """Return the call of a request with `functions`, the form before `tools`; empty for any other."""
    if not (request.raw.get("functions") and choice.calls):
        return {}
    call = choice.calls[0]
    return {"function_call": {"name": call.name, "arguments": call.arguments}}


def _ending(request: ModelRequest, choice: Choice) -> dict[str, Any]:
    logprobs = (
        None
        if request.top_logprobs is None
        else {"content": [_token(token) for token in choice.tokens]}
    )
    found = ending(request, choice, logprobs)
    return found | {"finish_reason": "function_call"} if _legacy_call(request, choice) else found


def _token(token: Token) -> dict[str, Any]:
    top = [
        {"token": text, "logprob": logp, "bytes": list(text.encode())} for text, logp in token.top
    ]
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()),
        "top_logprobs": top,
    }


def events(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """Yield chunks: the role, the reasoning, the text, each call, the finish reason, usage if wanted, then [DONE]."""
    head = _head(reply, "chat.completion.chunk")
    choice = reply.choices[0]

    def chunk(delta: dict[str, Any], **more: Any) -> str:
        return sse(
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **more}]}
        )

    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    yield sse({**head, "choices": [role], **prompt_ids(request, reply)})
    if choice.reasoning:
        yield chunk(_reasoning(choice))
    if choice.text:
        yield chunk({"content": choice.text})
    if called := _legacy_call(request, choice):
        yield chunk(called)
    for number, call in enumerate(() if called else _calls(choice)):
        yield chunk({"tool_calls": [{"index": number, **call}]})
    yield chunk({}, **_ending(request, choice))
    yield from last_events(request, reply, head)


DIALECT = Dialect("chat", "chat/completions", parse, answer, events, openai_error, sse)


MAX_TOKENS = 16
"""Tokens of an answer unless the client asks for more, as at OpenAI and vLLM."""


def parse_completion(body: Body) -> ModelRequest:
    """Return a completions body. Raises RequestError."""
    if body.get("suffix"):
        raise bad("suffix is not served.", "suffix", "unsupported_parameter")
    if (integer_of(body, "best_of", 1) or 1) > 1:
        raise bad("best_of is not served.", "best_of", "unsupported_parameter")
    return request_of(
        body,
        prompt=_prompt(body.get("prompt")),
        echo=flag_of(body, "echo"),
        max_tokens=integer_of(body, "max_tokens", 1) or MAX_TOKENS,
        top_logprobs=integer_of(body, "logprobs", 0),
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
    choices = [
        {**_completion_choice(request, n, choice), **prompt_ids(request, reply)}
        for n, choice in enumerate(reply.choices)
    ]
    return {**_completion_head(reply), "choices": choices, "usage": usage(reply)}


def _completion_head(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"cmpl-{reply.id}",
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
    }


def _completion_choice(request: ModelRequest, index: int, choice: Choice) -> dict[str, Any]:
    echo = request.prompt if request.echo and isinstance(request.prompt, str) else ""
    logprobs = None if request.top_logprobs is None else _completion_logprobs(choice)
    return {"index": index, "text": echo + choice.text, **ending(request, choice, logprobs)}


def _completion_logprobs(choice: Choice) -> dict[str, Any]:
    offsets, at = [], 0
    for token in choice.tokens:
        offsets.append(at)
        at += len(token.text)
    return {
        "tokens": [token.text for token in choice.tokens],
        "token_logprobs": [token.logprob for token in choice.tokens],
        "top_logprobs": [dict(token.top) for token in choice.tokens],
        "text_offset": offsets,
    }


def completion_events(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """Yield the text with its finish reason, usage if wanted, then [DONE]."""
    choice = _completion_choice(request, 0, reply.choices[0]) | prompt_ids(request, reply)
    yield sse({**_completion_head(reply), "choices": [choice]})
    yield from last_events(request, reply, _completion_head(reply))


COMPLETIONS = Dialect(
    "completions",
    "completions",
    parse_completion,
    answer_completion,
    completion_events,
    openai_error,
    sse,
)
