"""What the dialects share: the record that each of them is, fields of bodies, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from agentrl_cli.agents.gateway.request import ModelRequest, Reply, bad

Body = Mapping[str, Any]

MOST_STOPS = 16
"""Stop strings of a request."""
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
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

    name: str
    path: str
    """Under `/v1`."""
    parse: Callable[[Body], ModelRequest]
    """Raises RequestError."""
    answer: Callable[[ModelRequest, Reply], dict[str, Any]]
    events: Callable[[ModelRequest, Reply], Iterator[str]]
    """Server-sent events in the order that clients expect: one delta for each block."""
    error: Callable[[str, int, str, str], dict[str, Any]]
    """Makes an error's body from message, status, code and parameter."""
    failed: Callable[[dict[str, Any]], str]
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


def model_of(body: Body) -> str:
    """Return the model's name; empty means the server's own."""
    model = body.get("model") or ""
    if not isinstance(model, str):
        raise bad("model must be a string.", "model")
    return model


def sampling_of(body: Body) -> dict[str, float]:
    """Return the sampling fields of a body. Raises RequestError for what is not a number, or is not served."""
    found: dict[str, float] = {}
    for name in NUMBERS:
        if (value := number_of(body, name)) is not None:
            found[name] = value
    for name in ("top_k", "seed"):
        if (value := integer_of(body, name)) is not None:
            found[name] = max(value, 0) if name == "top_k" else value  # -1 means all to vLLM
    for name in ("presence_penalty", "frequency_penalty"):
        if number_of(body, name):
            raise bad(
                f"{name} is not served; repetition_penalty is.", name, "unsupported_parameter"
            )
    if body.get("logit_bias"):
        refuse_fields(body, ("logit_bias",))
    if body.get("modalities") not in (None, [], ["text"]):
        raise bad("Of modalities text alone is served.", "modalities", "unsupported_parameter")
    refuse_fields(body, UNSERVED)
    return found


def number_of(body: Body, name: str) -> float | None:
    """Return a finite number of a body, None if absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise bad(f"{name} must be a number.", name)
    return float(value)


def integer_of(body: Body, name: str, least: int | None = None) -> int | None:
    """Return an integer of a body, None if absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (least is not None and value < least)
    ):
        raise bad(
            f"{name} must be an integer{f' of at least {least}' if least is not None else ''}.",
            name,
        )
    return value


def flag_of(body: Body, name: str, default: bool = False) -> bool:
    """Return a boolean of a body."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad(f"{name} must be true or false.", name)
    return value


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
