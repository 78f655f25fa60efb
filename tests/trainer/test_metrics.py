"""The numbers of a step by hand, and CPU time with all descendants."""

import math
import signal
import subprocess
import sys
import time
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
        for step in (3, 4, 7):
            store.journal.add_alert(
                run.id, "warn", "no_signal", step / 10, 0.1, f"text {step}", step=step
            )
        store.journal.add_alert(
            run.id, "warn", "no_signal", 0.9, 0.1, "again, after a resume", step=7
        )
        store.journal.add_alert(run.id, "bad", "nan", None, None, "once", step=5)
        store.flush()
        assert len(store.journal.alerts(run.id)) == 4
        nan, signal = sorted(store.journal.folded_alerts(run.id), key=lambda row: row["name"])
        assert (signal["count"], signal["first_step"], signal["last_step"]) == (3, 3, 7)
        assert (signal["value"], signal["text"], signal["first"] <= signal["last"]) == (
            0.7,
            "text 7",
            True,
        )
        assert (nan["count"], nan["first_step"], nan["last_step"], nan["value"]) == (1, 5, 5, None)


async def test_a_training_stops_itself_with_a_named_reason(tmp_path: Path) -> None:
    from agentrl_cli.reports.run_load import load

    model = write_model(
        tmp_path / "model", only=5
    )  # it says nothing but one token: all rewards are equal
    train = {"steps": 9, "stop_on": ["no_signal"], "stop_patience": 3}
    said: list[str] = []
    async with trainer_of(tmp_path / "p", model, train=train) as trainer:
        trainer.reporter.narrate = said.append
        before = as_bytes(trainer.loaded.model.state_dict())
        run = await trainer.train()
        assert (run.status, run.step, run.error) == ("stopped", 3, "no_signal")
        assert as_bytes(trainer.loaded.model.state_dict()) == before, "nothing is trained"
        assert {e.fact for e in episodes_of(trainer.store, run)} == {Fact.SKIPPED_ZERO_VARIANCE}
        assert trainer.store.runs.steps(run.id)[0]["frac_reward_zero_std"] == 1.0
        assert any(line.startswith("stopping: no_signal") for line in said)
        assert (
            sum(": no_signal. " in line and not line.startswith("stopping") for line in said) == 1
        ), said  # then counted
        assert "  ETA " in next(line for line in said if line.startswith("step 1/9"))
        signal = next(
            a for a in trainer.store.journal.folded_alerts(run.id) if a["name"] == "no_signal"
        )
        assert (signal["count"], signal["first_step"], signal["last_step"]) == (3, 1, 3)
        shown = next(
            row for row in load(trainer.store, run.id).alerts if row["name"] == "no_signal"
        )
        assert str(shown["text"]).startswith("3×, steps 1 to 3: Nothing was trained")


class Poison:
    """Makes a weight no number right before the second update."""

    def __init__(self) -> None:
        self.head: Any = None

    def on_batch(self, step: int) -> None:
        if step == 2:
            self.head.weight.data[7] = math.nan


@pytest.mark.parametrize("stop", [True, False])
async def test_an_update_that_is_no_number_is_an_alert_with_a_value_and_a_threshold(
    tmp_path: Path, stop: bool
) -> None:
    model, poison = write_model(tmp_path / "model"), Poison()
    train = {"steps": 2, "stop_on": ["nan"] if stop else []}
    async with trainer_of(tmp_path / "p", model, [poison], train=train) as trainer:
        poison.head = trainer.loaded.model.lm_head
        if stop:
            with pytest.raises(TrainingStopped, match="nan"):
                await trainer.train()
        else:
            await trainer.train()
        run = trainer.store.runs.get(trainer.run.id)
        assert (
            run.status == ("stopped" if stop else "finished")
            and run.error.startswith("nan") is stop
        )
        (alert,) = [a for a in trainer.store.journal.folded_alerts(run.id) if a["name"] == "nan"]
        assert (alert["level"], alert["threshold"], alert["last_step"]) == ("bad", 0.0, 2)
        assert alert["value"] == (1.0 if stop else 2.0) and "train.lr" in str(alert["text"])


ONCE, AGAIN = "== 3", "% 4 == 3"


def test_a_fall_is_certain_a_drift_alone_is_not() -> None:
    rose, fell = [0.3, 0.5, 0.7, 0.8, 0.8, 0.8], [0.8, 0.5, 0.6, 0.5, 0.5, 0.6, 0.5]
    assert certain(case(steps(rose))) == ""
    assert certain(case(steps([*rose, 0.0, 0.0]))) == "collapse"
    assert certain(case(steps(rose, approx_kl=0.3))) == "", "it drifts, and solves more"
    assert certain(case(steps([*rose, *fell], approx_kl=0.3))) == "kl_drift"
    assert certain(case(steps([*rose, *fell]))) == ""
    assert certain(case(steps(rose, grad_norm=[1.0] * 5 + [float("nan")]))) == "nan"


def test_the_checkpoint_from_which_most_was_solved() -> None:
    made = [
        CheckpointRow("r", step, kind, str(step), {}, 0.0, n)
        for n, (step, kind) in enumerate([(0, "best"), (5, "step"), (10, "step"), (12, "last")])
    ]
    rows = steps([0.4, 0.4, 0.4, 0.6, 0.6, 0.7, 0.7, 0.7, 0.8, 0.8, 0.1, 0.1])
    assert choose(made, rows, []).step == 5, "0.7 after it; 0.4 + 0.05 after the base"
    assert choose(made, rows[:5], []).step == 0, "nothing is known of later ones"
    near = steps([0.66] * 5 + [0.7] * 3)
    assert choose(made, near, []).step == 0, (
        "the best by evaluation, unless another is clearly better"
    )
    assert choose(made, rows, [5]).step == 5 and choose(made, steps([0.4] * 5), [5]).step == 0


def test_the_rate_after_a_fall() -> None:
    rates = [0.002, 0.004, 0.006, 0.008, 0.01, 0.01, 0.01]
    rose = steps([0.2, 0.2, 0.2, 0.4, 0.6, 0.6, 0.6], learning_rate=rates)
    assert lower(0.01, rose, 7) == 0.00333
    assert lower(0.01, rose, 2) == 0.0008
    assert lower(0.01, rose, 0) == 0.002, "from the base nothing is known of sound steps"


def project(folder: Path, model: Path, when: str, **train: Any) -> Path:
    """Even tokens are right, but none in some steps: what a step that was too large looks like."""
    code = TASK_PY.replace("ctx.part(float(", f"ctx.part(0.0 if episode.step {when} else float(")
    write_pack(folder, code=code)
    rollout = {"concurrency": 3, "group_size": 8, "prompts_per_step": 6, "max_new_tokens": 1}
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
    whole = project(tmp_path / "whole", model, ONCE)
    spawn_well(whole, "train", "--heal")
    run, made, text, weights = read(whole)
    assert (run.status, run.step, run.config["train"]["lr"]) == ("finished", 6, made[0]["to"])
    (change,) = made
    assert (change["step"], change["rule"], change["key"]) == (3, "collapse", "train.lr")
    assert change["from"] == 0.01 and change["to"] < 0.01 / 2.9 and change["back"] in (0, 2)
    assert (
        f"Healed after step 3: collapse, so back to {'step 2' if change['back'] else 'the base'}"
        in text
    )
    cut = project(tmp_path / "cut", model, ONCE)
    for words, event, call in ((["--heal"], "update", 3), (["--resume", "last"], "batch", 2)):
        plan(cut, event, call)  # before the change of step 3, then after it, in step 4
        assert spawn(cut, "train", *words)[0] == -signal.SIGKILL
    spawn_well(cut, "train", "--resume", "last")
    after = read(cut)
    assert (after[1], after[3]) == (made, weights)


def test_after_three_changes_it_ends_with_the_best_weights(tmp_path: Path, model: Path) -> None:
    bad = project(tmp_path / "bad", model, AGAIN, steps=20)
    code, said = spawn(bad, "train", "--heal")
    run, made, _, _ = read(bad)
    assert code == 0 and run.status == "stopped" and run.step < 20, said
    assert len(made) == 3 and "collapse again after 3 changes of train.lr (0.01 → " in run.error
    rates = [one["to"] for one in made]
    assert rates == sorted(rates, reverse=True) and run.config["train"]["lr"] == rates[-1]
