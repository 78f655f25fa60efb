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
        path: list[Said] = []
        for one in (one for line in lines for one in _codex(line)):
            if path and one.message["role"] == path[-1].message["role"] == "assistant":
                path[-1].message = _merge_messages(path[-1].message, one.message)
            else:
                path.append(one)
        found.paths = [path]
        return found
    found.agent = "claude-code"
    known = {line["uuid"]: line for line in lines if "uuid" in line and "message" in line}
    parents = _parents(lines)
    followed = {parents[id] for id in known}
    for leaf in (id for id in known if id not in followed):
        way: dict[Any, Mapping[str, Any]] = {}
        at: Any = leaf
        while at in known and at not in way:
            way[at] = known[at]
            at = parents[at]
        found.paths.append(_join_messages([*way.values()][::-1]))
    if not found.paths:
        raise ValueError("it has no message, or its lines form a circle")
    return found


def _parents(lines: list[Mapping[str, Any]]) -> dict[Any, Any]:
    """Return the message before each message; lines of other kinds lie between them.

    Every call of an answer has a line, and its result names that line: they come one after the other here, or each
    call but the last would be a branch of its own.
    """
    parents, others = dict[Any, Any](), dict[Any, Any]()
    answers, ends = dict[Any, Any](), dict[Any, Any]()
    for line in (line for line in lines if "uuid" in line):
        before = others.get(line.get("parentUuid"), line.get("parentUuid"))
        if "message" not in line:
            others[line["uuid"]] = before
            continue
        content = line["message"].get("content")
        parts = content if isinstance(content, list) else ()
        result = any(isinstance(one, dict) and one.get("type") == "tool_result" for one in parts)
        answer = answers.get(before) if result else line["message"].get("id")
        parents[line["uuid"]] = ends.get(answer, before)
        if answer is not None:
            answers[line["uuid"]], ends[answer] = answer, line["uuid"]
    return parents


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
    elif payload.get("type") in ("function_call", "custom_tool_call"):
        yield Said({"role": "assistant", "content": "", "tool_calls": [call_of(payload)]}, at)
    elif payload.get("type") in ("function_call_output", "custom_tool_call_output"):
        yield from (Said(message, at) for message in messages_in([{**payload, "role": "tool"}]))
