"""OpenAI's completions: a text, or token ids, to continue."""

from __future__ import annotations

from collections.abc import Iterator
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
from agentrl_cli.agents.gateway.request import Choice, ModelRequest, Reply, bad

MAX_TOKENS = 16
"""Tokens of an answer unless the client asks for more, as at OpenAI and vLLM."""


def parse(body: Body) -> ModelRequest:
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


def answer(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """Return a completion."""
    choices = [
        {**_choice(request, n, choice), **prompt_ids(request, reply)}
        for n, choice in enumerate(reply.choices)
    ]
    return {**_head(reply), "choices": choices, "usage": usage(reply)}


def _head(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"cmpl-{reply.id}",
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
    }


def _choice(request: ModelRequest, index: int, choice: Choice) -> dict[str, Any]:
    echo = request.prompt if request.echo and isinstance(request.prompt, str) else ""
    logprobs = None if request.top_logprobs is None else _logprobs(choice)
    return {"index": index, "text": echo + choice.text, **ending(request, choice, logprobs)}


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
    """Yield the text with its finish reason, usage if wanted, then [DONE]."""
    choice = _choice(request, 0, reply.choices[0]) | prompt_ids(request, reply)
    yield sse({**_head(reply), "choices": [choice]})
    yield from last_events(request, reply, _head(reply))


DIALECT = Dialect("completions", "completions", parse, answer, events, openai_error, sse)
