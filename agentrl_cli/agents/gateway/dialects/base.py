"""The parts of all dialects: the record that each of them is, fields of bodies, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl_cli.agents.gateway.request import Choice, ModelRequest, Reply, Token, bad

Body = Mapping[str, Any]
T = TypeVar("T", bool, int, float, str)
KINDS = {bool: "true or false", int: "a 64-bit integer", float: "a number", str: "a string"}
BOUND = 2**63
"""Numbers of a body are smaller."""

DONE = "data: [DONE]\n\n"
MOST_STOPS = 16
"""Stop strings of a request."""
NUMBERS: dict[str, type[float]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float),
    **dict.fromkeys(("top_k", "seed"), int),
}
STATUS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
UNSERVED = ("audio", "web_search_options", "prediction")
"""Fields that would ask a model for what this server does not do."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """A wire format: a body to a request; a reply, a stream of events and an error back."""

    path: str
    """Under `/v1`."""
    parse: Callable[[Body], ModelRequest]
    """Raises RequestError."""
    answer: Callable[[ModelRequest, Reply], dict[str, Any]]
    events: Callable[[ModelRequest, Reply], Iterator[str]]
    """Server-sent events in the order that clients expect: one delta for each block."""
    error: Callable[[str, int, str, str], dict[str, Any]]
    """Makes an error's body from message, status, code and parameter."""
    late_error: Callable[[dict[str, Any]], str]
    """An error as an event, for a stream that has begun."""


def sse(data: Mapping[str, Any], event: str = "") -> str:
    """Return a server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def openai_error(message: str, status: int, code: str = "", param: str = "") -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = STATUS_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {"message": message, "type": kind, "param": param or None, "code": code or None}
    }


def refuse_fields(body: Body, names: Iterable[str]) -> None:
    """Raise RequestError for the first of some fields that a body has."""
    if name := next((name for name in names if body.get(name) not in (None, False)), ""):
        raise bad(f"{name} is not served.", name, "unsupported_parameter")


def sampling_of(body: Body) -> dict[str, float]:
    """Return the sampling fields of a body. Raises RequestError for no number, or an unserved field."""
    found: dict[str, float] = {}
    for name, kind in NUMBERS.items():
        if (number := field_of(body, name, kind)) is not None:
            found[name] = max(number, 0) if name == "top_k" else number  # -1 means all to vLLM
    for name in ("presence_penalty", "frequency_penalty"):
        if field_of(body, name, float):
            raise bad(
                f"{name} is not served; repetition_penalty is.", name, "unsupported_parameter"
            )
    if body.get("modalities") not in (None, [], ["text"]):
        raise bad("Of modalities text alone is served.", "modalities", "unsupported_parameter")
    refuse_fields(body, (*UNSERVED, *(["logit_bias"] if body.get("logit_bias") else [])))
    return found


def field_of(body: Body, name: str, kind: type[T], least: int | None = None) -> T | None:
    """Return a field of a body, None if absent or null. Raises RequestError unless it is of that kind and in bounds."""
    value: Any = body.get(name)
    if value is None:
        return None
    numeric = int | float if kind is float else kind
    valid = isinstance(value, numeric) and (kind is bool or not isinstance(value, bool))
    valid = valid and (kind is str or abs(value) < BOUND)
    if not valid or (least is not None and value < least):
        bound = f" of at least {least}" if least is not None else ""
        raise bad(f"{name} must be {KINDS[kind]}{bound}.", name)
    return kind(value)


def flag_of(body: Body, name: str, default: bool = False) -> bool:
    """Return a boolean of a body."""
    found = field_of(body, name, bool)
    return default if found is None else found


def stops_of(value: Any, param: str = "stop") -> tuple[str, ...]:
    """Stop strings: a string or a list of them."""
    stops = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(stops, list)
        or not all(isinstance(stop, str) for stop in stops)
        or len(stops) > MOST_STOPS
    ):
        raise bad(f"{param} must be a string or a list of at most {MOST_STOPS} strings.", param)
    return tuple(stop for stop in stops if stop)


def session_of(body: Body) -> str:
    """Return the session that a body names, by the fields that clients use for it."""
    metadata = body.get("metadata")
    inner = metadata if isinstance(metadata, Mapping) else {}
    for value in (
        body.get("session_id"),
        inner.get("session_id"),
        body.get("user"),
        inner.get("user_id"),
    ):
        if isinstance(value, str) and value:
            return value
    return ""


def schema_of(value: Any, param: str) -> Mapping[str, Any] | None:
    """Return the JSON Schema that a response format asks for; None for text."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise bad(f"{param} must be an object.", param)
    match value.get("type"):
        case None | "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            inner = value.get("json_schema", value)
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if isinstance(schema, Mapping):
                return schema
            raise bad(f"{param}: json_schema needs a schema.", param)
    raise bad(
        f"{param}: type {value.get('type')!r} is not served; text, json_object and json_schema are.",
        param,
    )


# --- OpenAI's chat completions and completions, with vLLM's field names for token ids


def request_of(body: Body, **own: Any) -> ModelRequest:
    """Return a request of the fields that all dialects share and a dialect's own. Raises RequestError."""
    return ModelRequest(
        model=field_of(body, "model", str) or "",
        sampling=sampling_of(body),
        stream=flag_of(body, "stream"),
        session=session_of(body),
        raw=body,
        **own,
    )


def completion_request(body: Body, **own: Any) -> ModelRequest:
    """Return a request of the fields that chat completions and completions share. Raises RequestError."""
    options, n = body.get("stream_options"), field_of(body, "n", int, 1) or 1
    if flag_of(body, "stream") and n > 1:
        raise bad("n > 1 is not streamed.", "n")
    return request_of(
        body,
        stop=stops_of(body.get("stop")),
        n=n,
        schema=schema_of(body.get("response_format"), "response_format"),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        token_ids=flag_of(body, "return_token_ids"),
        **own,
    )


def token_fields(token: Token) -> dict[str, Any]:
    """Return a token with its alternatives in OpenAI's form."""
    first, *top = [
        {"token": one.text, "logprob": one.logprob, "bytes": list(one.data)}
        for one in (token, *token.top)
    ]
    return {**first, "top_logprobs": top}


def ending(request: ModelRequest, choice: Choice, logprobs: Any) -> dict[str, Any]:
    """Return how a choice ended, its log-probabilities, and its ids if they are wanted."""
    found = {
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_string or None,
        "logprobs": logprobs,
    }
    return found | ({"token_ids": choice.generation.ids.tolist()} if request.token_ids else {})


def prompt_ids(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """Return `prompt_token_ids`, if they are wanted."""
    return {"prompt_token_ids": list(reply.prompt_ids)} if request.token_ids else {}


def usage(reply: Reply) -> dict[str, Any]:
    """Return OpenAI's usage of a completion."""
    prompt, sampled = len(reply.prompt_ids), reply.sampled
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": reply.cached},
    }


def last_events(request: ModelRequest, reply: Reply, head: Mapping[str, Any]) -> Iterator[str]:
    """Yield usage if it is wanted, then [DONE]."""
    if request.usage:
        yield sse({**head, "choices": [], "usage": usage(reply)})
    yield DONE
