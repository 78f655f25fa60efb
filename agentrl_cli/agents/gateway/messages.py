"""Messages in normal form, and their keys: two messages mean the same if their keys are equal.

Normal form: `role` system, user, assistant or tool; `content` a text; an assistant's `tool_calls` with arguments as
objects and its `reasoning_content` if it has any; a tool's `tool_call_id` and the `name` of the tool it answers for.
Clients write a message in many ways: null content, lists of parts, arguments with other spaces or key order, extra
keys, fresh call ids, a mixed turn split in two. A key contains none of that.

`require_room` finds whether a request can fit into a context before anything of it is rendered: a refusal takes no more
work than reading the request. One that passes may still be too long by a few times.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from agentrl_cli.agents.gateway.request import RAW_ARGUMENTS, bad, too_long
from agentrl_cli.chat.thinking import BLOCKS
from agentrl_cli.chat.tokenizer import BaseTokenizer
from agentrl_cli.types import Message, ToolSchema

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "function": "tool"},
}
"""A client's word for a role to the normal one."""


class Key(NamedTuple):
    """The meaning of a message."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as canonical JSON) of each call."""


def text_of(content: Any, param: str, joiner: str = "\n") -> str:
    """Return the text of a content: a string, null, or a list of text parts. Raises RequestError for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad(f"{param} must be a string or a list of parts.", param)
    return joiner.join(_part(part, param) for part in content)


def _part(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return text
        raise bad(f"{param}: the text of a part must be a string.", param)
    if kind in ("image_url", "input_image", "image"):
        raise bad(
            "Images are not served: this model reads text alone.", param, "image_not_supported"
        )
    raise bad(
        f"{param}: parts of type {kind!r} are not served; text parts are.",
        param,
        "unsupported_content",
    )


def message_list(value: Any, param: str = "messages") -> list[Mapping[str, Any]]:
    """Return a list of objects. Raises RequestError if it is anything else, or empty."""
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(item, Mapping) for item in value)
    ):
        raise bad(f"{param} must be a list of objects, at least one.", param)
    return value


def read_message(message: Mapping[str, Any], param: str) -> Message:
    """Return a chat-completions message in normal form. Raises RequestError."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = "use system, user, assistant or tool"
        raise bad(f"{param}: the role {role!r} is unknown; {known}.", param)
    text = text_of(message.get("content"), param, "" if role == "assistant" else "\n")
    match ROLES[role]:
        case "tool":
            call_id, name = message.get("tool_call_id"), message.get("name")
            return tool_message(str(call_id or ""), text, str(name or ""))
        case "assistant":
            text = text or text_of(message.get("refusal"), param)
            return assistant_message(text, _calls(message, param), _reasoning(message))
        case normal:
            return {"role": normal, "content": text}


def _calls(message: Mapping[str, Any], param: str) -> list[tuple[str, str, Any]]:
    found = message.get("tool_calls") or []
    if old := message.get("function_call"):
        found = [*found, {"id": "", "function": old}]
    out = []
    for call in found:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not function.get("name"):
            raise bad(f"{param}: each tool call must have a function with a name.", param)
        out.append((str(call.get("id") or ""), str(function["name"]), function.get("arguments")))
    return out


def _reasoning(message: Mapping[str, Any]) -> str | None:
    """Return an assistant's reasoning, under any of the names it is sent with; None if the client did not send it."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(name), str):
            return str(message[name])
    details = message.get("reasoning_details")
    if isinstance(details, list):
        texts = [part.get("text") for part in details if isinstance(part, Mapping)]
        return "".join(text for text in texts if isinstance(text, str))
    return None


def assistant_message(
    text: str, calls: Sequence[tuple[str, str, Any]], reasoning: str | None
) -> Message:
    """Return an assistant's message in normal form. `calls`: (id, name, arguments as text or object)."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": id_,
                "type": "function",
                "function": {"name": name, "arguments": arguments_of(arguments)},
            }
            for id_, name, arguments in calls
        ]
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


def tool_message(call_id: str, text: str, name: str = "") -> Message:
    """Return a tool's answer in normal form."""
    return {
        "role": "tool",
        "content": text,
        "tool_call_id": call_id,
        **({"name": name} if name else {}),
    }


def arguments_of(value: Any) -> dict[str, Any]:
    """Return a call's arguments as an object; what cannot be read as one stands under `_raw_arguments`."""
    if isinstance(value, Mapping):
        return dict(value)
    try:
        found = json.loads(value) if value else {}
    except (TypeError, ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {RAW_ARGUMENTS: str(value)}


def merge_messages(messages: Iterable[Message]) -> list[Message]:
    """Merge neighbouring assistant messages, and name tool messages after the calls they answer."""
    out: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and not message.get("name"):
            message = {**message, "name": names.get(message["tool_call_id"], "tool")}
        if out and message["role"] == "assistant" == out[-1]["role"]:
            both: Message = {**out[-1], "content": out[-1]["content"] + message["content"]}
            for key, empty in (("tool_calls", []), ("reasoning_content", "")):
                if key in out[-1] or key in message:
                    both[key] = out[-1].get(key, empty) + message.get(key, empty)
            out[-1] = both
        else:
            out.append(message)
    return out


def key_of(message: Message) -> Key:
    """Return the key of a message in normal form."""
    text = message["content"]
    if message["role"] == "assistant":
        text = split_reasoning(text)[1]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return Key(
        message["role"],
        text.strip(),
        tuple((call["name"], canonical(call["arguments"])) for call in calls),
    )


def without_echo(message: Message) -> Message | None:
    """Return an assistant's message without the list of calls that smolagents' CodeAgent adds to the model's own text.

    The list repeats the code that stands in the text. None without text before it: then it is the whole message.
    """
    text, echo, listed = message["content"].partition("Calling tools:\n[{'id': ")
    text = text.rstrip()
    return {**message, "content": text} if text and echo and listed.rstrip().endswith("]") else None


def tools_key(tools: Sequence[ToolSchema]) -> str:
    """Return the key of a request's tools, which belong to the root of its tree."""
    return canonical([tool["function"] for tool in tools])


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def split_reasoning(text: str, opened: bool = False) -> tuple[str, str]:
    """Return (reasoning, rest) of an assistant's text that begins with a block of thinking.

    `opened`: the generation prompt opened the block. A block that is not closed is all reasoning.
    """
    bare = text.lstrip()
    for start, end in BLOCKS:
        if bare.startswith(start):
            inside, _, rest = bare.removeprefix(start).partition(end)
            return inside.strip(), rest.lstrip()
    if opened:
        end = BLOCKS[0][1]
        inside, mark, rest = text.partition(end)
        return inside.strip(), rest.lstrip() if mark else ""
    return "", text


ORDINARY = 4
"""Characters per token, up to which a text is not counted: most texts have fewer."""
SLACK = 2
"""How many times too long a text must be counted to be refused: slices are tokenized otherwise than the whole."""
SLICE = 2**14
"""Characters that are tokenized at a time to count a text, or 64 times the longest token."""
MOST_CHANGES = 32
"""Changes of role between two answers: each costs a rendering."""


def require_room(
    tokenizer: BaseTokenizer,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    room: int,
    most: int,
) -> None:
    """Raise RequestError if messages and tools are too long for `room` of a context's `most` tokens."""
    if len(messages) > room:
        raise too_long(most, f"{len(messages)} messages")
    if sum(1 for _ in groupby(messages, lambda message: message["role"])) > MOST_CHANGES:
        raise bad(
            f"Between two answers the role changes at most {MOST_CHANGES} times here.", "messages"
        )
    calls = [
        canonical(call["function"])
        for message in messages
        for call in message.get("tool_calls", ())
    ]
    texts = [
        *(message["content"] for message in messages),
        *calls,
        *([canonical(tools)] if tools else []),
    ]
    require_short(tokenizer, texts, room, most)


def require_short(
    tokenizer: BaseTokenizer, texts: Sequence[str], room: int, most: int, param: str = "messages"
) -> None:
    """Raise RequestError if texts are too long for `room` of a context's `most` tokens."""
    length, left, size = sum(map(len, texts)), room * SLACK, max(SLICE, 64 * tokenizer.longest)
    refusal = too_long(most, f"{length} characters, which take more", param)
    if length > room * tokenizer.longest:
        raise refusal
    if length > room * ORDINARY:
        for text in texts:
            for start in range(0, len(text), size):
                left -= len(tokenizer.encode(text[start : start + size]))
                if left < 0:
                    raise refusal
