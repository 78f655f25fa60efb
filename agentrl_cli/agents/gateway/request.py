"""Requests and replies in one form, whatever their dialect, and the errors in between.

Tools in normal form are OpenAI's nested function schemas with a name, a description and parameters.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agentrl_cli.errors import AgentRLError
from agentrl_cli.types import Generation, Message, ToolCall, ToolSchema

RAW_ARGUMENTS = "_raw_arguments"
"""The only argument of a call that cannot be read: its text, for the agent's own validation to answer."""

TOO_LONG = "context_length_exceeded"
"""The code of a request that does not fit into the context."""


class RequestError(AgentRLError):
    """A request that is not served. `status` is HTTP's, `code` OpenAI's word for it, `param` the field at fault."""

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "",
        param: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.code, self.param = status, code, param


def bad(message: str, param: str = "", code: str = "") -> RequestError:
    """Return a request that is wrong in itself: status 400."""
    return RequestError(message, param=param, code=code)


def too_long(most: int, has: str, param: str = "messages") -> RequestError:
    """Return a request that does not fit into a context of `most` tokens; `has` is how much it has."""
    message = f"This model's maximum context length is {most} tokens; the request has {has}."
    return bad(message, param, TOO_LONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A request in one form, whatever its dialect."""

    model: str
    messages: tuple[Message, ...] = ()
    """Normal form (messages.py). Empty if `prompt` is given."""
    tools: tuple[ToolSchema, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Fields of `Sampling` that the client sets: temperature, top_p, top_k, min_p, repetition_penalty, seed."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    top_logprobs: int | None = None
    """Alternatives per token in the answer; None: no log-probabilities."""
    tool_choice: str = "auto"
    """auto | none | required | function: the last one with `tool_name`."""
    tool_name: str = ""
    parallel: bool = True
    """Whether an answer may hold several calls."""
    schema: Mapping[str, Any] | None = None
    """JSON Schema of the answer's text; None: free text."""
    prompt: str | tuple[int, ...] | None = None
    """Text or ids to continue, in place of messages."""
    echo: bool = False
    """Whether the answer repeats `prompt`."""
    stream: bool = False
    usage: bool = False
    """Whether a stream reports usage at its end, if the dialect leaves that to the client."""
    token_ids: bool = False
    """`return_token_ids` of vLLM."""
    remember: bool = False
    """Whether a later request may continue this one by the answer's id."""
    previous: str = ""
    """Id of the answer that this request continues."""
    session: str = ""
    """The session that the body names."""
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The body."""


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token as the client sees it."""

    text: str
    data: bytes
    logprob: float
    top: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled answer."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    """Those that the client gets; each has arguments."""
    finish: str
    """stop | length | tool_calls"""
    stop_string: str
    """The client's own stop text that ended the turn; empty if none did."""
    generation: Generation
    tokens: tuple[Token, ...] = ()
    """The tokens of `generation`, if log-probabilities are wanted."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answers to a request."""

    id: str
    """Letters and digits; dialects put their own prefix before it."""
    created: int
    model: str
    weights_version: str
    prompt_ids: Sequence[int]
    choices: tuple[Choice, ...]
    cached: int = 0
    """Prompt tokens that were recorded before this request."""

    @property
    def sampled(self) -> int:
        """Sampled tokens of all choices."""
        return sum(len(choice.generation.ids) for choice in self.choices)


def read_tools(value: Any, param: str = "tools") -> tuple[ToolSchema, ...]:
    """Return the functions of a request in normal form, nested or flat.

    Raises RequestError for anything but a function.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise bad(f"{param} must be a list.", param)
    found = tuple(_tool(tool, f"{param}[{number}]") for number, tool in enumerate(value))
    counts = Counter(tool["function"]["name"] for tool in found)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise bad(f"{param} has two functions named {twice!r}.", param)
    return found


def _tool(tool: Any, param: str) -> ToolSchema:
    if not isinstance(tool, Mapping):
        raise bad(f"{param} must be an object.", param)
    kind = tool.get("type") or "function"
    if kind not in ("function", "custom") or (kind == "custom" and "input_schema" not in tool):
        raise bad(
            f"{param}: tools of type {kind!r} are not served; functions are.",
            param,
            "unsupported_tool",
        )
    inner = tool.get("function", tool)
    given = inner if isinstance(inner, Mapping) else {}
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise bad(f"{param}: a function must have a name.", param)
    schema = given.get("parameters", given.get("input_schema")) or {}
    if problem := schema_problem(schema):
        raise bad(
            f"{param}: the parameters of {name!r} are not a JSON Schema: {problem}.",
            param,
            "invalid_schema",
        )
    parameters = {"type": "object", **schema}
    if not isinstance(parameters.get("properties"), Mapping):
        parameters["properties"] = {}
    description = given.get("description") or ""
    body = {"name": name, "description": str(description), "parameters": parameters}
    return {"type": "function", "function": body}


def schema_problem(schema: Any) -> str:
    """Return why a value is not a JSON Schema of an object; empty if it is."""
    if not isinstance(schema, Mapping):
        return "it is not an object"
    if schema.get("type", "object") != "object":
        return f"its type is {schema['type']!r}, not 'object'"
    try:
        return _problem(json.dumps(schema))
    except RecursionError:
        return "it is nested too deeply"


@lru_cache(maxsize=1024)
def _problem(schema: str) -> str:
    """Return the same for a JSON text. An agent sends its tools with every call, and the check takes longer than a
    forward.
    """
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(json.loads(schema))
    except SchemaError as error:
        return str(error.message)[:200]
    return ""


def chosen_tool(name: Any, tools: Sequence[ToolSchema], param: str = "tool_choice") -> str:
    """Return a function named by `tool_choice`. Raises RequestError if the request has no such tool."""
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise bad(f"{param} names {name!r}; the tools are: {', '.join(known) or 'none'}.", param)
    return str(name)
