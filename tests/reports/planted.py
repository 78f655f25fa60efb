"""One planted case for every rule of the diagnosis, small enough to read: what each test and docs page begins with."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl_cli.reports.evidence import Evidence
from agentrl_cli.reports.reference import Reference
from agentrl_cli.store import EvalRow, RunRow
from agentrl_cli.types import (
    Episode,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Task,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
)

CONFIG = {
    "train": {"lr": 3e-4},
    "model": {"name": "tiny-tools"},
    "rollout": {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 64, "max_tokens": 384},
}


def steps(solved: Sequence[float], **metrics: Any) -> list[dict[str, Any]]:
    """Steps with this share solved; a metric is a number, or one for each step."""
    return [
        {"step": n, "solved": value, "reward": value, "facts/trained": 64.0}
        | {k: v[n - 1] if isinstance(v, (list, tuple)) else v for k, v in metrics.items()}
        for n, value in enumerate(solved, 1)
    ]


def attempt(
    number: int,
    said: str = "Answer: 7",
    *,
    primary: float = 0.0,
    task: str = "t0",
    call: ToolCall | None = None,
    result: ToolResult | None = None,
    ids: Sequence[int] = (),
    stop: StopReason = StopReason.STOP,
    **fields: Any,
) -> Episode:
    made = ids or (5, 6, number + 7)
    origin = [Origin.USER, Origin.USER, *[Origin.MODEL] * len(made)]
    tokens = Tokens.from_ids([1, 2, *made], origin)
    tokens.logp_policy[2:] = -0.1
    question = {"role": "user", "content": 'Pallets of "steel bolts" at "Molde"?'}
    turns = [Turn(0, "user", (question,), 0, 2)]
    if call is not None and result is not None:
        turns.append(
            Turn(1, "assistant", ({"role": "assistant", "content": ""},), 2, 2, calls=(call,))
        )
        answer = {"role": "tool", "content": result.text}
        turns.append(Turn(2, "tool", (answer,), 2, 2, results=(result,)))
    last = {"role": "assistant", "content": said}
    turns.append(Turn(len(turns), "assistant", (last,), 2, len(tokens), stop_reason=stop))
    outcome = Outcome.SOLVED if primary == 1 else Outcome.FAILED
    parts = (RewardPart("exact", primary, primary=True),)
    episode = Episode(f"e{number}", task, run_id="r", step=1, turns=tuple(turns), tokens=tokens)
    return episode.with_(**{"reward_parts": parts, "outcome": outcome, "group_id": task, **fields})


def call(**arguments: Any) -> ToolCall:
    return ToolCall("c", "pallets", arguments, str(arguments))


def tasks(count: int, split: str = "train", first: int = 0) -> dict[str, Task]:
    return {
        f"{split}{n}": Task(f"{split}{n}", "p", "f", split, ({"role": "user", "content": str(n)},), {"answer": n})
        for n in range(first, first + count)
    }  # fmt: skip


GOOD = [0.2 + 0.02 * n for n in range(30)]
RISING = [0.5 + 0.03 * n for n in range(12)]
FLAT = [0.5, 0.4, 0.6, 0.5] * 3
RAISED = ToolResult("KeyError: ('steel bolts are', 'Molde')", error="exception")
BAD = ToolResult("unknown item", error="bad_arguments")
BOLTS = call(item="steel bolts", site="Molde")


def case(*args: Any, **fields: Any) -> Evidence:
    run = RunRow("r", "demo", status="finished", config=CONFIG)
    return Evidence(*args, **{"run": run, **fields})


def rate(step: int, solved: float, tasks: int = 40) -> EvalRow:
    return EvalRow("r", step, pass_rate=solved, n_tasks=tasks)


# Rule → the evidence of a training in which it is the first fault, or nothing else is found.
PLANTED: dict[str, Evidence] = {
    "mask": case(steps(FLAT, **{"flags/MASK": 2.0})),
    "drift": case(steps(FLAT, **{"drift/structural": 3.0})),
    "bad_tokens": case(steps(FLAT, **{"facts/skipped:bad_tokens": 4.0})),
    "mismatch": case(steps(FLAT, **{"sampling/kl": 0.3})),
    "too_long": case(steps([0.0], **{"outcomes/too_long": 60.0, "outcomes/failed": 4.0})),
    "stop": case(
        steps([0.0]),
        [attempt(n, ids=(9, 2, 9), stop=StopReason.LENGTH) for n in range(9)],
        controls={2: "<|im_end|>"},
    ),
    "parser": case(
        steps([0.0]),
        foreign="A turn holds a tool call in the syntax of mistral, which the parser hermes does not read."
        " If the model writes such calls: --set model.chat.parser=mistral.",
    ),
    "malformed": case(
        steps([0.0]),
        [attempt(n, call=ToolCall("c", "", None, "{", "not JSON"), result=BAD) for n in range(9)],
    ),
    "truncated": case(steps(FLAT, **{"completions/clipped_ratio": 0.9})),
    "errors": case(
        steps(FLAT, **{"outcomes/timeout": 3.0, "outcomes/env_error": 1.0}),
        [attempt(0, outcome=Outcome.TIMEOUT, error="took longer than 20 s")],
    ),
    "tools": case(steps(FLAT), [attempt(n, call=BOLTS, result=RAISED) for n in range(9)]),
    "arguments": case(
        steps([0.0]),
        [
            attempt(n, call=call(item="Ber出ob", site="Molde"), result=ToolResult("0"))
            for n in range(9)
        ],
    ),
    "ungraded": case(steps([0.0], **{"ungraded/exact": 64.0})),
    "grader_noise": case(
        steps(FLAT), [attempt(n, ids=(5, 6), primary=float(n % 2)) for n in range(4)]
    ),
    "grader": case(
        steps([0.0]),
        [attempt(n) for n in range(9)],
        tasks={"t0": Task("t0", "p", "f", "train", (), {"answer": 7})},
    ),
    "reward_hacking": case(
        steps(
            [0.9] * 20 + [0.8, 0.25],
            reward=[0.7] * 20 + [0.9, 1.84],
            **{"rewards/friendly/mean": [0.2] * 20 + [0.3, 0.9]},
        )
    ),
    "all_solved": case(steps([1.0] * 6, **{"groups/all_solved": 1.0})),
    "same_attempts": case(
        steps(FLAT, frac_reward_zero_std=1.0),
        [attempt(n, task=f"t{n // 4}", ids=(5, n // 4)) for n in range(16)],
        run=RunRow("r", "demo", status="finished", config={"rollout": {"temperature": 0.01}}),
    ),
    "all_failed": case(
        steps([0.0] * 6, **{"groups/all_failed": 1.0}), [attempt(n) for n in range(9)]
    ),
    "no_signal": case(
        steps(
            [0.5] * 6,
            **{"facts/trained": 0.0, "facts/skipped:no_signal": 64.0, "outcomes/failed": 64.0},
        )
    ),
    "nan": case(steps([0.5, 0.5], loss=[0.1, math.nan])),
    "no_gradient": case(steps([0.5] * 6, grad_norm=0.0)),
    "gradients": case(steps([0.5] * 7, grad_norm=[1.0] * 6 + [25.0])),
    "no_movement": case(steps(FLAT), evals=[rate(0, 0.5, 12), rate(12, 0.5, 12)], moved=0.0004),
    "collapse": case(steps([0.75, *[0.0] * 5]), evals=[rate(0, 0.7, 40), rate(3, 0.0, 40)]),
    "entropy_collapse": case(steps([0.5] * 10, entropy=[1.0] * 7 + [0.019] * 3)),
    "kl_drift": case(steps([0.5], kl=1.5)),
    "clip_drift": case(steps([0.5], **{"clip_ratio/high_mean": 0.2, "clip_ratio/low_mean": 0.15})),
    "leak": case(steps([0.5]), tasks={**tasks(40), **tasks(8, "validation")}),
    "few_rows": case(steps(FLAT), tasks=tasks(4)),
    "memorised": case(steps(GOOD), evals=[rate(0, 0.3, 40), rate(30, 0.3, 40)], tasks=tasks(40)),
    "off_reference": case(
        steps(FLAT), reference=Reference({"train.lr": 3e-3}, {"solved": [RISING, RISING]})
    ),
    "process": case(
        steps(FLAT), run=RunRow("r", "demo", status="failed", error="the disk is full")
    ),
    "disk": case(steps(FLAT), free=2**30),
}
np.seterr(invalid="ignore")
