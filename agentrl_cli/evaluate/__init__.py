"""Evaluation: pass@k with intervals, per family, held-out families separate, and two policies compared task by task.

    result = await evaluate(runtime.loaded, runtime.rollout())
    result.pass_rate, result.score.pass_at[4], result.families("test"), compare(base, result, "test").p_value

`evaluate_policy` evaluates a trainer's live policy.
"""

from __future__ import annotations

from agentrl_cli.evaluate.result import (
    Attempt,
    Comparison,
    EvalResult,
    Score,
    compare,
    score,
)
from agentrl_cli.evaluate.run import (
    HELDOUT,
    Settings,
    evaluate,
    evaluate_policy,
    fingerprint,
    pick_tasks,
    spread,
)
from agentrl_cli.evaluate.stats import Estimate, difference, estimate, mcnemar, pass_at_k, wilson

__all__ = [
    "HELDOUT",
    "Attempt",
    "Comparison",
    "Estimate",
    "EvalResult",
    "Score",
    "Settings",
    "compare",
    "difference",
    "estimate",
    "evaluate",
    "evaluate_policy",
    "fingerprint",
    "mcnemar",
    "pass_at_k",
    "pick_tasks",
    "score",
    "spread",
    "wilson",
]
