"""Checks of a server's answer. They raise BadAnswer, and the request is tried again.

A 200 proves nothing: it may be a proxy's page, another program's JSON, or ids outside the vocabulary. What
passes can be stored and trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_cli.errors import BadAnswer
from agentrl_cli.types import Float32, Sampling

Answer = dict[str, Any]
ABOVE_ZERO = 1e-3
"""A log-probability may be this far above 0 by rounding."""
SHOWN = 80
"""Characters of an answer that a message repeats."""


def decoded(data: bytes) -> Answer:
    """Return a body as a JSON object."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        kind = "JSON nested too deeply" if isinstance(error, RecursionError) else "no JSON"
        raise BadAnswer(f"answered {kind}: {data[:SHOWN]!r}") from error
    if not isinstance(answer, dict):
        raise BadAnswer(f"answered {type(answer).__name__}, not an object")
    return answer


def choice_of(answer: Answer) -> Answer:
    """Return the first choice of an answer in OpenAI's form."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadAnswer(f"sent an answer that has no choices: {shown(answer)}")
    return choices[0]


def part(answer: Answer, name: str) -> Answer:
    """Return an object inside an answer; empty where it is missing or null."""
    found = answer.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadAnswer(f"sent {name} {shown(found)}, which is not an object")
    return found


def items(value: Any, name: str) -> list[Any]:
    """Return a list inside an answer; empty where it is missing or null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadAnswer(f"sent {name} {shown(value)}, which is not a list")
    return value


def token_ids(values: Sequence[Any], sampling: Sampling, vocabulary: int | None) -> list[int]:
    """Sampled ids: at least one, inside the vocabulary, no more than requested."""
    limit = vocabulary or np.iinfo(np.int32).max
    for id_ in values:
        if not isinstance(id_, int) or isinstance(id_, bool) or not 0 <= id_ < limit:
            raise BadAnswer(
                f"sent the token id {shown(id_)}, which is outside the vocabulary of {limit}"
            )
    if not values:
        raise BadAnswer("sent no tokens")
    if len(values) > sampling.max_new_tokens:
        raise BadAnswer(f"sent {len(values)} tokens where {sampling.max_new_tokens} were asked for")
    return list(values)


def log_probabilities(values: Sequence[Any], count: int) -> Float32:
    """One for each id, finite and at most 0."""
    if len(values) != count:
        raise BadAnswer(f"sent {len(values)} log-probabilities for {count} tokens")
    for value in values:
        if not _is_number(value) or not math.isfinite(value) or value > ABOVE_ZERO:
            raise BadAnswer(f"sent the log-probability {shown(value)}; one is finite and at most 0")
    return np.minimum(np.asarray(values, np.float32), np.float32(0))


def alternatives(
    rows: Sequence[Any],
    count: int,
    read: Callable[[Any], Sequence[tuple[Any, Any]]],
    vocabulary: int | None,
) -> list[list[tuple[int, float]]]:
    """Return the likeliest (id, log-probability) at each token; `read` splits a row into pairs.

    There may be none, and one without a probability is left out. An id of −1 stands for a token without an id.
    """
    if rows and len(rows) != count:
        raise BadAnswer(f"sent the likeliest tokens of {len(rows)} places for {count} tokens")
    limit = vocabulary or np.iinfo(np.int32).max
    found: list[list[tuple[int, float]]] = []
    for row in rows:
        found.append([])
        for id_, logp in read(row) if row is not None else ():
            if not isinstance(id_, int) or isinstance(id_, bool) or not -1 <= id_ < limit:
                raise BadAnswer(
                    f"sent {shown(id_)} among the likeliest tokens, outside the vocabulary of {limit}"
                )
            if logp is None or logp == -math.inf:
                continue
            if not _is_number(logp) or not logp <= ABOVE_ZERO:
                raise BadAnswer(
                    f"sent the log-probability {shown(logp)} among the likeliest tokens"
                )
            found[-1].append((id_, min(float(logp), 0.0)))
    return found


def finish(value: Any, known: Mapping[str, str]) -> str:
    """Return why the server stopped; `known` maps its reasons to this package's."""
    if not isinstance(value, str) or value not in known:
        raise BadAnswer(
            f"sent the finish reason {shown(value)}; {', '.join(sorted(known))} are known"
        )
    return known[value]


def shown(value: Any) -> str:
    """Return a value of an answer for a message."""
    try:
        return json.dumps(value, ensure_ascii=True)[:SHOWN]
    except (ValueError, RecursionError):
        return type(value).__name__


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
