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
from agentrl_cli.types import Float32, StopReason

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


def log_probabilities(values: Sequence[Any], count: int) -> Float32:
    """Return one for each id, finite and at most 0."""
    if len(values) != count:
        raise BadAnswer(f"sent {len(values)} log-probabilities for {count} tokens")
    for value in values:
        if not is_number(value) or not math.isfinite(value) or value > ABOVE_ZERO:
            raise BadAnswer(
                f"sent the log-probability {excerpt(value)}; one is finite and at most 0"
            )
    return np.minimum(np.asarray(values, np.float32), np.float32(0))


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


def is_number(value: Any) -> bool:
    """Whether a value of an answer is a number that arithmetic can take."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
