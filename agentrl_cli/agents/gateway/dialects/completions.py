"""OpenAI's completions: a text, or token ids, to continue."""

from __future__ import annotations

from collections.abc import Iterator
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
from agentrl_cli.agents.gateway.dialects.chat import DONE, usage
from agentrl_cli.agents.gateway.request import Choice, ModelRequest, Reply, bad

MAX_TOKENS = 16
"""Of an answer, unless the client asks for more, as at OpenAI and vLLM."""


def parse(body: Body) -> ModelRequest:
    """A completions body. Raises RequestError."""
    if body.get("suffix"):
        raise bad("suffix is not served.", "suffix", "unsupported_parameter")
    if (integer_of(body, "best_of", 1) or 1) > 1:
        raise bad("best_of is not served.", "best_of", "unsupported_parameter")
    options = body.get("stream_options")
    request = ModelRequest(
        model=model_of(body),
        prompt=_prompt(body.get("prompt")),
        echo=flag_of(body, "echo"),
        sampling=sampling_of(body),
        max_tokens=integer_of(body, "max_tokens", 1) or MAX_TOKENS,
        stop=stops_of(body.get("stop")),
        n=integer_of(body, "n", 1) or 1,
        top_logprobs=integer_of(body, "logprobs", 0),
        schema=schema_of(body.get("response_format"), "response_format"),
        stream=flag_of(body, "stream"),
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
        token_ids=flag_of(body, "return_token_ids"),
        session=session_of(body),
        raw=body,
    )
    no_stream(request)
    return request


def _prompt(value: Any) -> str | tuple[int, ...]:
    """One prompt: a text, ids, or a list that holds one of these."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(id_) is int and id_ >= 0 for id_ in value):
        return tuple(value)
    raise bad("prompt must be one text or one list of token ids, not empty.", "prompt")


def answer(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """A completion."""
    choices = [_choice(request, n, choice) for n, choice in enumerate(reply.choices)]
    if request.token_ids:
        choices = [{**choice, "prompt_token_ids": list(reply.prompt_ids)} for choice in choices]
    return {**_head(reply), "choices": choices, "usage": usage(reply)}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": reply.created, "model": reply.model}


def _choice(request: ModelRequest, index: int, choice: Choice) -> dict[str, Any]:
    echo = request.prompt if request.echo and isinstance(request.prompt, str) else ""
    found: dict[str, Any] = {
        "index": index,
        "text": echo + choice.text,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_string or None,
        "logprobs": None if request.top_logprobs is None else _logprobs(choice),
    }
    return found | ({"token_ids": choice.generation.ids.tolist()} if request.token_ids else {})


def _logprobs(choice: Choice) -> dict[str, Any]:
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


def events(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """The text with its finish reason, usage if wanted, then [DONE]."""
    choice = _choice(request, 0, reply.choices[0])
    first = {"prompt_token_ids": list(reply.prompt_ids)} if request.token_ids else {}
    yield sse({**_head(reply), "choices": [choice | first]})
    if request.usage:
        yield sse({**_head(reply), "choices": [], "usage": usage(reply)})
    yield DONE


DIALECT = Dialect("completions", "completions", parse, answer, events, openai_error, sse)
