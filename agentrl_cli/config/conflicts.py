"""Settings of several sections that exclude each other."""

from __future__ import annotations

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.config.rollout import RolloutConfig
from agentrl_cli.config.train import TrainConfig
from agentrl_cli.types.section import refuse


def check_together(
    rollout: RolloutConfig, algo: AlgoConfig, train: TrainConfig, deterministic: bool
) -> None:
    """Raise ValueError with what excludes what, and what to leave out."""
    bypass, replay = algo.off_policy.bypass, rollout.truncation.replay
    teacher, form = (str(getattr(algo.advantage, name, "")) for name in ("teacher", "form"))
    refuse(
        (
            rollout.max_new_tokens >= rollout.max_tokens,
            f"rollout.max_new_tokens ({rollout.max_new_tokens}) leaves no room for a prompt in"
            f" rollout.max_tokens ({rollout.max_tokens})",
        ),
        (
            bypass and rollout.truncates,
            "algo.off_policy.bypass would take the truncated sampler's log-probabilities for the policy's: leave out"
            " top_p, top_k, min_p, penalties and bad tokens, or set rollout.truncation.replay",
        ),
        (
            replay and rollout.truncation.repetition_penalty != 1,
            "rollout.truncation.replay knows which tokens could be drawn; repetition_penalty changes their"
            " probabilities, too: leave one of them out",
        ),
        (
            replay and (teacher.startswith("http") or form in ("full", "top_k")),
            "rollout.truncation.replay compares the student among the tokens left; a server's teacher and the forms"
            " full and top_k compare the whole vocabulary",
        ),
        (
            bypass and "mismatch" in train.stop_on.alerts,
            "algo.off_policy.bypass does not measure the gap between trainer and sampler, so train.stop_on:"
            " mismatch would never stop the run: leave out one of them",
        ),
        (
            deterministic and rollout.async_staleness,
            "deterministic: true needs rollout.async_staleness: 0: else a turn's weights would depend on timing",
        ),
    )
