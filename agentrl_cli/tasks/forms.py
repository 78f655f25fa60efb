"""Rows in AgentRL's form, `id family prompt tools tool_choice` and any other fields, from other forms.

    messages    messages, tools (OpenAI schemas), tool_choice
    gsm8k       question, answer ("… #### 42")
    math        problem, solution ("… \\boxed{42} …"), answer, subject or type
    own         prompt (a text or messages) and any columns

Plugins bring the forms of other projects and data sets. No field is lost: the others stay in `Task.data`, for rewards
and tools. `images` and `videos` become parts of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from agentrl_cli.errors import DataError, EnvError
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers
from agentrl_cli.tasks.media import with_media
from agentrl_cli.types.plain import parse_json

Row = dict[str, Any]

CHOICES = ("none", "auto", "required")
"""Values of `tool_choice` besides a named function."""


class Form(NamedTuple):
    """A form of rows."""

    fits: Callable[[Mapping[str, Any]], bool]
    """Whether a row has it, by its fields."""
    convert: Callable[[Row], Row]
    """Returns a row in our form. A KeyError is a field that is missing, a DataError anything else that is wrong."""


@cache
def all_forms() -> dict[str, Form]:
    """Return every form by its name, in the order in which they are tried; those of plugins first."""
    return {name: resolve("forms", {}, to) for name, to in offers("forms").items()} | FORMS


def detect(row: Mapping[str, Any]) -> str:
    """Return the name of a row's form; "own" if no other fits."""
    return next(name for name, form in all_forms().items() if form.fits(row))


def normal(row: Mapping[str, Any], form: str = "auto") -> Row:
    """Return a row in our form. Raises DataError, without file and line, if it does not fit its form."""
    name = detect(row) if form == "auto" else form
    if row.get("audios"):
        raise DataError("`audios` in a prompt are not supported.")
    try:
        return with_media(all_forms()[name].convert(dict(row)))
    except KeyError as error:
        raise DataError(f"the form {name!r} needs the field {error.args[0]!r}.") from error
    except EnvError as error:
        raise DataError(f"an image or a video of the row: {error.message}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"a value of the row does not fit the form {name!r}: {error}.") from error


def messages(row: Row) -> Row:
    """Read OpenAI's request form; schemas in `tools` are matched by name, since the pack has the code."""
    row["prompt"] = message_list(row.pop("messages"), "messages")
    schemas = row.get("tools")
    row["tools"] = tool_names(schemas)
    row["tool_schemas"] = [schema for schema in schemas or () if isinstance(schema, Mapping)]
    return row


SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""Roles under `from`."""


def conversation(said: Any, tools: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages with roles, and the function schemas of the row or of its system message (there as JSON text).

    Messages without a role are the user's and the assistant's in turn.
    """
    said = _from_text(said, "the conversation")
    if (
        not isinstance(said, list)
        or not said
        or not all(isinstance(message, Mapping) for message in said)
    ):
        raise DataError("a conversation must be a list of at least two messages.")
    kept: list[dict[str, Any]] = []
    for number, message in enumerate(said):
        tools = tools or message.get("tools") or message.get("functions")
        role, speaker = message.get("role"), message.get("from")
        if role in (None, ""):
            role = SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker
        if role in (None, ""):
            role = ("user", "assistant")[number % 2]
        if not isinstance(role, str):
            raise DataError(f"the role of message {number + 1} must be a text, not {role!r}.")
        content = message.get("content", message.get("value"))
        rest = {
            key: value
            for key, value in message.items()
            if key not in ("tools", "functions", "from", "value")
        }
        kept.append({**rest, "role": role, "content": content})
    kept = [message for message in kept if message["role"] != "system" or message["content"]]
    tools = _from_text(tools, "`tools` of the system message")
    tool_names(tools or [])
    return kept, list(tools or [])


def _from_text(value: Any, name: str) -> Any:
    """Return a value that a column of texts holds as JSON. Raises DataError for another text."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{name} is not JSON: {error}.") from error


def plain_messages(said: list[dict[str, Any]]) -> list[Any]:
    """Return messages with text contents, calls as objects, and no calls where the list is empty."""
    kept = [
        {key: value for key, value in message.items() if key != "tool_calls" or value}
        for message in said
    ]
    return message_list(
        [{**message, "content": message.get("content") or ""} for message in kept], "conversations"
    )


def gsm8k(row: Row) -> Row:
    """Read https://github.com/openai/grade-school-math: the answer follows `####`."""
    if not isinstance(row["question"], str) or not isinstance(row["answer"], (str, int, float)):
        raise DataError("`question` must be a text, and `answer` a text or a number.")
    solution = str(row["answer"])
    row |= {"prompt": row["question"], "solution": solution}
    row["answer"] = solution.rpartition("####")[2].strip().replace(",", "")
    return row


def math(row: Row) -> Row:
    """Read https://github.com/hendrycks/math: without `answer` it is in the last `\\boxed` of the solution."""
    if not isinstance(row["problem"], str) or not isinstance(row["solution"], str):
        raise DataError("`problem` and `solution` must be texts.")
    row["prompt"] = row["problem"]
    row.setdefault("family", str(row.get("subject") or row.get("type") or ""))
    if "answer" not in row:
        box = find_braces(row["solution"], row["solution"].rfind("\\boxed{"))
        if box is None:
            raise DataError("`solution` has no \\boxed{…}, and there is no `answer`.")
        row["answer"] = box[len("\\boxed{") : -1]
    return row


def find_braces(text: str, start: int) -> str | None:
    """Return the part from `start` to the brace that closes its first; None if not closed, or `start` is below 0."""
    depth = 0
    for place in range(start, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0 and text[place] == "}":
            return text[start : place + 1]
    return None


def read_own(row: Row) -> Row:
    """Read AgentRL's own form."""
    if isinstance(row.get("prompt"), list):
        row["prompt"] = _read_arguments(row["prompt"])
    return row


FORMS: dict[str, Form] = {
    "messages": Form(lambda row: "messages" in row and "prompt" not in row, messages),
    "gsm8k": Form(lambda row: {"question", "answer"} <= set(row) and "prompt" not in row, gsm8k),
    "math": Form(lambda row: {"problem", "solution"} <= set(row), math),
    "own": Form(lambda row: True, read_own),
}


def message_list(value: Any, name: str) -> list[Any]:
    """Return messages with their calls' arguments as objects. Raises DataError for anything but a list."""
    if not isinstance(value, list) or not value:
        raise DataError(f"`{name}` must be a list of messages with role and content.")
    return _read_arguments(value)


def _read_arguments(value: list[Any]) -> list[Any]:
    """Return messages with their calls' arguments as objects; OpenAI's form has them as JSON texts."""
    return [
        _read_calls(said) if isinstance(said, dict) and said.get("tool_calls") else said
        for said in value
    ]


def _read_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls, listed = [], message["tool_calls"]
    if isinstance(listed, str):  # some rows have them as JSON text
        try:
            listed = parse_json(listed)
        except ValueError as error:
            raise DataError(f"`tool_calls` of a message is not JSON: {error}.") from error
    if not isinstance(listed, list):
        raise DataError("`tool_calls` of a message must be a list.")
    for call in listed:
        given = call.get("function", call) if isinstance(call, dict) else None
        function = dict(given) if isinstance(given, Mapping) else {}
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = parse_json(function["arguments"])
            except ValueError as error:
                raise DataError(
                    f"the arguments of a call of {function.get('name')!r} are not JSON."
                ) from error
        if not isinstance(function.get("name"), str) or not isinstance(
            function.get("arguments"), dict
        ):
            raise DataError("a call in `tool_calls` has a function with name and arguments.")
        calls.append(
            {
                **({"id": call["id"]} if "id" in call else {}),
                "type": "function",
                "function": {key: function[key] for key in ("name", "arguments")},
            }
        )
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def tool_names(schemas: Any) -> list[str] | None:
    """Return the names in a list of schemas or names; None without one. Raises DataError."""
    if schemas is None:
        return None
    if not isinstance(schemas, list):
        raise DataError("`tools` must be a list of function schemas, or of names.")
    names = []
    for schema in schemas:
        name = schema if isinstance(schema, str) else None
        if isinstance(schema, Mapping):
            inner = schema.get("function") or schema
            name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str) or not name:
            raise DataError("a schema in `tools` has no name.")
        names.append(name)
    return names


def list_declared(row: Mapping[str, Any], tools: Collection[str]) -> Iterator[str]:
    """Yield the names of the functions that a row declares, if the pack has the tool `declared`."""
    given = row.get("tool_schemas") if "declared" in tools else None
    for schema in given if isinstance(given, list) else [given]:
        inner = schema.get("function") or schema if isinstance(schema, Mapping) else None
        if isinstance(inner, Mapping) and inner.get("name"):
            yield str(inner["name"])


def named_function(choice: Any) -> str | None:
    """Return the function that a `tool_choice` names; None if it names none."""
    if not isinstance(choice, Mapping) or not isinstance(choice.get("function"), Mapping):
        return None
    name = choice["function"].get("name")
    return name if isinstance(name, str) and name else None
