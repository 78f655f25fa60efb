"""Settings of sampling and of the algorithm that exclude each other."""

from __future__ import annotations

from typing import Protocol

from agentrl_cli.config.algo import AlgoConfig


class Sampled(Protocol):
    """What matters here of the section `rollout`."""

    max_tokens: int
    max_new_tokens: int
    repetition_penalty: float
    replay_truncation: bool

    @property
    def truncates(self) -> bool: ...


def conflict(rollout: Sampled, algo: AlgoConfig) -> str:
    """What excludes what, and what to leave out; empty if all fits."""
    if rollout.max_new_tokens >= rollout.max_tokens:
        return (
            f"rollout.max_new_tokens ({rollout.max_new_tokens}) leaves no room for a prompt in"
            f" rollout.max_tokens ({rollout.max_tokens})"
        )
    if algo.bypass and rollout.truncates:
        return (
            "algo.bypass would take the truncated sampler's log-probabilities for the policy's: leave out top_p, top_k,"
            " min_p, penalties and bad tokens, or set rollout.replay_truncation"
        )
    return _with_replay(rollout, algo) if rollout.replay_truncation else ""


def _with_replay(rollout: Sampled, algo: AlgoConfig) -> str:
    if rollout.repetition_penalty != 1:
        return (
            "rollout.replay_truncation knows which tokens could be drawn; rollout.repetition_penalty changes their"
            " probabilities, too: leave one of them out"
        )
    teacher, form = (str(getattr(algo.advantage, name, "")) for name in ("teacher", "form"))
    if teacher.startswith("http") or form in ("full", "top_k"):
        return (
            "rollout.replay_truncation compares the student among the tokens left; a server's teacher and the forms"
            " full and top_k compare the whole vocabulary"
        )
    return ""
