"""Checks of a server's answer. They raise BadAnswer, and the request is tried again.

A 200 proves nothing: it may be a proxy's page, another program's JSON, or ids outside the vocabulary. What
passes can be stored and trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_cli.errors import BadAnswer
from agentrl_cli.types import TOP_K, Float32, Int32, Sampling, StopReason

Answer = dict[str, Any]
ABOVE_ZERO = 1e-3
"""A log-probability may be this far above 0 by rounding."""
SHOWN = 80
"""Characters of an answer that a message repeats."""


def read_json(data: bytes) -> Answer:
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
        raise BadAnswer(f"sent an answer that has no choices: {excerpt(answer)}")
    return choices[0]


def part(answer: Answer, name: str) -> Answer:
    """Return an object inside an answer; empty where it is missing or null."""
    found = answer.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadAnswer(f"sent {name} {excerpt(found)}, which is not an object")
    return found


def items(value: Any, name: str) -> list[Any]:
    """Return a list inside an answer; empty where it is missing or null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadAnswer(f"sent {name} {excerpt(value)}, which is not a list")
    return value


def token_ids(values: Sequence[Any], sampling: Sampling, vocabulary: int | None) -> list[int]:
    """Return sampled ids: at least one, inside the vocabulary, no more than requested."""
    limit = vocabulary or np.iinfo(np.int32).max
    for id_ in values:
        if not _is_id(id_, 0, limit):
            raise BadAnswer(
                f"sent the token id {excerpt(id_)}, which is outside the vocabulary of {limit}"
            )
    if not values:
        raise BadAnswer("sent no tokens")
    if len(values) > sampling.max_new_tokens:
        raise BadAnswer(f"sent {len(values)} tokens where {sampling.max_new_tokens} were asked for")
    return list(values)


def log_probabilities(values: Sequence[Any], count: int) -> Float32:
    """Return one for each id, finite and at most 0."""
    if len(values) != count:
        raise BadAnswer(f"sent {len(values)} log-probabilities for {count} tokens")
    for value in values:
        if not _is_number(value) or not math.isfinite(value) or value > ABOVE_ZERO:
            raise BadAnswer(
                f"sent the log-probability {excerpt(value)}; one is finite and at most 0"
            )
    return np.minimum(np.asarray(values, np.float32), np.float32(0))


def alternatives(
    rows: Sequence[Sequence[tuple[Any, Any]]], count: int, vocabulary: int | None
) -> tuple[Int32, Float32]:
    """Return [count, TOP_K] ids (-1 if absent) and log-probabilities (NaN) of the likeliest tokens, best first.

    There may be none, and one without a probability is left out. An id of -1 stands for a token without an id.
    """
    if rows and len(rows) != count:
        raise BadAnswer(f"sent the likeliest tokens of {len(rows)} places for {count} tokens")
    limit = vocabulary or np.iinfo(np.int32).max
    ids = np.full((count, TOP_K), -1, np.int32)
    logps = np.full((count, TOP_K), np.nan, np.float32)
    for place, row in enumerate(rows):
        for id_, logp in row:
            if not _is_id(id_, -1, limit):
                raise BadAnswer(
                    f"sent {excerpt(id_)} among the likeliest tokens, outside the vocabulary of {limit}"
                )
            if logp not in (None, -math.inf) and not (_is_number(logp) and logp <= ABOVE_ZERO):
                raise BadAnswer(
                    f"sent the log-probability {excerpt(logp)} among the likeliest tokens"
                )
        known = [pair for pair in row if pair[1] not in (None, -math.inf)]
        for column, (id_, logp) in enumerate(sorted(known, key=lambda pair: -pair[1])[:TOP_K]):
            ids[place, column], logps[place, column] = id_, min(logp, 0.0)
    return ids, logps


def finish(value: Any, known: Mapping[str, StopReason]) -> StopReason:
    """Return why the server stopped; `known` maps its reasons to this package's."""
    if not isinstance(value, str) or value not in known:
        raise BadAnswer(
            f"sent the finish reason {excerpt(value)}; {', '.join(sorted(known))} are known"
        )
    return known[value]


def excerpt(value: Any) -> str:
    """Return the start of a value, for a message."""
    try:
        return json.dumps(value, ensure_ascii=True)[:SHOWN]
    except (ValueError, RecursionError):
        return type(value).__name__


def _is_id(value: Any, least: int, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < limit


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
