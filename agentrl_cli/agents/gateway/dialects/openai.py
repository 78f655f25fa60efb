"""What OpenAI's chat completions and completions share, with vLLM's field names for token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_cli.agents.gateway.dialects.base import (
    Body,
    flag_of,
    integer_of,
    model_of,
    sampling_of,
    schema_of,
    session_of,
    sse,
    stops_of,
)
from agentrl_cli.agents.gateway.request import Choice, ModelRequest, Reply, bad

DONE = "data: [DONE]\n\n"


def request_of(body: Body, **own: Any) -> ModelRequest:
    """Return a request of the shared fields and the dialect's own. Raises RequestError."""
    options = body.get("stream_options")
    stream, n = flag_of(body, "stream"), integer_of(body, "n", 1) or 1
    if stream and n > 1:
        raise bad("n > 1 is not streamed.", "n")
    return ModelRequest(
        model=model_of(body),
        sampling=sampling_of(body),
        stop=stops_of(body.get("stop")),
        n=n,
        schema=schema_of(body.get("response_format"), "response_format"),
        stream=stream,
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        token_ids=flag_of(body, "return_token_ids"),
        session=session_of(body),
        raw=body,
        **own,
    )


def ending(request: ModelRequest, choice: Choice, logprobs: Any) -> dict[str, Any]:
    """Return how a choice ended, its log-probabilities, and its ids if they are wanted."""
    found = {
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_string or None,
        "logprobs": logprobs,
    }
    return found | ({"token_ids": choice.generation.ids.tolist()} if request.token_ids else {})


def prompt_ids(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """vLLM's `prompt_token_ids`, if they are wanted."""
    return {"prompt_token_ids": list(reply.prompt_ids)} if request.token_ids else {}


def usage(reply: Reply) -> dict[str, Any]:
    """OpenAI's usage of a completion."""
    prompt, sampled = len(reply.prompt_ids), reply.sampled
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": reply.cached},
    }


def last_events(request: ModelRequest, reply: Reply, head: Mapping[str, Any]) -> Iterator[str]:
    """Usage if it is wanted, then [DONE]."""
    if request.usage:
        yield sse({**head, "choices": [], "usage": usage(reply)})
    yield DONE
