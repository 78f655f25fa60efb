"""Messages as others write them, as OpenAI's chats have them, and session logs of coding agents.

GenAI conventions {"role", "parts"}, OpenInference {"message": {…}}, Anthropic's content blocks, OpenAI's own form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_cli.plugins.traces.atif_read import stamp
from agentrl_cli.plugins.traces.trace import Said, Trace, tool_call
from agentrl_cli.store.codec import dumps
from agentrl_cli.types import Message
from agentrl_cli.types.plain import parse_json

ROLES = {
    "developer": "system",
    "human": "user",
    "model": "assistant",
    "ai": "assistant",
    "function": "tool",
}
KNOWN = ("system", "user", "assistant", "tool")
LISTS = ("messages", "input_messages", "choices")
FIELDS = {*LISTS, "content", "contents", "parts", "tool_calls", "function_call"}
"""One of them at least is in a message, or its role is known."""
_CUT = re.compile(r'\s*\[?\s*\{\s*"(?:role|parts|content|message|messages|type)"')


def messages_in(value: Any, role: str = "user") -> Iterator[Message]:
    """Yield the messages of a value; a text is one of `role`. Raises ValueError and its like."""
    if isinstance(value, str):
        try:
            found = parse_json(value)
        except ValueError as error:
            if _CUT.match(value):
                raise ValueError("its messages are JSON that is damaged or cut") from error
            found = None
        if not _has_messages(found):
            if value and found not in ([], {}):
                yield {"role": role, "content": value}
            return
        value = found
    if value and not _has_messages(value):  # an answer in a form that was asked for
        yield {"role": role, "content": dumps(value)}
    elif isinstance(value, list):
        for item in value:
            yield from messages_in(item, role)
    elif isinstance(value, dict):
        for name in LISTS:
            if isinstance(value.get(name), list):
                yield from messages_in(value[name], role)
                return
        yield from _read(
            value["message"] if isinstance(value.get("message"), dict) else value, role
        )


def _has_messages(value: Any) -> bool:
    """Whether a JSON value is a message, or a list with one, and no other document."""
    if isinstance(value, list):
        return any(map(_has_messages, value))
    if not isinstance(value, dict):
        return False
    known = not FIELDS.isdisjoint(value) or isinstance(value.get("message"), dict)
    return known or str(value.get("role")) in (*KNOWN, *ROLES)


def _read(given: Mapping[str, Any], role: str) -> Iterator[Message]:
    """Yield one message, and the answers of tools that it carries as messages of their own."""
    said = str(given.get("role") or role)
    said = ROLES.get(said, said if said in KNOWN else role)
    texts, thoughts, calls, answers = [], [], [], list[Message]()
    parts = given.get("parts", given.get("contents", given.get("content")))
    for part in parts if isinstance(parts, list) else [parts]:
        part = part.get("message_content", part) if isinstance(part, dict) else {"text": part}
        kind = str(part.get("type", "text"))
        if kind in ("tool_call", "tool_use"):
            calls.append(call_of(part))
        elif kind in ("tool_call_response", "tool_result"):
            answers.append(answer_of(part))
        elif kind in ("reasoning", "thinking"):
            thoughts.append(_text(part.get("content", part.get("thinking"))))
        else:
            found = part.get("text", part.get("content", None if "type" in part else part))
            texts.append(_text(found) if kind.endswith("text") or found else f"[{kind}]")
    old = (
        [given["function_call"]] if given.get("function_call") else []
    )  # OpenAI's form before `tools`
    calls += [call_of(call.get("tool_call", call)) for call in given.get("tool_calls") or old]
    message: Message = {"role": said, "content": "\n".join(filter(None, texts))}
    thoughts += [given["reasoning_content"]] if given.get("reasoning_content") else []
    if any(thoughts):
        message["reasoning_content"] = "\n".join(map(_text, filter(None, thoughts)))
    message |= {"tool_calls": calls} if calls else {}
    if said == "tool" and not answers:
        answers.append(answer_of({**given, "content": message["content"]}))
    elif message["content"] or calls or not answers:
        yield message
    yield from answers


def call_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of any form. Raises ValueError if it has no name."""
    function = given.get("function") or given
    name = function.get("name")
    if not isinstance(name, str):
        raise ValueError("a call has no name")
    found = function.get("arguments", function.get("input"))
    error = {}
    if isinstance(found, str):
        try:
            found = parse_json(found)
        except ValueError:
            error = {"error": "its arguments are not JSON"} if "arguments" in function else {}
            found = {"input": found}
    arguments = found if isinstance(found, dict) else {} if found is None else {"input": found}
    return tool_call(name, arguments, _text(given.get("call_id") or given.get("id"))) | error


def answer_of(given: Mapping[str, Any]) -> Message:
    """Return the answer of a tool of any form."""
    names = ("response", "result", "output", "content")
    found = next((given[name] for name in names if given.get(name) is not None), "")
    if isinstance(found, list) and all(isinstance(one, dict) and "text" in one for one in found):
        found = "\n".join(str(one["text"]) for one in found)
    ids = ("tool_call_id", "tool_use_id", "call_id", "id")
    id = next((given[name] for name in ids if given.get(name)), "")
    message: Message = {"role": "tool", "content": _text(found), "tool_call_id": _text(id)}
    return message | ({"is_error": True} if given.get("is_error") is True else {})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else dumps(value)


CODEX = ("session_meta", "response_item", "event_msg", "turn_context")
CLAUDE = ("summary", "file-history-snapshot", "queue-operation")
"""Types of lines that Claude Code writes before the first message, too."""


def session_of(value: Mapping[str, Any], before: str) -> str | None:
    """Return the session of a line; `before` for one that does not name it, None for a line of another form.

    Empty for a line of Claude Code, such as a summary, that lies before the first message.
    """
    if value.get("type") in CODEX and isinstance(value.get("payload"), dict):
        payload = value["payload"]
        return str(payload["id"]) if value["type"] == "session_meta" else before or "session"
    if isinstance(value.get("sessionId"), str) and "uuid" in value:
        return str(value["sessionId"])
    known = before and isinstance(value.get("type"), str)
    return before if known or value.get("type") in CLAUDE else None


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
    elif payload.get("type") == "reasoning" and payload.get("summary"):
        thought = "\n".join(one["text"] for one in payload["summary"])
        yield Said({"role": "assistant", "content": "", "reasoning_content": thought}, at)
    elif payload.get("type") in ("function_call", "custom_tool_call"):
        yield Said({"role": "assistant", "content": "", "tool_calls": [call_of(payload)]}, at)
    elif payload.get("type") == "local_shell_call":
        call = call_of({**payload, "name": "local_shell", "arguments": payload.get("action")})
        yield Said({"role": "assistant", "content": "", "tool_calls": [call]}, at)
    elif payload.get("type") in ("function_call_output", "custom_tool_call_output"):
        yield from (Said(message, at) for message in messages_in([{**payload, "role": "tool"}]))
