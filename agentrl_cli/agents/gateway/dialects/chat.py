"""OpenAI's chat completions, with vLLM's field names for token ids and both names for reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_cli.agents.gateway.dialects.base import (
    Body,
    Dialect,
    flag_of,
    integer_of,
    model_of,
    no_stream,
    openai_error,
    sampling_of,
    schema_of,
    session_of,
    sse,
    stops_of,
)
from agentrl_cli.agents.gateway.messages import message_list, read_message
from agentrl_cli.agents.gateway.request import Choice, ModelRequest, Reply, Token, bad
from agentrl_cli.agents.gateway.tools import chosen_tool, read_tools
from agentrl_cli.types import ToolSchema

DONE = "data: [DONE]\n\n"


def parse(body: Body) -> ModelRequest:
    """A chat-completions body. Raises RequestError."""
    messages = message_list(body.get("messages"))
    tools = read_tools(body.get("tools") or [{"function": f} for f in body.get("functions") or ()] or None)
    choice, name = tool_choice(body.get("tool_choice"), tools)
    options = body.get("stream_options")
    most = integer_of(body, "max_completion_tokens", 1) or integer_of(body, "max_tokens", 1)
    request = ModelRequest(
        model=model_of(body),
        messages=tuple(read_message(message, f"messages[{n}]") for n, message in enumerate(messages)),
        tools=tools,
        sampling=sampling_of(body),
        max_tokens=most,
        stop=stops_of(body.get("stop")),
        n=integer_of(body, "n", 1) or 1,
        top_logprobs=(integer_of(body, "top_logprobs", 0) or 0) if flag_of(body, "logprobs") else None,
        tool_choice=choice,
        tool_name=name,
        parallel=flag_of(body, "parallel_tool_calls", True),
        schema=schema_of(body.get("response_format"), "response_format"),
        stream=flag_of(body, "stream"),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        token_ids=flag_of(body, "return_token_ids"),
        session=session_of(body),
        raw=body,
    )
    no_stream(request)
    return request


def tool_choice(value: Any, tools: tuple[ToolSchema, ...]) -> tuple[str, str]:
    """(choice, name) of `tool_choice`, nested or flat. Raises RequestError."""
    if value is None or value in ("auto", "none"):
        return value or "auto", ""
    if value in ("required", "any"):
        if not tools:
            raise bad(f"tool_choice is {value!r} in a request without tools.", "tool_choice")
        return "required", ""
    if isinstance(value, Mapping):
        inner = value.get("function", value)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        return "function", chosen_tool(name, tools)
    raise bad("tool_choice must be none, auto, required, or an object that names a function.", "tool_choice")


def answer(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """A chat completion."""
    body = {
        **_head(reply, "chat.completion"),
        "choices": [_choice(request, n, choice) for n, choice in enumerate(reply.choices)],
        "usage": usage(reply),
    }
    return body | ({"prompt_token_ids": list(reply.prompt_ids)} if request.token_ids else {})


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": reply.weights_version,
    }


def _choice(request: ModelRequest, index: int, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if choice.calls else "")}
    message |= _reasoning(choice) | ({"tool_calls": _calls(choice)} if choice.calls else {})
    return {"index": index, "message": message, **_ending(request, choice)}


def _reasoning(choice: Choice) -> dict[str, str]:
    return {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning} if choice.reasoning else {}


def _calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]


def _ending(request: ModelRequest, choice: Choice) -> dict[str, Any]:
    found: dict[str, Any] = {"finish_reason": choice.finish, "stop_reason": choice.stop_string or None}
    logprobs = None if request.top_logprobs is None else {"content": [_token(token) for token in choice.tokens]}
    found["logprobs"] = logprobs
    return found | ({"token_ids": choice.generation.ids.tolist()} if request.token_ids else {})


def _token(token: Token) -> dict[str, Any]:
    top = [{"token": text, "logprob": logp, "bytes": list(text.encode())} for text, logp in token.top]
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": top}


def usage(reply: Reply) -> dict[str, Any]:
    """OpenAI's usage of a completion."""
    prompt, sampled = len(reply.prompt_ids), reply.sampled
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": reply.cached},
    }


def events(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """Chunks: the role, the reasoning, the text, each call, the finish reason, usage if wanted, then [DONE]."""
    head = _head(reply, "chat.completion.chunk")
    choice = reply.choices[0]

    def chunk(delta: dict[str, Any], **more: Any) -> str:
        return sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **more}]})

    first = {"prompt_token_ids": list(reply.prompt_ids)} if request.token_ids else {}
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    yield sse({**head, "choices": [role], **first})
    if choice.reasoning:
        yield chunk(_reasoning(choice))
    if choice.text:
        yield chunk({"content": choice.text})
    for number, call in enumerate(_calls(choice)):
        yield chunk({"tool_calls": [{"index": number, **call}]})
    yield chunk({}, **_ending(request, choice))
    if request.usage:
        yield sse({**head, "choices": [], "usage": usage(reply)})
    yield DONE


DIALECT = Dialect("chat", "chat/completions", parse, answer, events, openai_error, sse)
