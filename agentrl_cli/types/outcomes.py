"""How an episode ends, and its fate in a training step."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How an episode ended; every episode ends with exactly one."""

    SOLVED = "solved"
    """The pack's primary reward part is 1."""
    FAILED = "failed"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TOKENS = "truncated_tokens"
    TOO_LONG = "too_long"
    """The prompt does not fit into the context."""
    TIMEOUT = "timeout"
    ENV_ERROR = "env_error"
    """A tool server, a hook or a grader crashed: never scored, never trained."""
    SANDBOX_ERROR = "sandbox_error"
    AGENT_ERROR = "agent_error"
    """The agent program failed for a reason that is not the model's, and gave no reward. With one: solved or failed."""
    AGENT_TIMEOUT = "agent_timeout"
    """The agent program was stopped at its time limit, and gave no reward before. With a reward: solved or failed."""
    NO_CALLS = "no_calls"
    """The agent ended without a call of the model: its reward says nothing about the model."""
    FOREIGN_TEXT = "foreign_text"
    """An assistant turn has text that the policy did not sample: the reward may be owed to that text."""
    UNGRADED = "ungraded"
    """The primary reward is None: it does not apply, and the episode has no grade."""
    DRIFT = "drift"
    """The appended turns are not as the template writes them, and are not trained."""
    CANCELLED = "cancelled"

    @property
    def is_error(self) -> bool:
        """Whether the end says nothing about the policy, or nothing was graded: it is masked, never scored zero."""
        return self in _MASKED


FAULTS = (
    Outcome.ENV_ERROR,
    Outcome.SANDBOX_ERROR,
    Outcome.TIMEOUT,
    Outcome.AGENT_ERROR,
    Outcome.AGENT_TIMEOUT,
    Outcome.NO_CALLS,
    Outcome.FOREIGN_TEXT,
)
"""Outcomes that point to something broken outside the policy: a tool, the sandbox, a grader, the agent program."""

_MASKED = frozenset({*FAULTS, Outcome.CANCELLED, Outcome.DRIFT, Outcome.UNGRADED})


class Fact(StrEnum):
    """The fate of an episode in a training step (`episodes.fact`)."""

    TRAINED = "trained"
    SKIPPED_ZERO_VARIANCE = "skipped:zero_variance"
    SKIPPED_ENV_ERROR = "skipped:env_error"
    SKIPPED_SANDBOX_ERROR = "skipped:sandbox_error"
    SKIPPED_TIMEOUT = "skipped:timeout"
    SKIPPED_AGENT_ERROR = "skipped:agent_error"
    SKIPPED_AGENT_TIMEOUT = "skipped:agent_timeout"
    SKIPPED_NO_CALLS = "skipped:no_calls"
    SKIPPED_FOREIGN_TEXT = "skipped:foreign_text"
    SKIPPED_CANCELLED = "skipped:cancelled"
    SKIPPED_TOO_LONG = "skipped:too_long"
    SKIPPED_OVERLONG = "skipped:overlong"
    SKIPPED_VOID = "skipped:void"
    """A turn without text or calls, with `algo.mask_void`."""
    SKIPPED_DRIFT = "skipped:drift"
    SKIPPED_STALE = "skipped:stale"
    SKIPPED_CHANGED = "skipped:changed"
    """Sampled before a row, the code or the tokenizer was changed, and replaced at the resume."""
    SKIPPED_UNGRADED = "skipped:ungraded"
    SKIPPED_BAD_TOKENS = "skipped:bad_tokens"
    """No model can have sampled what is stored (`learning.dispositions.flaw`)."""
    SKIPPED_NO_MODEL_TOKENS = "skipped:no_model_tokens"
    SKIPPED_GROUP_TOO_SMALL = "skipped:group_too_small"
    SKIPPED_BASELINE = "skipped:baseline"
    """A greedy attempt to compare with: evaluated, never trained."""
    SKIPPED_NO_BASELINE = "skipped:no_baseline"
    """The greedy attempt at the same task could not be graded."""
