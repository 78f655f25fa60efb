"""How an episode ends, where its ids differ from the chat template's, and its fate in a training step."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference between an episode's ids and the chat template's rendering; see `chat.drift`."""

    kind: str
    """resegmented | reserialised | by_design | structural"""
    turn: int
    """Index of its turn, -1 if it is in none."""
    position: int
    """Token index of the first difference, in the episode's ids."""
    expected: str
    """The template's text from there on, an excerpt."""
    got: str
    """The episode's text from there on, an excerpt."""


class Fact(StrEnum):
    """The fate of an episode in a training step (`episodes.fact`): one of eight classes, and a reason.

    Before 0.1 each reason was a class of its own, `skipped:zero_variance`: such values are read as today's.
    """

    TRAINED = "trained"
    SKIPPED_ZERO_VARIANCE = "skipped:no_signal: all rewards of the group are equal"
    SKIPPED_GROUP_TOO_SMALL = "skipped:no_signal: fewer than two episodes of the group can be used"
    SKIPPED_NO_MODEL_TOKENS = "skipped:no_signal: the model sampled no token"
    SKIPPED_NO_BASELINE = "skipped:no_signal: the greedy attempt at the task has no grade"
    SKIPPED_ENV_ERROR = "skipped:fault: env_error"
    SKIPPED_SANDBOX_ERROR = "skipped:fault: sandbox_error"
    SKIPPED_TIMEOUT = "skipped:fault: timeout"
    SKIPPED_AGENT_ERROR = "skipped:fault: agent_error"
    SKIPPED_AGENT_TIMEOUT = "skipped:fault: agent_timeout"
    SKIPPED_NO_CALLS = "skipped:fault: no_calls"
    SKIPPED_FOREIGN_TEXT = "skipped:fault: foreign_text"
    SKIPPED_UNGRADED = "skipped:ungraded"
    SKIPPED_TOO_LONG = "skipped:limit: the prompt is too long"
    SKIPPED_OVERLONG = "skipped:limit: it ran out of tokens (algo.skip.overlong)"
    SKIPPED_VOID = "skipped:limit: a turn has neither text nor calls (algo.skip.void)"
    SKIPPED_DRIFT = "skipped:drift"
    SKIPPED_BAD_TOKENS = "skipped:bad_tokens"
    """No model can have sampled what is stored (`learning.dispositions.flaw`)."""
    SKIPPED_CANCELLED = "skipped:unused: cancelled"
    SKIPPED_STALE = "skipped:unused: its weights are too old"
    SKIPPED_CHANGED = "skipped:unused: a row, the code or the tokenizer changed before a resume"
    SKIPPED_CUT = "skipped:unused: a resume asks for another attempt in its place, or for none"
    SKIPPED_BASELINE = "skipped:unused: a greedy attempt to compare with"
    SKIPPED_LEFT_OUT = "skipped:unused: its group is left out (algo.skip.groups)"

    @property
    def kind(self) -> str:
        """Return the class: trained, or skipped:no_signal, fault, ungraded, limit, drift, bad_tokens, unused."""
        return kind_of(self)

    @property
    def old(self) -> str:
        """Return the value before 0.1."""
        return self.name.lower().replace("_", ":", 1)

    @classmethod
    def _missing_(cls, value: object) -> Fact | None:
        return next((fact for fact in cls if fact.old == value), None)


def kind_of(fact: str) -> str:
    """Return the class of a stored fact, without the reason."""
    return fact.partition(": ")[0]


def read_fact(stored: str) -> str:
    """Return a stored fact by today's name; unchanged if it is none."""
    return str(Fact(stored)) if stored in _OLD else stored


_OLD = frozenset(fact.old for fact in Fact)


def stored_facts(said: str) -> list[str]:
    """Return the stored values that a class, a fact or an older name means; the text itself if it is none of them."""
    meant = [fact for fact in Fact if said in (fact, fact.kind, fact.old)]
    return [value for fact in meant for value in dict.fromkeys((str(fact), fact.old))] or [said]
