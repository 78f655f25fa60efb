"""A server's report of a turn: token ids with log-probabilities, checked before they are stored and trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl_cli.errors import BadAnswer
from agentrl_cli.policies.remote.checked import (
    ABOVE_ZERO,
    excerpt,
    finish,
    is_number,
    log_probabilities,
)
from agentrl_cli.types import TOP_K, Float32, Generation, Int32, Sampling, StopReason

FINISH = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    "abort": StopReason.CANCELLED,
}
"""Finish reasons of the servers."""


Pairs = list[tuple[Any, Any]]
"""Ids with their log-probabilities, unchecked."""


@dataclass(frozen=True, slots=True)
class Report:
    """The fields of a server's answer, unchecked."""

    ids: Sequence[Any]
    logps: Sequence[Any]
    tops: Sequence[Sequence[tuple[Any, Any]]]
    """(id, log-probability) of the likeliest tokens at each place."""
    finish_reason: Any
    version: str = ""
    """The weights that made the answer; empty if the server does not name them."""


def check_report(report: Report, sampling: Sampling, vocabulary: int | None) -> Generation:
    """Return a server's report as a turn of the version that it names. Raises BadAnswer."""
    ids = token_ids(report.ids, sampling, vocabulary)
    logps = log_probabilities(report.logps, len(ids))
    top_ids, top_logps = alternatives(report.tops, len(ids), vocabulary)
    reason = finish(report.finish_reason, FINISH)
    if reason is StopReason.STOP and sampling.stop_strings and ids[-1] not in sampling.stop_ids:
        reason = StopReason.STOP_STRING
    return Generation(
        np.asarray(ids, np.int32),
        logps,
        logps.copy(),
        np.full(len(ids), np.nan, np.float32),
        top_ids,
        top_logps,
        reason,
        report.version,
    )


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
            if logp not in (None, -math.inf) and not (is_number(logp) and logp <= ABOVE_ZERO):
                raise BadAnswer(
                    f"sent the log-probability {excerpt(logp)} among the likeliest tokens"
                )
        known = [pair for pair in row if pair[1] not in (None, -math.inf)]
        for column, (id_, logp) in enumerate(sorted(known, key=lambda pair: -pair[1])[:TOP_K]):
            ids[place, column], logps[place, column] = id_, min(logp, 0.0)
    return ids, logps


def _is_id(value: Any, least: int, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < limit
