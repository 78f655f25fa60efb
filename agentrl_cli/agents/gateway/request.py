"""Requests and replies in one form, whatever their dialect, and the errors in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.errors import AgentRLError
from agentrl_cli.types import Generation, Message, ToolSchema

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
        retry: bool = False,
    ) -> None:
        """Set the fields; `retry`: the same request may succeed later; clients are asked not to repeat any other."""
        super().__init__(message, hint=hint)
        self.status, self.code, self.param, self.retry = status, code, param, retry


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
class Call:
    """A tool call as the client sees it."""

    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token as the client sees it."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled answer."""

    text: str
    reasoning: str
    calls: tuple[Call, ...]
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
