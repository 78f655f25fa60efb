"""The numbers of a step by hand, and CPU time with all descendants."""

import subprocess
import sys
import time

import numpy as np
import pytest

from agentrl_cli.reports.diagnosis import diagnose
from agentrl_cli.reports.evidence import Evidence
from agentrl_cli.trainer.metrics import cpu_seconds, step_metrics
from agentrl_cli.types import (
    Episode,
    Fact,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
)


def episode(
    name: str,
    value: float,
    sampled: int = 2,
    outcome: Outcome | None = None,
    calls: int = 0,
    errors: int = 0,
) -> Episode:
    tokens = Tokens.from_ids([1] * (1 + sampled), [Origin.USER, *[Origin.MODEL] * sampled])
    made = tuple(ToolCall(f"c{n}", "f", {}, "") for n in range(calls))
    results = tuple(ToolResult("", error="exception" if n < errors else None) for n in range(calls))
    turns = [
        Turn(0, "user", (), 0, 1),
        Turn(1, "assistant", (), 1, 1 + sampled, calls=made, stop_reason=StopReason.STOP),
        Turn(2, "tool", (), 1 + sampled, 1 + sampled, results=results),
    ]
    parts = (RewardPart("right", value, 1.0, True), RewardPart("form", 1.0, 0.5))
    outcome = outcome or (Outcome.SOLVED if value == 1 else Outcome.FAILED)
    kept = () if outcome.is_error else parts
    return Episode(name, "t", turns=tuple(turns), tokens=tokens, reward_parts=kept, outcome=outcome)


def test_a_step_by_hand() -> None:
    groups = [
        [episode("a", 1.0, 4, calls=2, errors=1), episode("b", 0.0, 2)],
        [episode("c", 0.0, 6, calls=1), episode("d", 0.0, outcome=Outcome.ENV_ERROR)],
    ]
    facts = dict.fromkeys("ab", Fact.TRAINED) | {
        "c": Fact.SKIPPED_GROUP_TOO_SMALL,
        "d": Fact.SKIPPED_ENV_ERROR,
    }
    found = step_metrics(groups, facts, ["", "resegmented", "", "structural"])
    assert found["reward"] == pytest.approx((1.5 + 0.5 + 0.5) / 3)
    assert found["rewards/right/mean"] == pytest.approx(1 / 3)
    assert found["rewards/right/std"] == pytest.approx(np.std([1, 0, 0]))
    assert (found["rewards/form/mean"], found["rewards/form/std"]) == (1.0, 0.0)
    assert found["reward_std"] == pytest.approx(
        np.std([1.5, 0.5], ddof=1) / 2
    )  # the second group has one left: 0
    assert found["frac_reward_zero_std"] == 0.5 and found["solved"] == pytest.approx(1 / 3)
    assert (found["completions/mean_length"], found["completions/max_length"]) == (4.0, 6.0)
    assert found["tools/call_frequency"] == pytest.approx(2 / 3)
    assert found["tools/failure_frequency"] == pytest.approx(1 / 3)
    assert found["turns/mean"] == 1.0 and found["completions/clipped_ratio"] == 0.0
    assert found["num_tokens"] == 5 + 3 + 7 + 3  # the masked one cost its tokens, too
    assert (found["outcomes/solved"], found["outcomes/failed"], found["outcomes/env_error"]) == (
        1,
        2,
        1,
    )
    assert (found["facts/trained"], found["facts/skipped:fault"]) == (2, 1)
    assert (found["drift/resegmented"], found["drift/structural"]) == (1, 1)


def test_several_packs_are_distinguished() -> None:
    made = [
        episode("a", 1.0),
        episode("b", 0.0),
        episode("c", 0.5),
        episode("d", 1.0, outcome=Outcome.ENV_ERROR),
    ]
    named = [
        one.with_(pack=pack)
        for one, pack in zip(made, ("sql", "sql", "guess", "calc"), strict=True)
    ]
    found = step_metrics([named], {}, packs=("sql", "guess", "calc"))
    assert {name: value for name, value in found.items() if name.startswith("packs/")} == {
        "packs/sql/reward": 1.0,  # 1.5 and 0.5: each has 0.5 for its form
        "packs/sql/solved": 0.5,
        "packs/guess/reward": 1.0,
        "packs/guess/solved": 0.0,
    }  # what could not be graded is not zero
    assert not any(
        name.startswith("packs/") for name in step_metrics([named[:2]], {}, packs=("sql",))
    )


def test_cut_episodes_are_counted_and_errors_never_become_zeros() -> None:
    cut = episode("a", 0.0, outcome=Outcome.TRUNCATED_TOKENS)
    assert step_metrics([[cut, episode("b", 1.0)]], {})["completions/clipped_ratio"] == 0.5
    bad = [episode(name, 0.0, outcome=Outcome.SANDBOX_ERROR) for name in "ab"]
    found = step_metrics([bad], dict.fromkeys("ab", Fact.SKIPPED_SANDBOX_ERROR))
    assert "reward" not in found and "solved" not in found
    assert found["outcomes/sandbox_error"] == 2 and found["facts/skipped:fault"] == 2
    assert [one.name for one in diagnose(Evidence([{"step": 1, **found}]))].count("errors") == 1


def test_cpu_seconds_counts_children_alive_and_ended() -> None:
    before = cpu_seconds()
    spin = "import time\nend = time.process_time() + 0.15\nwhile time.process_time() < end: pass\n"
    subprocess.run([sys.executable, "-c", spin], check=True)
    ended = cpu_seconds()
    assert ended - before >= 0.15
    with subprocess.Popen([sys.executable, "-c", spin + "print('done', flush=True)\ninput()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # fmt: skip
        assert child.stdout is not None and child.stdout.readline() == b"done\n"
        time.sleep(0.02)  # the kernel's counters tick
        assert cpu_seconds() - ended >= 0.1
        child.kill()
