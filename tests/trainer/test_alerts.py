"""The health rules on made-up series: each has a value, a threshold and advice; alerts fold; a run stops itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest

from agentrl_cli.config.train import Stop
from agentrl_cli.errors import TrainingStopped
from agentrl_cli.store import RunRow, Store
from agentrl_cli.trainer.alerts import RULES, Health, find_alerts
from tests.helpers.train import trainer_of, write_model


def names(series: list[dict[str, float]], trained: int = 8) -> list[list[str]]:
    """The alerts of every step."""
    health = Health([])
    return [[alert.name for alert in health.look(row, trained)[0]] for row in series]


def test_every_rule_can_stop_a_run() -> None:
    assert set(RULES) == set(get_args(Stop))


def test_a_healthy_series_says_nothing() -> None:
    series = [
        {"reward": 0.5 + n / 100, "entropy": 0.5 - n / 200, "grad_norm": 1.0 + n % 3, "loss": 0.1, "kl": 0.01 * n,
         "frac_reward_zero_std": 0.4, "clip_ratio/high_mean": 0.02, "approx_kl": 0.001}
        for n in range(40)
    ]  # fmt: skip
    for n in (9, 19, 29, 39):
        series[n]["eval/solved"] = series[n]["reward"]
    assert names(series) == [[]] * 40


def test_episodes_that_a_limit_on_time_masked_are_counted_with_their_setting() -> None:
    (alert,) = find_alerts({"outcomes/timeout": 3.0, "outcomes/env_error": 1.0}, trained=4)
    assert (alert.name, alert.value) == (
        "errors",
        4.0,
    ) and "outcome:env_error,timeout" in alert.text
    assert (
        "3 took longer than rollout.episode_timeout" in alert.text
        and "agent's timeout" not in alert.text
    )
    (alert,) = find_alerts({"outcomes/agent_timeout": 2.0}, trained=4)
    assert "2 took longer than the agent's timeout" in alert.text
    (alert,) = find_alerts({"outcomes/env_error": 1.0}, trained=4)
    assert "took longer" not in alert.text


def test_not_a_number() -> None:
    (alert,) = find_alerts({"loss": math.nan, "grad_norm": 1.0}, trained=4)
    assert (alert.name, alert.level, alert.value, alert.threshold) == ("nan", "bad", 1.0, 0.0)
    assert "loss is not a number" in alert.text and "train.lr" in alert.text
    (both,) = find_alerts({"loss": math.nan, "grad_norm": math.inf}, trained=4)
    assert (both.name, both.value) == ("nan", 2.0)
    assert [a.name for a in find_alerts({"grad_norm": math.inf}, trained=4)] == ["nan"]


def test_exploding_gradients() -> None:
    usual = [{"grad_norm": value} for value in (1.0, 2.0, 1.0, 2.0, 2.0)]
    (alert,) = find_alerts({"grad_norm": 25.0}, trained=4, before=usual)
    assert (alert.name, alert.value, alert.threshold) == (
        "gradients",
        25.0,
        20.0,
    ) and "12 times" in alert.text
    assert not find_alerts({"grad_norm": 19.0}, trained=4, before=usual)
    assert not find_alerts({"grad_norm": 25.0}, trained=4, before=usual[:4]), (
        "too few steps to know what is usual"
    )
    assert not find_alerts(
        {"grad_norm": 25.0}, trained=4, before=[*usual[:4], {"grad_norm": math.nan}]
    )


def test_entropy_collapse() -> None:
    first = [{"entropy": 1.0}] * 5
    (alert,) = find_alerts({"entropy": 0.019}, trained=4, before=first)
    assert (alert.name, alert.value, alert.threshold) == ("entropy_collapse", 0.019, 0.02)
    assert not find_alerts({"entropy": 0.021}, trained=4, before=first)
    (alert,) = find_alerts({"entropy": 0.001}, trained=4)
    assert alert.threshold == 0.002, "where nothing is known of the beginning"


def test_equal_rewards_are_no_alert_where_the_estimator_learns_from_them() -> None:
    flat = [{"frac_reward_zero_std": 1.0}] * 5
    assert [a.name for a in find_alerts(flat[-1], trained=8, before=flat[:-1])] == ["no_signal"]
    assert not find_alerts(flat[-1], trained=8, before=flat[:-1], compares=False)


def test_no_signal() -> None:
    (alert,) = find_alerts({}, trained=0)
    assert (alert.name, alert.threshold) == ("no_signal", 0.1) and "task.order" in alert.text
    broken, alert = find_alerts({"outcomes/agent_error": 6.0, "outcomes/failed": 2.0}, trained=0)[
        ::-1
    ]
    assert (
        "6 of the step's episodes ended in an error" in alert.text
        and "task.order" not in alert.text
    )
    assert broken.name == "errors"
    few = [{"frac_reward_zero_std": 0.95}] * 4
    assert not find_alerts(few[0], trained=4, before=few[:3])
    (alert,) = find_alerts(few[0], trained=4, before=few)
    assert alert.name == "no_signal" and alert.value == pytest.approx(0.05)


def test_reward_up_while_evaluation_is_flat() -> None:
    series = [{"reward": 0.3 + 0.02 * n} for n in range(25)]
    for n, rate in ((4, 0.4), (12, 0.405), (20, 0.4)):
        series[n]["eval/solved"] = rate
    found = names(series)
    assert [n for n, alerts in enumerate(found) if alerts] == [21], (
        "once, in the step after the third evaluation"
    )
    alert = find_alerts(series[21], trained=4, before=series[:21])[0]
    assert (alert.name, alert.threshold) == ("reward_hacking", 0.1)
    assert alert.value == pytest.approx(0.02 * 16) and "replay best" in alert.text
    series[20]["eval/solved"] = 0.5
    assert names(series) == [[]] * 25


def test_kl_and_clip_drift() -> None:
    (far,) = find_alerts({"kl": 1.5}, trained=4)
    assert (far.name, far.value, far.threshold) == (
        "kl_drift",
        1.5,
        1.0,
    ) and "algo.kl_coef" in far.text
    (fast,) = find_alerts({"kl": 0.1, "approx_kl": 0.2}, trained=4)
    assert (fast.name, fast.value, fast.threshold) == (
        "kl_drift",
        0.2,
        0.1,
    ) and "algo.epochs" in fast.text
    (clip,) = find_alerts({"clip_ratio/high_mean": 0.2, "clip_ratio/low_mean": 0.15}, trained=4)
    assert (clip.name, clip.threshold) == ("clip_drift", 0.3) and clip.value == pytest.approx(0.35)


def test_masks_and_limits() -> None:
    found = find_alerts(
        {"flags/MASK": 2.0, "completions/clipped_ratio": 0.6, "drift/structural": 1.0}, trained=4
    )
    assert [(a.name, a.value, a.threshold) for a in found] == [
        ("drift", 1.0, 0.0), ("mask", 2.0, 0.0), ("truncated", 0.6, 0.5)
    ]  # fmt: skip


def test_a_run_stops_after_so_many_steps_in_a_row() -> None:
    health = Health(["no_signal"], patience=3)
    stops = [health.look({}, trained)[1] for trained in (0, 0, 4, 0, 0, 0)]
    assert stops == ["", "", "", "", "", "no_signal"]
    assert Health(["nan"]).look({}, 0)[1] == "", "only what stop_on lists"


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
            sum(": no_signal " in line and not line.startswith("stopping") for line in said) == 1
        )  # then counted
        assert "  ETA " in next(line for line in said if line.startswith("step 1/9"))
        signal = next(
            a for a in trainer.store.journal.folded_alerts(run.id) if a["name"] == "no_signal"
        )
        assert (signal["count"], signal["first_step"], signal["last_step"]) == (3, 1, 3)
        shown = next(
            row for row in load(trainer.store, run.id).alerts if row["name"] == "no_signal"
        )
        assert str(shown["text"]).startswith("3×, steps 1 to 3: No group had spread rewards")


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
