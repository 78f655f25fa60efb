"""One answer: how it is sampled, and how the client sees it.

In an answer that follows a JSON Schema llguidance (the extra `constrained`) says which tokens may come next. Tokens
that the grammar leaves no choice about are FORCED in the record and never trained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from agentrl_cli.agents.gateway.messages import Key, canonical, split_reasoning
from agentrl_cli.agents.gateway.request import (
    RAW_ARGUMENTS,
    Choice,
    ModelRequest,
    RequestError,
    Token,
    bad,
    too_long,
)
from agentrl_cli.agents.gateway.tree import Piece, Spoken
from agentrl_cli.chat.parse import Parsed, foreign_parser, parse_text
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.template_syntax import NAME
from agentrl_cli.chat.thinking import THINK_END
from agentrl_cli.errors import needs_extra
from agentrl_cli.types import (
    TOP_K,
    Generation,
    Origin,
    Sampling,
    StopReason,
    Tokens,
    ToolCall,
    ToolSchema,
    Turn,
)

Allow = Callable[[tuple[int, ...]], Sequence[int] | None]

OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it: a weak model would fill its turn with spaces."""
PARAM = "response_format"


def constrain(chat: Chat, schema: Mapping[str, Any], tools: bool) -> Allow:
    """Return a `Sampling.allow` for one answer. With `tools` the answer may be calls instead of the text.

    Raises RequestError for a schema that cannot be followed, MissingDependency without llguidance.
    """
    with needs_extra("response_format needs llguidance.", "constrained"):
        from llguidance import LLMatcher
    marker = next(iter(chat.parser.markers), "")
    opening = chat.tokenizer.id_of(marker) if tools else None
    if tools and opening is None:
        raise bad(
            "response_format beside tools is not served: this model's calls begin with no token of their own.",
            PARAM,
        )
    tokenizer = _tokenizer(chat.tokenizer.json, chat.stop_ids)
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=OPTIONS)
    if problem := LLMatcher.validate_grammar(grammar, tokenizer):
        raise bad(
            f"{PARAM}: this schema is not served: {problem.strip()[:300]}",
            PARAM,
            "unsupported_schema",
        )
    return _follow(LLMatcher(tokenizer, grammar, log_level=0), chat.stop_ids, opening)


def _follow(matcher: Any, stops: Sequence[int], opening: int | None) -> Allow:
    """Return the tokens that a matcher allows after those of the turn so far."""
    taken = 0

    def allow(out: tuple[int, ...]) -> Sequence[int] | None:
        nonlocal taken
        if out and out[0] == opening:
            return None
        for id_ in out[taken:]:
            matcher.consume_token(id_)
        taken = len(out)
        if matcher.is_stopped():
            return [stops[0]]
        mask = np.frombuffer(matcher.compute_logit_bias(), np.uint8)
        found = [int(id_) for id_ in np.flatnonzero(mask)]
        return [*found, opening] if not out and opening is not None else found

    return allow


@lru_cache(maxsize=4)
def _tokenizer(tokenizer_json: str, stops: tuple[int, ...]) -> Any:
    """Return the library's form of a tokenizer, which takes about a second to make. Raises RequestError."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer_json, eos_token=list(stops))
    except ValueError as error:
        raise bad(f"{PARAM} is not served for this model: {error}", PARAM) from error


CLIENT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of `Sampling` that a client may set. The seed is derived, see `Session`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a session."""

    max_tokens: int
    """Positions of a context with its answer."""
    max_new_tokens: int
    """Tokens of one answer."""
    max_turns: int = 10_000
    """Answers of the session."""
    choices: int = 1
    """Answers to one request (`n`)."""
    client_sampling: bool = True
    """Whether the client may choose temperature and other sampling settings; not in a training."""
    retries: bool = True
    """Whether equal requests of one session are one: a retry is answered from what is stored."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the answers to a request are sampled."""

    sampling: Sampling
    forced: tuple[int, ...]
    """Ids that every answer begins with, for `tool_choice`."""
    tools: tuple[ToolSchema, ...]
    """Tools whose calls the client is to see."""
    schema: Mapping[str, Any] | None
    """JSON Schema that the text follows."""
    choice: Any
    """`tool_choice` in OpenAI's form."""

    def sampling_for(self, chat: Chat, seed: int) -> Sampling:
        """Return the sampling of one answer."""
        allow = None if self.schema is None else constrain(chat, self.schema, bool(self.tools))
        return replace(self.sampling, seed=seed, allow=allow)


def plan(
    request: ModelRequest, context: int, chat: Chat, base: Sampling, limits: Limits, length: int
) -> Plan:
    """Return how to answer a request after `context` tokens; `length` is the model's own limit. Raises RequestError."""
    if request.n > limits.choices:
        raise bad(
            f"n = {request.n}: at most {limits.choices} is served in one request of this session.",
            "n",
        )
    if request.top_logprobs is not None and request.top_logprobs > TOP_K:
        raise bad(f"top_logprobs is at most {TOP_K} here.", "top_logprobs")
    tools = () if request.tool_choice == "none" else request.tools
    named = {"function": {"name": request.tool_name}}
    choice: Any = named if request.tool_name else request.tool_choice
    text = chat.syntax.forced_text(tools, choice)
    constrains = request.schema is not None and not text
    if constrains and chat.opens:  # the text that follows the schema is not thinking
        text = f"\n{THINK_END}\n\n"
    forced = tuple(chat.tokenizer.encode(text))
    most = min(limits.max_tokens, length)
    room = most - context - len(forced)
    if room < 1:
        raise too_long(most, str(context))
    asked = limits.max_new_tokens if request.max_tokens is None else request.max_tokens
    # Without the markers' tokens no call can be written, if the syntax has any.
    markers = chat.parser.markers if request.tool_choice == "none" else ()
    found = (chat.tokenizer.id_of(marker) for marker in markers)
    forbidden = [id_ for id_ in found if id_ is not None and id_ not in chat.stop_ids]
    fields: dict[str, Any] = {}
    if limits.client_sampling:
        fields = {name: value for name, value in request.sampling.items() if name in CLIENT_FIELDS}
    sampling = replace(
        base,
        **fields,
        max_new_tokens=min(asked, limits.max_new_tokens, room),
        stop_ids=chat.stop_ids,
        stop_strings=tuple(
            dict.fromkeys([*base.stop_strings, *request.stop, *_after_call(request, chat)])
        ),
        bad_ids=(*base.bad_ids, *forbidden),
    )
    if problem := sampling.problem.removeprefix("Sampling."):
        raise bad(f"{problem}.", problem.split()[0])
    return Plan(sampling, forced, tools, request.schema if constrains else None, choice)


def _after_call(request: ModelRequest, chat: Chat) -> tuple[str, ...]:
    """Return the text that ends a call, if an answer may have a single one and the syntax has an end marker."""
    if request.parallel or not request.tools:
        return ()
    ending = chat.parser.example(NAME, {}).rpartition("}")[2].strip()
    return (ending,) if ending and chat.tokenizer.id_of(ending) is not None else ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: the turn to record, the client's choice, and the faults of its calls."""

    piece: Piece
    choice: Choice
    mistake: str
    """The error of the first call that the client cannot carry out; empty if there is none."""
    foreign: str
    """The parser that reads calls of this turn which the chat's own does not; empty if there are none."""


def read_answer(
    chat: Chat,
    request: ModelRequest,
    how: Plan,
    generation: Generation,
    number: int,
    started: float,
    exact: bool,
) -> Answer:
    """Return a generation as an answer. Unless its ids are `exact` it is recorded as context, never trained."""
    ids = [*how.forced, *generation.ids.tolist()]
    written = chat.decode(chat.said(ids))
    parsed = _read(written, chat, how, number)
    ends = request.stop if generation.stop_reason is StopReason.STOP_STRING else ()
    text, stopped = _until_stop(written, ends)
    shown = _read(text, chat, how, number) if stopped else parsed
    calls, content = _calls(shown, how.tools, chat, request.parallel)
    reasoning, content = (
        (shown.thinking, content) if shown.thinking else split_reasoning(content, bool(chat.opens))
    )
    ending = "tool_calls" if calls else "stop"
    finish = "length" if generation.stop_reason is StopReason.LENGTH else ending
    content = content.strip() if calls else content
    closes = request.prompt is None
    closing = chat.close_turn(generation.stop_reason, ids[len(how.forced) :]) if closes else []
    sampled = (
        Tokens.from_generation(generation) if exact else _force_tokens(generation.ids.tolist())
    )
    said = Tokens.concat([_force_tokens(how.forced), sampled, _force_tokens(closing)])
    turn = Turn(
        0,
        "assistant",
        (parsed.message,),
        0,
        len(said),
        calls=parsed.calls,
        stop_reason=generation.stop_reason,
        weights_version=generation.weights_version,
        started=started,
        seconds=generation.seconds or time.time() - started,
    )
    piece = Piece(turn, said, _spoken(content, reasoning, calls, stopped))
    tokens = _tokens(chat, generation, request.top_logprobs)
    read = any(call.arguments is not None for call in parsed.calls) or not how.tools
    foreign = "" if read else foreign_parser(chat.decode(ids), parsed, chat.parser, list(how.tools))
    seen = shown.calls if request.parallel else shown.calls[:1]
    mistake = next((call.error for call in seen if call.error), "")
    choice = Choice(content, reasoning, calls, finish, stopped, generation, tokens)
    return Answer(piece, choice, mistake, foreign)


def _force_tokens(ids: Sequence[int]) -> Tokens:
    return Tokens.from_ids(list(ids), [int(Origin.FORCED)] * len(ids))


def _read(text: str, chat: Chat, how: Plan, number: int) -> Parsed:
    if not how.tools:  # no call counts
        return Parsed(text, (), {"role": "assistant", "content": text})
    return parse_text(text, chat.parser, list(how.tools), number, opened=chat.opens)


def _until_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return the text before the client's first stop string, and that string; the whole text and "" if it has none."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    place, stop = min(found, default=(len(text), ""))
    return text[:place], stop


def _calls(
    parsed: Parsed, tools: Sequence[ToolSchema], chat: Chat, parallel: bool
) -> tuple[tuple[ToolCall, ...], str]:
    """Return the calls as the client sees them, and the text beside them.

    A malformed call of a known tool is sent with its text as the only argument, so that the agent's own validation
    answers it. One that names no tool is text: the whole turn if nothing in it can be sent.
    """
    broken = [call for call in parsed.calls if call.arguments is None]
    names = {tool["function"]["name"] for tool in tools}
    unnamed = [call.raw for call in broken if call.name not in names]
    calls = tuple(
        replace(call, arguments={RAW_ARGUMENTS: call.raw}) if call.arguments is None else call
        for call in parsed.calls
        if call.arguments is not None or call.name in names
    )
    text = parsed.content
    if broken and calls:
        marks = [place for marker in chat.parser.markers if (place := text.find(marker)) >= 0]
        before = text[: min(marks)] if marks else ""
        text = "\n".join(part for part in (before.strip(), *map(str.strip, unnamed)) if part)
    return calls if parallel else calls[:1], text


def _spoken(content: str, reasoning: str, calls: Sequence[ToolCall], stopped: str) -> Spoken:
    made = tuple((call.name, canonical(call.arguments)) for call in calls)
    texts = [content, content + stopped, content.rstrip() + stopped]
    return Spoken(
        tuple(dict.fromkeys(Key("assistant", text.strip(), made) for text in texts)), reasoning
    )


def _tokens(chat: Chat, generation: Generation, top: int | None) -> tuple[Token, ...]:
    if top is None:
        return ()
    text, data = chat.tokenizer.token_text, chat.tokenizer.token_bytes
    rows = zip(
        generation.ids,
        generation.logp_policy,
        generation.top_ids,
        generation.top_logps,
        strict=True,
    )
    return tuple(
        Token(
            text(int(id_)),
            data(int(id_)),
            float(logp),
            tuple(
                Token(text(int(i)), data(int(i)), float(p))
                for i, p in zip(ids[:top], logps[:top], strict=True)
                if i >= 0
            ),
        )
        for id_, logp, ids, logps in rows
    )


def episode_ended(key: str) -> RequestError:
    """Return the answer to a call after the end of its episode."""
    return RequestError(
        f"The episode {key} has ended: it takes no more calls.", status=409, code="episode_ended"
    )
