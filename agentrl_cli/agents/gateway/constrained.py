"""Answers that follow a JSON Schema: which tokens may come next, by llguidance (the extra `constrained`).

Tokens that the grammar leaves no choice about are FORCED in the record and never trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from agentrl_cli.agents.gateway.request import bad
from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import MissingDependency

Allow = Callable[[tuple[int, ...]], Sequence[int] | None]

OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it: a weak model would fill its turn with spaces."""
PARAM = "response_format"


def constrain(chat: Chat, schema: Mapping[str, Any], tools: bool) -> Allow:
    """Return a `Sampling.allow` for one answer. With `tools` the answer may be calls instead of the text.

    Raises RequestError for a schema that cannot be followed, MissingDependency without llguidance.
    """
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise MissingDependency(
            "response_format needs llguidance.", hint="pip install 'agentrl-cli[constrained]'"
        ) from error
    opening = _opening(chat) if tools else None
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


def _opening(chat: Chat) -> int | None:
    """Return the token that begins a call; None if calls begin with ordinary text."""
    return next(
        (
            id_
            for marker in chat.parser.markers[:1]
            if (id_ := chat.tokenizer.id_of(marker)) is not None
        ),
        None,
    )


@lru_cache(maxsize=4)
def _tokenizer(tokenizer_json: str, stops: tuple[int, ...]) -> Any:
    """Return the library's form of a tokenizer, which takes about a second to make. Raises RequestError."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer_json, eos_token=list(stops))
    except ValueError as error:
        raise bad(f"{PARAM} is not served for this model: {error}", PARAM) from error
