"""The fate of each episode in a training step: a `Fact` for every one, never a silent drop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from agentrl_cli.types import ROOT, Episode, Fact, Outcome, StopReason, Turn
from agentrl_cli.types.content import content_text

_BY_OUTCOME: Mapping[Outcome, Fact] = {
    Outcome.ENV_ERROR: Fact.SKIPPED_ENV_ERROR,
    Outcome.SANDBOX_ERROR: Fact.SKIPPED_SANDBOX_ERROR,
    Outcome.TIMEOUT: Fact.SKIPPED_TIMEOUT,
    Outcome.AGENT_ERROR: Fact.SKIPPED_AGENT_ERROR,
    Outcome.AGENT_TIMEOUT: Fact.SKIPPED_AGENT_TIMEOUT,
    Outcome.NO_CALLS: Fact.SKIPPED_NO_CALLS,
    Outcome.FOREIGN_TEXT: Fact.SKIPPED_FOREIGN_TEXT,
    Outcome.UNGRADED: Fact.SKIPPED_UNGRADED,
    Outcome.CANCELLED: Fact.SKIPPED_CANCELLED,
    Outcome.TOO_LONG: Fact.SKIPPED_TOO_LONG,
    Outcome.DRIFT: Fact.SKIPPED_DRIFT,
}

CUT = frozenset({Outcome.TRUNCATED_TURNS, Outcome.TRUNCATED_TOKENS})
"""Outcomes of episodes that a limit ended, not the policy or the world."""
SAME = 1e-8
"""Rewards closer than this are equal."""
ABOVE_ZERO = 1e-3
"""A log-probability may exceed 0 by this much, by rounding."""


def decide(
    groups: Sequence[Sequence[Episode]],
    *,
    drift: Mapping[str, str],
    train_drifted: bool = False,
    drop_zero_variance: bool = True,
    mask_overlong: bool = False,
    mask_void: bool = False,
    stale: Collection[str] = (),
    vocabulary: int | None = None,
) -> dict[str, Fact]:
    """Episode id → fact, for every episode of a step.

    Args:
        groups: The episodes of each task.
        drift: Worst kind of drift by episode id; episodes without drift are absent.
        train_drifted: Train on structural drift too (`algo.skip.drift: false`).
        drop_zero_variance: Skip groups whose rewards are all equal: they carry no signal.
        mask_overlong: Skip episodes that ran out of tokens, before groups are compared: their reward says nothing of
            what they would have come to (overlong filtering, https://arxiv.org/abs/2503.14476 section 3.4).
        mask_void: Skip episodes with a void turn, likewise. https://arxiv.org/abs/2509.02479
        stale: Ids of episodes that were sampled with weights older than they may be.
        vocabulary: Ids that the model knows; an episode with any other is skipped, as one with impossible
            log-probabilities is.
    """
    facts: dict[str, Fact] = {}

    def decide_alone(episode: Episode) -> Fact:
        if episode.outcome is not None and episode.outcome in _BY_OUTCOME:
            return _BY_OUTCOME[episode.outcome]
        if not episode.graded:
            return Fact.SKIPPED_UNGRADED
        if drift.get(episode.id) == "structural" and not train_drifted:
            return Fact.SKIPPED_DRIFT
        if flaw(episode, vocabulary):
            return Fact.SKIPPED_BAD_TOKENS
        if not episode.trained_tokens:
            return Fact.SKIPPED_NO_MODEL_TOKENS
        if episode.id in stale:
            return Fact.SKIPPED_STALE
        if mask_overlong and episode.outcome is Outcome.TRUNCATED_TOKENS:
            return Fact.SKIPPED_OVERLONG
        return Fact.SKIPPED_VOID if mask_void and any(map(void, episode.turns)) else Fact.TRAINED

    for group in groups:
        facts |= {episode.id: decide_alone(episode) for episode in group}
        good = [episode for episode in group if facts[episode.id] is Fact.TRAINED]
        together = _group(good, len(group), drop_zero_variance)
        facts |= {episode.id: together for episode in good}
    return facts


def _group(good: Sequence[Episode], size: int, drop_zero_variance: bool) -> Fact:
    """Return the fate of a group's usable episodes.

    A group of one by choice is a group; one that was decimated is not.
    """
    if len(good) < 2 <= size:
        return Fact.SKIPPED_GROUP_TOO_SMALL
    rewards = [episode.graded_reward for episode in good]
    if drop_zero_variance and size > 1 and max(rewards) - min(rewards) < SAME:
        return Fact.SKIPPED_ZERO_VARIANCE
    return Fact.TRAINED


def void(turn: Turn) -> bool:
    """Whether an assistant turn neither makes a well-formed call nor answers: empty, cut off, or malformed calls."""
    if turn.role != "assistant" or any(call.arguments is not None for call in turn.calls):
        return False
    said = any(content_text(message.get("content")).strip() for message in turn.messages)
    return bool(turn.calls) or turn.stop_reason is StopReason.LENGTH or not said


def flaw(episode: Episode, vocabulary: int | None = None) -> str:
    """Return the first flaw of the tokens, or "". `vocabulary`: number of ids of the model.

    A server or a damaged store may return anything. One id outside the vocabulary would end an update, and each resume
    would take the same episode from the store again. NaN stands for an unknown log-probability and is accepted.
    """
    tokens, n = episode.tokens, len(episode.tokens)
    arrays = (tokens.origin, tokens.logp_sampled, tokens.logp_policy, tokens.entropy)
    if any(len(array) != n for array in arrays):
        return f"{n} ids and other numbers of log-probabilities"
    outside = np.flatnonzero(
        (tokens.ids < 0) | (tokens.ids >= (vocabulary or np.iinfo(np.int32).max))
    )
    if len(outside):
        return f"the id {tokens.ids[outside[0]]} at {outside[0]} is outside the vocabulary of {vocabulary}"
    ends = [turn.end for turn in episode.turns]
    if ends and (
        ends != sorted(ends)
        or ends[-1] != n
        or any(turn.start > turn.end for turn in episode.turns)
    ):
        return f"the turns end at {ends[-1]} and the tokens at {n}"
    for index, turn in enumerate(episode.turns):
        if turn.parent is not None and not ROOT <= turn.parent < index:
            return f"turn {index} continues turn {turn.parent}, which is not an earlier one"
    if any(len(branch) and branch.trained[0] for branch in episode.sequences):
        return "the first token of a sequence counts as sampled, and nothing precedes it"
    both = np.concatenate(
        [a[tokens.trained_mask] for a in (tokens.logp_sampled, tokens.logp_policy)]
    )
    bad = both[np.isinf(both) | (both > ABOVE_ZERO)]
    return f"a log-probability is {bad[0]:g}" if len(bad) else ""
