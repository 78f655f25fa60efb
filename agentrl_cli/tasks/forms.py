"""Converts rows of other projects to AgentRL's form: `id family prompt tools tool_choice` and any other fields.

    verl        prompt (messages), data_source, reward_model.ground_truth, extra_info (tools_kwargs, interaction_kwargs)
    messages    messages, tools (OpenAI schemas), tool_choice
    minimind    conversations (tools in the system message), gt; the last message is a placeholder and is dropped
    humaneval   task_id, prompt (code), entry_point, test, canonical_solution
    gsm8k       question, answer ("… #### 42")
    own         prompt (a text or messages) and any columns; TRL's rows are these

No field is lost: the others stay in `Task.data`, for rewards and tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl_cli.errors import DataError
from agentrl_cli.types.plain import parse_json

Row = dict[str, Any]

CHOICES = ("none", "auto", "required")
"""Values of `tool_choice` besides a named function."""


def detect(row: Mapping[str, Any]) -> str:
    """Detects the form of a row by its fields; "own" if no other fits."""
    if "conversations" in row:
        return "minimind"
    if "messages" in row and "prompt" not in row:
        return "messages"
    if "prompt" in row and ("reward_model" in row or "data_source" in row):
        return "verl"
    if {"prompt", "entry_point", "test"} <= set(row):
        return "humaneval"
    if "question" in row and "answer" in row and "prompt" not in row:
        return "gsm8k"
    return "own"


def normal(row: Mapping[str, Any], form: str = "auto") -> Row:
    """Converts a row. Raises DataError, without file and line, if it does not fit its form."""
    name = detect(row) if form == "auto" else form
    try:
        made = FORMS[name](dict(row))
    except KeyError as error:
        raise DataError(f"the form {name!r} needs the field {error.args[0]!r}.") from error
    return _choice(made)


def verl(row: Row) -> Row:
    """https://verl.readthedocs.io/en/latest/preparation/prepare_data.html; `ground_truth` is lifted to the row."""
    model = row.get("reward_model") or {}
    extra = row.get("extra_info") or {}
    if not isinstance(model, Mapping) or not isinstance(extra, Mapping):
        raise DataError("`reward_model` and `extra_info` must be objects.")
    shown = next((name for name in ("images", "videos", "audios") if row.get(name)), None)
    if shown is not None:
        raise DataError(f"`{shown}` in a prompt are not supported; a tool may return images.")
    if isinstance(row.get("prompt"), list):
        row["prompt"] = _messages(row["prompt"], "prompt")
    row.setdefault("family", str(row.get("data_source") or ""))
    row.setdefault("ground_truth", model.get("ground_truth"))
    if row.get("agent_name") == "single_turn_agent" or row.get("use_tool") is False:
        row["tools"] = []
    return row


def messages(row: Row) -> Row:
    """OpenAI's request form; schemas in `tools` are matched by name, since the pack has the code."""
    row["prompt"] = _messages(row.pop("messages"), "messages")
    row["tools"] = _names(row.get("tools"))
    return row


def minimind(row: Row) -> Row:
    """https://github.com/jingyaogong/minimind, agent RL rows."""
    said = row.pop("conversations")
    if not isinstance(said, list) or len(said) < 2 or not all(isinstance(message, dict) for message in said):
        raise DataError("`conversations` must be a list of at least two messages, the last one a placeholder.")
    if said[-1].get("role") != "assistant":
        raise DataError("the last message of `conversations` must be the assistant's placeholder.")
    schemas = next((message["tools"] for message in said if message.get("tools")), None)
    if isinstance(schemas, str):
        try:
            schemas = parse_json(schemas)
        except ValueError as error:
            raise DataError(f"`tools` of the system message is not JSON: {error}.") from error
    plain = [{key: value for key, value in message.items() if key != "tools"} for message in said[:-1]]
    row["prompt"] = _messages([m for m in plain if m.get("role") != "system" or m.get("content")], "conversations")
    row["tools"] = _names(schemas)
    if not isinstance(row.get("gt", []), list):
        row["gt"] = [row["gt"]]
    return row


def humaneval(row: Row) -> Row:
    """https://github.com/openai/human-eval: code to complete, checked by `check(candidate)` in `test`."""
    if not isinstance(row.get("prompt"), str):
        raise DataError("`prompt` must be the code to complete.")
    row.setdefault("code_prompt", row["prompt"])
    row.setdefault("id", str(row.get("task_id") or "").replace("/", "-") or None)
    row["prompt"] = f"Complete this Python function. Answer with the whole code.\n```python\n{row['prompt']}```"
    return row


def gsm8k(row: Row) -> Row:
    """https://github.com/openai/grade-school-math: the answer follows `####`."""
    if not isinstance(row["question"], str) or not isinstance(row["answer"], (str, int, float)):
        raise DataError("`question` must be a text, and `answer` a text or a number.")
    solution = str(row["answer"])
    row |= {"prompt": row["question"], "solution": solution}
    row["answer"] = solution.rpartition("####")[2].strip().replace(",", "")
    return row


def own(row: Row) -> Row:
    """AgentRL's own form, which is TRL's with an `id`."""
    if isinstance(row.get("prompt"), list):
        row["prompt"] = _arguments(row["prompt"])
    return row


FORMS: dict[str, Callable[[Row], Row]] = {
    "own": own,
    "trl": own,
    "verl": verl,
    "messages": messages,
    "minimind": minimind,
    "humaneval": humaneval,
    "gsm8k": gsm8k,
}


def _messages(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise DataError(f"`{name}` must be a list of messages with role and content.")
    return _arguments(value)


def _arguments(value: list[Any]) -> list[Any]:
    """Messages with their calls' arguments as objects; OpenAI's form has them as JSON texts."""
    return [_called(said) if isinstance(said, dict) and said.get("tool_calls") else said for said in value]


def _called(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    if not isinstance(message["tool_calls"], list):
        raise DataError("`tool_calls` of a message must be a list.")
    for call in message["tool_calls"]:
        given = call.get("function") if isinstance(call, dict) else None
        function = dict(given) if isinstance(given, Mapping) else {}
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = parse_json(function["arguments"])
            except ValueError as error:
                raise DataError(f"the arguments of a call of {function.get('name')!r} are not JSON.") from error
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), dict):
            raise DataError("a call in `tool_calls` has a function with name and arguments.")
        calls.append({**call, "type": "function", "function": function})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _names(schemas: Any) -> list[str] | None:
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


def _choice(row: Row) -> Row:
    """Check `tool_choice`: none, auto, required, or {"type": "function", "function": {"name": …}}."""
    choice = row.get("tool_choice")
    if choice is None or choice in CHOICES:
        return row
    name = named(choice)
    if name is None:
        raise DataError(f"`tool_choice` must be {', '.join(CHOICES)} or name a function, not {choice!r}.")
    if isinstance(row.get("tools"), list) and name not in row["tools"]:
        raise DataError(f"`tool_choice` names {name!r}, which is not among the row's tools.")
    return row


def named(choice: Any) -> str | None:
    """The function that a `tool_choice` names; None if it names none."""
    if not isinstance(choice, Mapping) or not isinstance(choice.get("function"), Mapping):
        return None
    name = choice["function"].get("name")
    return name if isinstance(name, str) and name else None
