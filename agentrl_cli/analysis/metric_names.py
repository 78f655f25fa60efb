"""Names of the metrics of a step. They are those common elsewhere; what a run logs beside them keeps its own name."""

from __future__ import annotations

METRICS: dict[str, tuple[str, ...]] = {
    "reward": ("reward", "reward/mean", "train/reward"),
    "solved": ("solved", "primary", "train/solved", "pass_rate"),
    "loss": ("loss", "policy_loss", "loss/policy"),
    "entropy": ("entropy", "policy/entropy"),
    "kl": ("kl", "kl/ref"),
    "mismatch": (
        "sampling/sampling_logp_difference/mean",
        "sampling/logp_difference",
        "mismatch_kl",
        "logp_gap",
        "mismatch",
    ),
    "clip": ("clip_ratio/region_mean", "clip_ratio/high_mean", "clip_ratio", "clipfrac"),
    "grad_norm": ("grad_norm", "optim/grad_norm"),
    "lr": ("learning_rate", "lr"),
    "zero_std": ("frac_reward_zero_std", "groups/zero_variance"),
    "all_solved": ("groups/all_solved",),
    "all_failed": ("groups/all_failed",),
    "tool_errors": (
        "tools/error_rate",
        "tools/failure_frequency",
        "tool_error_rate",
        "tool_errors",
    ),
    "tool_calls": ("tools/call_frequency", "tools/call_rate", "tool_call_rate", "tool_calls"),
    "length": ("completions/mean_length", "tokens/mean", "length"),
    "cut": ("completions/clipped_ratio", "truncated"),
    "turns": ("turns", "turns/mean", "n_turns"),
    "seconds": ("time/step", "step_time", "seconds"),
}
"""Short name to the names it may have in the store; the first that is found wins."""
