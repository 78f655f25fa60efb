"""Whether an episode's tokens can be trained on at all: a server or a damaged store may give anything.

One id outside the vocabulary ends an update, and every resume takes the same episode from the store again.
"""

from __future__ import annotations

import numpy as np

from agentrl_cli.types import Episode

ABOVE_ZERO = 1e-3
"""A log-probability may be so far above 0 by rounding."""


def flaw(episode: Episode, vocabulary: int | None = None) -> str:
    """What is wrong with the tokens, in words; empty where nothing is. `vocabulary`: ids that the model knows.

    NaN stands for a log-probability that is not known, and is no flaw.
    """
    tokens, n = episode.tokens, len(episode.tokens)
    arrays = (tokens.origin, tokens.logp_sampled, tokens.logp_policy, tokens.entropy)
    if any(len(array) != n for array in arrays):
        return f"{n} ids and other numbers of log-probabilities"
    outside = np.flatnonzero((tokens.ids < 0) | (tokens.ids >= (vocabulary or np.iinfo(np.int32).max)))
    if len(outside):
        return f"the id {tokens.ids[outside[0]]} at {outside[0]} is outside the vocabulary of {vocabulary}"
    ends = [turn.end for turn in episode.turns]
    if ends and (ends != sorted(ends) or ends[-1] != n or any(turn.start > turn.end for turn in episode.turns)):
        return f"the turns end at {ends[-1]} and the tokens at {n}"
    for logps in (tokens.logp_sampled[tokens.trained_mask], tokens.logp_policy[tokens.trained_mask]):
        bad = np.flatnonzero(np.isinf(logps) | (logps > ABOVE_ZERO))
        if len(bad):
            return f"a log-probability is {logps[bad[0]]:g}"
    return ""
