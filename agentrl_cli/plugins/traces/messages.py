"""Messages as others write them, as OpenAI's chats have them.

GenAI conventions {"role", "parts"}, OpenInference {"message": {…}}, Anthropic's content blocks, OpenAI's own form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_cli.plugins.traces.trace import tool_call
from agentrl_cli.store.codec import dumps
from agentrl_cli.types import Message
from agentrl_cli.types.plain import parse_json

ROLES = {"developer": "system", "human": "user", "model": "assistant", "ai": "assistant"}
KNOWN = ("system", "user", "assistant", "tool")
LISTS = ("messages", "input_messages", "choices")
FIELDS = {*LISTS, "content", "contents", "parts", "tool_calls"}
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
    for call in given.get("tool_calls") or ():
        calls.append(call_of(call.get("tool_call", call)))
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
    return tool_call(name, arguments, _text(given.get("id", given.get("call_id")))) | error


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
