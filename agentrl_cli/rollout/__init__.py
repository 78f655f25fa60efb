"""The agent loop: a state machine per episode, many episodes at once, every token kept.

    PENDING → GENERATING → PROCESSING_TOOLS or INTERACTING → GENERATING → … → TERMINATED

Sampled ids are appended as they are and never encoded again; the environment's answers are appended as the chat
template's delta. Every episode ends with an outcome, and is stored turn by turn. A tool that fails is an observation;
an infrastructure error (sandbox, grader, hook) ends the episode as an error that is never scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentrl_cli.rollout.job import Job, seed_of

if TYPE_CHECKING:
    from agentrl_cli.rollout.run import Rollout

__all__ = ["Job", "Rollout", "seed_of"]


def __getattr__(name: str) -> Any:
    """`Rollout`, imported where it is used: replay takes the flags of this package alone."""
    if name != "Rollout":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentrl_cli.rollout.run import Rollout

    return Rollout
