"""Settings of sampling and of the algorithm that exclude each other."""

from __future__ import annotations

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.config.rollout import RolloutConfig


def conflict(rollout: RolloutConfig, algo: AlgoConfig) -> str:
    """What excludes what, and what to leave out; empty if all fits."""
    if rollout.max_new_tokens >= rollout.max_tokens:
        return (
            f"rollout.max_new_tokens ({rollout.max_new_tokens}) leaves no room for a prompt in"
            f" rollout.max_tokens ({rollout.max_tokens})"
        )
    if algo.off_policy.bypass and rollout.truncates:
        return (
            "algo.off_policy.bypass would take the truncated sampler's log-probabilities for the policy's: leave out"
            " top_p, top_k, min_p, penalties and bad tokens, or set rollout.truncation.replay"
        )
    return _with_replay(rollout, algo) if rollout.truncation.replay else ""


def _with_replay(rollout: RolloutConfig, algo: AlgoConfig) -> str:
    if rollout.truncation.repetition_penalty != 1:
        return (
            "rollout.truncation.replay knows which tokens could be drawn; repetition_penalty changes their"
            " probabilities, too: leave one of them out"
        )
    teacher, form = (str(getattr(algo.advantage, name, "")) for name in ("teacher", "form"))
    if teacher.startswith("http") or form in ("full", "top_k"):
        return (
            "rollout.truncation.replay compares the student among the tokens left; a server's teacher and the forms"
            " full and top_k compare the whole vocabulary"
        )
    return ""
