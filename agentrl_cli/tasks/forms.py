"""Converts rows of other projects to AgentRL's form: `id family prompt tools tool_choice` and any other fields.

    verl        prompt (messages), data_source, reward_model.ground_truth, extra_info (tools_kwargs, interaction_kwargs)
    messages    messages, tools (OpenAI schemas), tool_choice
    minimind    conversations (tools in the system message), gt; the last message is a placeholder and is dropped
    mbpp        task_id, text (or prompt), code, test_list, test_setup_code (or test_imports)
    spider      db_id, question, query
    humaneval   task_id, prompt (code), entry_point, test, canonical_solution
    bfcl        question (turns of messages), function (schemas), ground_truth of possible_answer/
    gsm8k       question, answer ("… #### 42")
    math        problem, solution ("… \\boxed{42} …"), answer, subject or type
    own         prompt (a text or messages) and any columns; TRL's rows are these

No field is lost: the others stay in `Task.data`, for rewards and tools. `images` and `videos` become parts of
the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl_cli.errors import DataError
from agentrl_cli.tasks.media import with_media
from agentrl_cli.types.plain import parse_json

Row = dict[str, Any]

VERL_AGENTS = ("single_turn_agent", "tool_agent")
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
    if "test_list" in row and ("text" in row or "prompt" in row):
        return "mbpp"
    if {"db_id", "question", "query"} <= set(row) and "prompt" not in row:
        return "spider"
    if {"question", "function"} <= set(row) and "prompt" not in row:
        return "bfcl"
    if "question" in row and "answer" in row and "prompt" not in row:
        return "gsm8k"
    if {"problem", "solution"} <= set(row):
        return "math"
    return "own"


def normal(row: Mapping[str, Any], form: str = "auto") -> Row:
    """Converts a row. Raises DataError, without file and line, if it does not fit its form."""
    name = detect(row) if form == "auto" else form
    if row.get("audios"):
        raise DataError("`audios` in a prompt are not supported.")
    try:
        made = with_media(FORMS[name](dict(row)))
    except KeyError as error:
        raise DataError(f"the form {name!r} needs the field {error.args[0]!r}.") from error
    return _choice(made)


def verl(row: Row) -> Row:
    """https://verl.readthedocs.io/en/latest/preparation/prepare_data.html; `ground_truth` is lifted to the row."""
    model = row.get("reward_model") or {}
    extra = row.get("extra_info") or {}
    if not isinstance(model, Mapping) or not isinstance(extra, Mapping):
        raise DataError("`reward_model` and `extra_info` must be objects.")
    if isinstance(row.get("prompt"), list):
        row["prompt"] = _messages(row["prompt"], "prompt")
    row.setdefault("family", str(row.get("data_source") or ""))
    row.setdefault("ground_truth", model.get("ground_truth"))
    agent, kwargs = row.get("agent_name"), extra.get("tools_kwargs")
    if agent not in (None, *VERL_AGENTS):
        raise DataError(
            f"`agent_name` is {agent!r}, one of verl's own agent loops; {' and '.join(VERL_AGENTS)} run here."
        )
    if agent == "single_turn_agent" or row.get("use_tool") is False:
        row["tools"] = []
    elif extra.get("need_tools_kwargs") and isinstance(kwargs, Mapping) and kwargs:
        row.setdefault(
            "tools", list(kwargs)
        )  # verl shows a row the tools that it has arguments for
    return row


def messages(row: Row) -> Row:
    """OpenAI's request form; schemas in `tools` are matched by name, since the pack has the code."""
    row["prompt"] = _messages(row.pop("messages"), "messages")
    schemas = row.get("tools")
    row["tools"] = _names(schemas)
    row["tool_schemas"] = [schema for schema in schemas or () if isinstance(schema, Mapping)]
    return row


def minimind(row: Row) -> Row:
    """https://github.com/jingyaogong/minimind: agent RL and RLAIF rows. The last message is dropped, as in minimind."""
    said, schemas = conversation(row.pop("conversations"), None)
    if len(said) < 2:
        raise DataError(
            "`conversations` must be a list of at least two messages, the last one a placeholder."
        )
    row["prompt"] = plain_messages(said[:-1])
    row["tools"] = _names(schemas) if schemas else None
    row["tool_schemas"] = schemas
    if not isinstance(row.get("gt", []), list):
        row["gt"] = [row["gt"]]
    return row


SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""Roles under `from`."""


def conversation(said: Any, tools: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages with roles, and the function schemas of the row or of its system message (there as JSON text).

    Messages without a role are the user's and the assistant's in turn.
    """
    if (
        not isinstance(said, list)
        or not said
        or not all(isinstance(message, Mapping) for message in said)
    ):
        raise DataError("a conversation must be a list of at least two messages.")
    kept: list[dict[str, Any]] = []
    for number, message in enumerate(said):
        tools = tools or message.get("tools") or message.get("functions")
        role = message.get("role") or SHAREGPT.get(message.get("from"), message.get("from"))
        content = message.get("content", message.get("value"))
        rest = {
            key: value
            for key, value in message.items()
            if key not in ("tools", "functions", "from", "value")
        }
        kept.append({**rest, "role": role or ("user", "assistant")[number % 2], "content": content})
    kept = [message for message in kept if message["role"] != "system" or message["content"]]
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise DataError(f"`tools` of the system message is not JSON: {error}.") from error
    _names(tools or [])
    return kept, list(tools or [])


def plain_messages(said: list[dict[str, Any]]) -> list[Any]:
    """Messages with text contents, calls as objects, and no calls where the list is empty."""
    kept = [
        {key: value for key, value in message.items() if key != "tool_calls" or value}
        for message in said
    ]
    return _messages(
        [{**message, "content": message.get("content") or ""} for message in kept], "conversations"
    )


def humaneval(row: Row) -> Row:
    """https://github.com/openai/human-eval: code to complete, checked by `check(candidate)` in `test`."""
    if not isinstance(row.get("prompt"), str):
        raise DataError("`prompt` must be the code to complete.")
    row.setdefault("code_prompt", row["prompt"])
    row.setdefault("id", str(row.get("task_id") or "").replace("/", "-") or None)
    row["prompt"] = (
        f"Complete this Python function. Answer with the whole code.\n```python\n{row['prompt']}```"
    )
    return row


def mbpp(row: Row) -> Row:
    """https://github.com/google-research/google-research/tree/master/mbpp, full and sanitized."""
    asked, tests = row.get("prompt") or row.get("text"), row["test_list"]
    if (
        not isinstance(asked, str)
        or not isinstance(tests, list)
        or not all(isinstance(test, str) for test in tests)
    ):
        raise DataError("`text` (or `prompt`) must be a text, and `test_list` a list of texts.")
    shown = "\n".join(tests)
    row.setdefault("id", f"mbpp-{row['task_id']}" if row.get("task_id") is not None else None)
    row["prompt"] = (
        f"{asked}\nAnswer with the whole code. It should pass these tests:\n```python\n{shown}\n```"
    )
    return row


def spider(row: Row) -> Row:
    """https://yale-lily.github.io/spider: the database is `database/DB_ID/DB_ID.sqlite` beside task.yaml."""
    if not all(isinstance(row[name], str) for name in ("db_id", "question", "query")):
        raise DataError("`db_id`, `question` and `query` must be texts.")
    row.setdefault("database", f"database/{row['db_id']}/{row['db_id']}.sqlite")
    row.setdefault("family", row["db_id"])
    row["prompt"] = row["question"]
    return row


def bfcl(row: Row) -> Row:
    """https://gorilla.cs.berkeley.edu/leaderboard.html: calls of functions that only the row declares, of one turn."""
    asked, functions = row["question"], row["function"]
    turns = asked if asked and isinstance(asked, list) and isinstance(asked[0], list) else [asked]
    if len(turns) != 1:
        raise DataError(
            "`question` must have one turn: multi-turn rows need BFCL's own classes of tools."
        )
    if not isinstance(
        row.setdefault("ground_truth", [] if "irrelevance" in str(row.get("id")) else None), list
    ):
        raise DataError("`ground_truth` must be a list: that of the same id in possible_answer/.")
    row["prompt"] = _messages(turns[0], "question")
    row["tool_schemas"] = functions if isinstance(functions, list) else [functions]
    _names(row["tool_schemas"])
    return row


def gsm8k(row: Row) -> Row:
    """https://github.com/openai/grade-school-math: the answer follows `####`."""
    if not isinstance(row["question"], str) or not isinstance(row["answer"], (str, int, float)):
        raise DataError("`question` must be a text, and `answer` a text or a number.")
    solution = str(row["answer"])
    row |= {"prompt": row["question"], "solution": solution}
    row["answer"] = solution.rpartition("####")[2].strip().replace(",", "")
    return row


def math(row: Row) -> Row:
    """https://github.com/hendrycks/math: the answer is in the last `\\boxed` of the solution, unless it is a column."""
    if not isinstance(row["problem"], str) or not isinstance(row["solution"], str):
        raise DataError("`problem` and `solution` must be texts.")
    row["prompt"] = row["problem"]
    row.setdefault("family", str(row.get("subject") or row.get("type") or ""))
    if "answer" not in row:
        depth, start = 1, row["solution"].rfind("\\boxed{") + len("\\boxed{")
        for end in range(start, len(row["solution"])):
            depth += {"{": 1, "}": -1}.get(row["solution"][end], 0)
            if not depth:
                row["answer"] = row["solution"][start:end]
                break
        else:
            raise DataError("`solution` has no \\boxed{…}, and there is no `answer`.")
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
    "mbpp": mbpp,
    "spider": spider,
    "bfcl": bfcl,
    "gsm8k": gsm8k,
    "math": math,
}


def _messages(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise DataError(f"`{name}` must be a list of messages with role and content.")
    return _arguments(value)


def _arguments(value: list[Any]) -> list[Any]:
    """Messages with their calls' arguments as objects; OpenAI's form has them as JSON texts."""
    return [
        _called(said) if isinstance(said, dict) and said.get("tool_calls") else said
        for said in value
    ]


def _called(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    listed = message["tool_calls"]
    if isinstance(listed, str):  # minimind's SFT rows have them as JSON text
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
        named_by = {key: function[key] for key in ("name", "arguments")}
        calls.append(
            {
                **({"id": call["id"]} if "id" in call else {}),
                "type": "function",
                "function": named_by,
            }
        )
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
        raise DataError(
            f"`tool_choice` must be {', '.join(CHOICES)} or name a function, not {choice!r}."
        )
    if isinstance(row.get("tools"), list) and name not in row["tools"]:
        raise DataError(f"`tool_choice` names {name!r}, which is not among the row's tools.")
    return row


def named(choice: Any) -> str | None:
    """Return the function that a `tool_choice` names; None if it names none."""
    if not isinstance(choice, Mapping) or not isinstance(choice.get("function"), Mapping):
        return None
    name = choice["function"].get("name")
    return name if isinstance(name, str) and name else None
