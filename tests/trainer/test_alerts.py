"""Alerts: the first fault of a step, what stops a run; alerts fold."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import TrainingStopped
from agentrl_cli.store import RunRow, Store
from agentrl_cli.trainer.report import Health
from tests.helpers.train import trainer_of, write_model
from tests.reports.planted import PLANTED, case, steps


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
        run = await trainer.train()
        assert (run.status, run.step, run.error) == ("stopped", 3, "no_signal")
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
