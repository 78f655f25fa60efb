"""Session logs of coding agents, line by line: Claude Code's and Codex's, as far as their form is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_cli.plugins.traces.atif_read import stamp
from agentrl_cli.plugins.traces.messages import call_of, messages_in
from agentrl_cli.plugins.traces.trace import Said, Trace
from agentrl_cli.types import Message

CODEX = ("session_meta", "response_item", "event_msg", "turn_context")


def session_of(value: Mapping[str, Any], before: str) -> str | None:
    """Return the session of a line; `before` for one that does not name it, None for a line of another form."""
    if value.get("type") in CODEX and isinstance(value.get("payload"), dict):
        payload = value["payload"]
        return str(payload["id"]) if value["type"] == "session_meta" else before or "session"
    if isinstance(value.get("sessionId"), str) and "uuid" in value:
        return str(value["sessionId"])
    return before if before and isinstance(value.get("type"), str) else None


def trace_of(name: str, lines: list[Mapping[str, Any]]) -> Trace:
    """Return a session as a trace: a path to every message that none follows."""
    found = Trace([name, lines])
    if any(line.get("type") in CODEX for line in lines):
        found.agent = "codex"
        found.paths = [[one for line in lines for one in _codex(line)]]
        return found
    found.agent = "claude-code"
    known = {line["uuid"]: line for line in lines if "uuid" in line and "message" in line}
    parents = {line.get("parentUuid") for line in known.values()}
    for leaf in (line for id, line in known.items() if id not in parents):
        path: dict[Any, Mapping[str, Any]] = {}
        at: Any = leaf
        while at is not None and at["uuid"] not in path:
            path[at["uuid"]] = at
            at = known.get(at.get("parentUuid"))
        found.paths.append(_join_messages([*path.values()][::-1]))
    return found


def _join_messages(lines: list[Mapping[str, Any]]) -> list[Said]:
    """Return the messages of lines; the parts of one answer, which have a line each, as one message."""
    out: list[Said] = []
    last = None
    for line in lines:
        given = line["message"]
        for message in messages_in([{**given, "role": given.get("role") or line["type"]}]):
            id, role = given.get("id"), message["role"]
            if id and id == last and role == "assistant":
                out[-1].message = _merge_messages(out[-1].message, message)
                continue
            model = str(given.get("model") or "") if role == "assistant" else ""
            out.append(Said(message, stamp(line.get("timestamp")), model=model))
            last = id
    return out


def _merge_messages(one: Message, other: Message) -> Message:
    for key in ("content", "reasoning_content"):
        if other.get(key):
            one = one | {key: "\n".join(filter(None, [one.get(key), other[key]]))}
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    return one | ({"tool_calls": calls} if calls else {})


def _codex(line: Mapping[str, Any]) -> Iterator[Said]:
    payload, at = line.get("payload") or {}, stamp(line.get("timestamp"))
    if line.get("type") != "response_item":
        return
    if payload.get("type") == "message":
        yield from (Said(message, at) for message in messages_in([payload]))
    elif payload.get("type") == "function_call":
        yield Said({"role": "assistant", "content": "", "tool_calls": [call_of(payload)]}, at)
    elif payload.get("type") == "function_call_output":
        yield from (Said(message, at) for message in messages_in([{**payload, "role": "tool"}]))
