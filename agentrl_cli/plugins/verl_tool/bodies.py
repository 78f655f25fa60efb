"""Validates a tool server's requests. Invalid ones raise UsageError, which the server answers with 400."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl_cli.errors import UsageError
from agentrl_cli.plugins.verl_tool.trajectories import Call
from agentrl_cli.types.plain import parse_json


def json_object(data: bytes) -> Mapping[str, Any]:
    """Return a request's body as a JSON object."""
    try:
        body = parse_json(data)
    except ValueError as error:
        raise UsageError(f"The body is not usable JSON: {error}.") from error
    if not isinstance(body, dict):
        raise UsageError("The body must be a JSON object.")
    return body


def items(body: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list under a key."""
    value = body.get(key)
    if not isinstance(value, list):
        raise UsageError(f"`{key}` must be a list.")
    return value


def text(body: Mapping[str, Any], key: str) -> str:
    """Return the text under a key."""
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise UsageError(f"`{key}` must be a non-empty text.")
    return value


def spec(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trajectory's spec: the body of `/v1/open` without its id."""
    tools, seed, task = body.get("tools"), body.get("seed", 0), body.get("task") or {}
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(name, str) for name in tools)
    ):
        raise UsageError("`tools` must be a list of names.")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise UsageError("`seed` must be an integer from 0 to 2^63 - 1.")
    if not isinstance(task, dict) or not isinstance(task.get("data", {}), dict):
        raise UsageError(
            "`task` must be an object with `data`, `prompt`, `pack`, `family` and `split`."
        )
    prompt = task.get("prompt", [])
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise UsageError("The task's `prompt` must be a list of messages.")
    return {key: value for key, value in body.items() if key != "trajectory"}


def call(item: Any) -> Call:
    """One entry of `calls`."""
    if not isinstance(item, dict) or not isinstance(item.get("arguments"), dict):
        raise UsageError(
            "A call is an object with `trajectory`, `key`, `name` and an object `arguments`."
        )
    return Call(text(item, "trajectory"), text(item, "key"), text(item, "name"), item["arguments"])


def fields(body: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """verl-tool's `extra_fields`, one object for each of `count` actions; the body's other lists are merged in.

    Null flags, and fields that are not lists, are ignored, as verl-tool does.
    """
    given = body.get("extra_fields")
    found = [{} for _ in range(count)] if given in (None, []) else items(body, "extra_fields")
    if not all(one is None or isinstance(one, dict) for one in found):
        raise UsageError("`extra_fields` must be a list of objects.")
    found = [dict(one or {}) for one in found]
    for key in body.keys() - {"trajectory_ids", "actions", "extra_fields"}:
        if not isinstance(body[key], list):  # null flags, and fields about the request as a whole
            continue
        for one, value in zip(found, items(body, key), strict=False):
            one[key] = value
    return found


def task_data(field: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task's data of a verl-tool request: its extra fields, except those about the request itself."""
    return {
        key: value for key, value in field.items() if key not in ("finish", "is_last_step", "key")
    }
