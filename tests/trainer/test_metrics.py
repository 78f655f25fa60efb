"""The numbers of a step by hand, and CPU time with all descendants."""

import math
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli.errors import TrainingStopped
from agentrl_cli.reports.diagnosis import diagnose, summarise
from agentrl_cli.reports.evidence import Evidence
from agentrl_cli.reports.read_evidence import read_evidence
from agentrl_cli.store import CheckpointRow, RunRow, Store
from agentrl_cli.trainer.heal import certain, choose, lower
from agentrl_cli.trainer.metrics import cpu_seconds, step_metrics
from agentrl_cli.trainer.report import Health
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
from tests.helpers.train import (
    TASK_PY,
    as_bytes,
    episodes_of,
    spawn,
    spawn_well,
    trainer_of,
    write_model,
    write_pack,
)
from tests.reports.planted import PLANTED, case, steps
from tests.trainer.test_resume import only_run, plan, project_of


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
    wanted = {
        "reward": (1.5 + 0.5 + 0.5) / 3,
        "rewards/right/mean": 1 / 3,
        "rewards/right/std": np.std([1, 0, 0]),
        "rewards/form/mean": 1.0,
        "rewards/form/std": 0.0,
        "reward_std": np.std([1.5, 0.5], ddof=1) / 2,  # the second group has one left: 0
        "frac_reward_zero_std": 0.5,
        "solved": 1 / 3,
        "completions/mean_length": 4.0,
        "completions/max_length": 6.0,
        "completions/clipped_ratio": 0.0,
        "tools/call_frequency": 2 / 3,
        "tools/failure_frequency": 1 / 3,
        "turns/mean": 1.0,
        "num_tokens": 5 + 3 + 7 + 3,  # the masked one cost its tokens, too
        "outcomes/solved": 1,
        "outcomes/failed": 2,
        "outcomes/env_error": 1,
        "facts/trained": 2,
        "facts/skipped:fault": 1,
        "drift/resegmented": 1,
        "drift/structural": 1,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_several_packs_are_distinguished() -> None:
    made = {"a": 1.0, "b": 0.0, "c": 0.5}
    one, two, three = (episode(name, value) for name, value in made.items())
    lost = episode("d", 1.0, outcome=Outcome.ENV_ERROR)
    named = [one.with_(pack="sql"), two.with_(pack="sql"), three.with_(pack="guess")]
    found = step_metrics([[*named, lost.with_(pack="calc")]], {}, packs=("sql", "guess", "calc"))
    assert {name: value for name, value in found.items() if name.startswith("packs/")} == {
        "packs/sql/reward": 1.0,  # 1.5 and 0.5: each has 0.5 for its form
        "packs/sql/solved": 0.5,
        "packs/guess/reward": 1.0,
        "packs/guess/solved": 0.0,
    }  # what could not be graded is not zero
    alone = step_metrics([named[:2]], {}, packs=("sql",))
    assert not any(name.startswith("packs/") for name in alone)


def test_cut_episodes_are_counted_and_errors_never_become_zeros() -> None:
    cut = episode("a", 0.0, outcome=Outcome.TRUNCATED_TOKENS)
    assert step_metrics([[cut, episode("b", 1.0)]], {})["completions/clipped_ratio"] == 0.5
    bad = [episode(name, 0.0, outcome=Outcome.SANDBOX_ERROR) for name in "ab"]
    found = step_metrics([bad], dict.fromkeys("ab", Fact.SKIPPED_SANDBOX_ERROR))
    assert not {"reward", "solved"} & found.keys()
    assert found["outcomes/sandbox_error"] == found["facts/skipped:fault"] == 2
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


# --- alerts and healing ---


def test_a_run_stops_after_so_many_steps_in_a_row() -> None:
    silent, fine = PLANTED["no_signal"], case(steps([0.5]))
    health = Health(["no_signal"], patience=3)
    stops = [health.look(one)[1] for one in (silent, silent, fine, silent, silent, silent)]
    assert stops == ["", "", "", "", "", "no_signal"]
    assert Health(["nan"]).look(silent)[1] == "", "only what stop_on lists"
    assert Health(["no_signal"]).look(PLANTED["all_failed"])[1] == "no_signal", "its older name"
    assert Health(["collapse"]).look(PLANTED["collapse"])[1] == "collapse"


def test_one_cause_is_reported_and_what_is_independent_of_it() -> None:
    rows = [{**row, "ungraded/exact": 2.0} for row in PLANTED["truncated"].steps]
    both = replace(PLANTED["truncated"], steps=rows, episodes=PLANTED["tools"].episodes)
    assert [alert.name for alert in Health([]).look(both)[0]] == ["truncated", "ungraded"]
    found = [alert.name for alert in Health(["tools"]).look(both)[0]]
    assert found == ["truncated", "tools", "ungraded"], "one that stops the run is"


def test_alerts_fold(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s.db") as store:
        run = store.runs.add(RunRow("", "r"))
        for step, value, text in ((3, 0.3, "a"), (4, 0.4, "b"), (7, 0.7, "c"), (7, 0.9, "again")):
            store.journal.add_alert(run.id, "warn", "no_signal", value, 0.1, text, step=step)
        store.journal.add_alert(run.id, "bad", "nan", None, None, "once", step=5)
        store.flush()
        names = ("name", "count", "first_step", "last_step", "value", "text")
        folded = [tuple(row[n] for n in names) for row in store.journal.folded_alerts(run.id)]
    assert sorted(folded) == [("nan", 1, 5, 5, None, "once"), ("no_signal", 3, 3, 7, 0.7, "c")]


async def test_a_training_stops_itself_with_a_named_reason(tmp_path: Path) -> None:
    from agentrl_cli.reports.run_data import load

    # It says nothing but one token: all rewards are equal.
    model, said = write_model(tmp_path / "model", only=5), list[str]()
    train = {"steps": 9, "stop_on": ["no_signal"], "stop_patience": 3}
    async with trainer_of(tmp_path / "p", model, train=train) as trainer:
        trainer.reporter.narrate = said.append
        before, store = as_bytes(trainer.loaded.model.state_dict()), trainer.store
        run = await trainer.train()
        assert (run.status, run.step, run.error) == ("stopped", 3, "no_signal")
        assert as_bytes(trainer.loaded.model.state_dict()) == before, "nothing is trained"
        assert {e.fact for e in episodes_of(store, run)} == {Fact.SKIPPED_ZERO_VARIANCE}
        assert store.runs.steps(run.id)[0]["frac_reward_zero_std"] == 1.0
        assert any(line.startswith("stopping: no_signal") for line in said)
        reported = [ln for ln in said if ": no_signal. " in ln and not ln.startswith("stopping")]
        assert len(reported) == 1, said  # then counted
        assert "  ETA " in next(line for line in said if line.startswith("step 1/9"))
        shown = {row["name"]: str(row["text"]) for row in load(store, run.id).alerts}
        assert shown["no_signal"].startswith("3×, steps 1 to 3: Nothing was trained")


class Poison:
    """Makes a weight no number right before the second update."""

    def __init__(self) -> None:
        self.head: Any = None

    def on_batch(self, step: int) -> None:
        if step == 2:
            self.head.weight.data[7] = math.nan


@pytest.mark.parametrize("stop", [True, False])
async def test_an_update_that_is_no_number_is_an_alert_with_a_value_and_a_threshold(
    tmp_path: Path, model: Path, stop: bool
) -> None:
    poison, train = Poison(), {"steps": 2, "stop_on": ["nan"] * stop}
    async with trainer_of(tmp_path, model, [poison], train=train) as trainer:
        poison.head = trainer.loaded.model.lm_head
        with pytest.raises(TrainingStopped, match="nan") if stop else nullcontext():
            await trainer.train()
        run = trainer.store.runs.get(trainer.run.id)
        assert run.status == ("stopped" if stop else "finished")
        assert run.error.startswith("nan") is stop
        (alert,) = [a for a in trainer.store.journal.folded_alerts(run.id) if a["name"] == "nan"]
    assert (alert["level"], alert["threshold"], alert["last_step"]) == ("bad", 0.0, 2)
    assert alert["value"] == (1.0 if stop else 2.0) and "train.lr" in str(alert["text"])


ROSE, FELL = [0.3, 0.5, 0.7, 0.8, 0.8, 0.8], [0.8, 0.5, 0.6, 0.5, 0.5, 0.6, 0.5]


@pytest.mark.parametrize(
    ("solved", "more", "rule"),
    [
        (ROSE, {}, ""),
        ([*ROSE, 0.0, 0.0], {}, "collapse"),
        (ROSE, {"approx_kl": 0.3}, ""),  # it drifts, and solves more
        ([*ROSE, *FELL], {"approx_kl": 0.3}, "kl_drift"),
        ([*ROSE, *FELL], {}, ""),
        (ROSE, {"grad_norm": [1.0] * 5 + [float("nan")]}, "nan"),
    ],
)
def test_a_fall_is_certain_a_drift_alone_is_not(
    solved: list[float], more: dict[str, Any], rule: str
) -> None:
    assert certain(case(steps(solved, **more))) == rule


SOLVED = [0.4, 0.4, 0.4, 0.6, 0.6, 0.7, 0.7, 0.7, 0.8, 0.8, 0.1, 0.1]


@pytest.mark.parametrize(
    ("solved", "tried", "step"),
    [
        (SOLVED, [], 5),  # 0.7 after it; 0.4 + 0.05 after the base
        (SOLVED[:5], [], 0),  # nothing is known of later ones
        ([0.66] * 5 + [0.7] * 3, [], 0),  # the best by evaluation, unless another is clearly better
        (SOLVED, [5], 5),
        ([0.4] * 5, [5], 0),
    ],
)
def test_the_checkpoint_from_which_most_was_solved(
    solved: list[float], tried: list[int], step: int
) -> None:
    made = [
        CheckpointRow("r", step, kind, str(step), {}, 0.0, n)
        for n, (step, kind) in enumerate([(0, "best"), (5, "step"), (10, "step"), (12, "last")])
    ]
    assert choose(made, steps(solved), tried).step == step


@pytest.mark.parametrize(
    ("back", "rate"),
    [(7, 0.00333), (2, 0.0008), (0, 0.002)],  # from the base nothing is known of sound steps
)
def test_the_rate_after_a_fall(back: int, rate: float) -> None:
    rates = [0.002, 0.004, 0.006, 0.008, 0.01, 0.01, 0.01]
    rose = steps([0.2, 0.2, 0.2, 0.4, 0.6, 0.6, 0.6], learning_rate=rates)
    assert lower(0.01, rose, back) == rate


def project(folder: Path, model: Path, when: str, **train: Any) -> Path:
    """Even tokens are right, but none in some steps: what a step that was too large looks like."""
    code = TASK_PY.replace("ctx.part(float(", f"ctx.part(0.0 if episode.step {when} else float(")
    write_pack(folder, code=code)
    rollout = {"concurrency": 3, "group_size": 8, "prompts_per_step": 4, "max_new_tokens": 1}
    given = {"steps": 6, "save_every": 2, "lr": 0.01, **train}
    return project_of(folder, model, rollout=rollout, train=given, algo={})


def read(project: Path) -> tuple[RunRow, list[dict[str, Any]], str, Any]:
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        run = only_run(store)
        last = next(Path(c.path) for c in store.runs.checkpoints(run.id) if c.kind == "last")
        (file,) = last.glob("*model.safetensors")
        made = store.journal.healed(run.id)
        return run, made, summarise(read_evidence(store, run)), as_bytes(file.read_bytes())


def test_it_heals_and_ends_the_same_after_kills(tmp_path: Path, model: Path) -> None:
    whole, cut = (project(tmp_path / name, model, "== 3") for name in ("whole", "cut"))
    spawn_well(whole, "train", "--heal")
    run, made, text, weights = read(whole)
    (change,) = made
    assert (run.status, run.step, run.config["train"]["lr"]) == ("finished", 6, change["to"])
    assert (change["step"], change["rule"], change["key"]) == (3, "collapse", "train.lr")
    assert change["from"] == 0.01 and change["to"] < 0.01 / 2.9 and change["back"] in (0, 2)
    place = "step 2" if change["back"] else "the base"
    assert f"Healed after step 3: collapse, so back to {place}" in text
    for words, event, call in ((["--heal"], "update", 3), (["--resume", "last"], "batch", 2)):
        plan(cut, event, call)  # before the change of step 3, then after it, in step 4
        assert spawn(cut, "train", *words)[0] == -signal.SIGKILL
    spawn_well(cut, "train", "--resume", "last")
    _, again, _, found = read(cut)
    assert (again, found) == (made, weights)


def test_after_three_changes_it_ends_with_the_best_weights(tmp_path: Path, model: Path) -> None:
    bad = project(tmp_path / "bad", model, "% 4 == 3", steps=20)
    code, said = spawn(bad, "train", "--heal")
    run, made, _, _ = read(bad)
    assert code == 0 and run.status == "stopped" and run.step < 20, said
    assert len(made) == 3 and "collapse again after 3 changes of train.lr (0.01 → " in run.error
    rates = [one["to"] for one in made]
    assert rates == sorted(rates, reverse=True) and run.config["train"]["lr"] == rates[-1]
