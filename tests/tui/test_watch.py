"""Watch: reads the store, writes only controls, survives whatever a run has left there."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from agentrl_cli.store import EvalRow, RunRow, Store
from agentrl_cli.store.holder import Holder
from agentrl_cli.trainer.metrics import step_metrics
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.common.charts import chart
from agentrl_cli.tui.watch.charts import Look, overview_charts
from agentrl_cli.tui.watch.data import Health, WatchData
from agentrl_cli.tui.watch.health import health_of
from agentrl_cli.tui.watch.load import load
from agentrl_cli.tui.watch.panels import head, histogram_lines
from agentrl_cli.tui.watch.recent import Fold, GroupLine, folded
from agentrl_cli.tui.watch.screen import WatchScreen
from tests.helpers import tui_demo as demo
from tests.helpers.tui import until, until_text, visible

WIDE, SMALL = (120, 40), (80, 24)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """The invented run, whose process is this one, so that it counts as alive."""
    path = tmp_path / "agentrl.db"
    demo.fill(path, steps=40)
    return path


def app(path: Path, run: str = "grpo-07") -> AgentApp:
    return AgentApp(path, lambda reader: WatchScreen(reader, run))


async def test_overview_shows_curves_episodes_alerts_and_progress(db: Path) -> None:
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        text = await until_text(pilot, "REWARD 0.")
        for shown in (
            "step 40/400",
            "LIVE",
            "SOLVED, eval",
            "LOSS",
            "does not move: clip 0.031, NO SIGNAL 0.38",
            "TOOL ERRORS",
            "ROLLOUT [",
            "calc/0417",
            "worst",
            "BADARG",
            "ALERTS",
            "step 40 of 400",
            "HEALTH",
            "p pause / resume",
            "ETA",
        ):
            assert shown in text, shown


async def test_new_steps_appear_while_watching(db: Path) -> None:
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "step 40/400")
        with Store.open(db) as store:
            store.runs.add_step("run7", 41, {"reward": 0.777})
        await until_text(pilot, "step 41/400")
        assert "0.777" in visible(pilot.app)


async def test_controls_ask_first_and_only_yes_sends(db: Path) -> None:
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "REWARD 0.")
        for key, answer in (("p", "n"), ("X", "escape"), ("k", "y"), ("E", "y")):
            await pilot.press(key)
            await until_text(pilot, "y yes")
            await pilot.press(answer)
            await until(pilot, lambda: isinstance(pilot.app.screen, WatchScreen))
        await until(
            pilot,
            lambda: (
                "waiting: checkpoint" in visible(pilot.app) and "│ evaluate  " in visible(pilot.app)
            ),
        )
    with Store.open(db) as store:
        assert [control.action for control in store.controls.take("run7")] == [
            "checkpoint",
            "evaluate",
        ]


async def test_a_paused_run_reports_it_and_the_pace_leaves_the_pause_out(db: Path) -> None:
    with Store.open(db) as store:
        store.controls.add("run7", "pause")
        store.controls.take("run7")
        store.episodes.cancel("run7")
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        text = await until_text(pilot, "PAUSED")
        assert (
            "paused after step 40: p resumes" in text and "ETA" not in text and "LIVE" not in text
        )
        await pilot.press("p")
        await until_text(pilot, "resume grpo-07?")
    run = RunRow("r", "r", total_steps=20)
    at = [0.0, 2.0, 4.0, 600.0, 602.0]
    assert (
        WatchData(
            run, steps=tuple({"step": n, "at": x} for n, x in enumerate(at))
        ).seconds_per_step()
        == 2.0
    )


async def test_the_mouse_chooses_tabs_episodes_and_groups(db: Path) -> None:
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        text = await until_text(pilot, "worth a look")
        lines = text.splitlines()
        row = next(n for n, line in enumerate(lines) if " worst" in line)
        await pilot.click(offset=(lines[row].index("worst"), row))
        await pilot.click(offset=(lines[row].index("worst"), row))
        await until_text(pilot, "agentrl replay")
        await pilot.press("q")
        await pilot.click(offset=(lines[1].index("Groups"), 1))
        text = await until_text(pilot, "GROUPS 2")
        line = next(n for n, line in enumerate(text.splitlines()) if " 40 calc/0417" in line)
        await pilot.click(offset=(20, line))
        await pilot.click(offset=(20, line))
        assert "ep0040006" in await until_text(pilot, "agentrl replay")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ((100, 30), ("grpo-07", "HEALTH", "worth a look")),
        ((60, 15), ("step 40", "a larger terminal")),
    ],
)
async def test_every_size_shows_what_fits(
    db: Path, size: tuple[int, int], shown: tuple[str, ...]
) -> None:
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "worth a look")
        await pilot.resize_terminal(*size)
        await until(pilot, lambda: all(part in visible(pilot.app) for part in shown))
        for key in "23456789":
            await pilot.press(key)
        await pilot.resize_terminal(*SMALL)
        await pilot.press("1")
        await until_text(pilot, "ALERTS")
        await until_text(pilot, "tool error rate 3%")


def test_a_killed_child_is_not_alive(tmp_path: Path) -> None:
    """`train --watch` is the trainer's parent: until it asks, a dead one is still in the table of processes."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    run = RunRow("r", "r", claim="train", **asdict(Holder.of(process.pid)))
    states = [run.state]
    process.kill()
    while states[-1] == "running":
        states.append(run.state)
    process.wait()
    assert states[0] == "running" and states[-1] == "interrupted"


async def test_rate_is_changed_from_what_is_known(db: Path) -> None:
    with Store.open(db) as store:
        store.runs.add_step("run7", 41, {"reward": 0.5, "learning_rate": 1e-4})
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "step 41")
        await pilot.press("plus")
        assert "0.0001 → 0.00015" in await until_text(pilot, "y yes")
        await pilot.press("y")
        await until_text(pilot, "waiting: set")
    with Store.open(db) as store:
        assert store.controls.take("run7")[0].data == {"key": "train.lr", "value": 0.00015}


async def test_tabs_and_drill_down(db: Path) -> None:
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "REWARD 0.")
        await pilot.press("2")
        await until_text(pilot, "grad_norm")
        await pilot.press("7")
        await until_text(pilot, "step 40 reward")
        await pilot.press("9")
        await until_text(pilot, "tool error rate")
        await pilot.press("1", "enter")
        assert "RUNNING" in await until_text(pilot, "agentrl replay")
        await pilot.press("q")
        await until_text(pilot, "agentrl watch")
        await pilot.press("3")
        await until_text(pilot, "ep0040008")
        await pilot.press("f", *"reward:>1", "enter")
        await until(
            pilot,
            lambda: "ep0040008" not in visible(pilot.app) and "ep0040006" in visible(pilot.app),
        )
        await pilot.press("enter")
        await until_text(pilot, "agentrl replay")


async def test_enter_on_an_alert_opens_what_it_is_about(db: Path) -> None:
    with Store.open(db) as store:
        run = store.runs.get("grpo-07").id
        for name in ("kl_drift", "mask"):
            store.journal.add_alert(run, "warn", name, 1.0, 0.5, f"about {name}", step=39)
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "about mask")
        screen = pilot.app.screen
        assert isinstance(screen, WatchScreen) and screen.data is not None
        places = len(screen.data.live) + len(screen.data.notable)
        await pilot.press(*["down"] * (places + 2), "enter")  # the third alert is the newest
        assert (screen.tab, screen.browse.filter) == ("episodes", "step:39 flag:MASK")
        await pilot.press("1", "up", "enter")
        assert (screen.tab, screen.browse.filter) == ("episodes", "step:39")
        await pilot.press("1", "up", "enter")  # this one names no step
        assert screen.tab == "health"


async def test_the_log_follows_until_it_is_scrolled_up(db: Path) -> None:
    def write(first: int, last: int) -> None:
        with Store.open(db) as store:
            for n in range(first, last):
                store.journal.add_log("run7", "info", f"line {n}.")

    write(0, 80)
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "REWARD 0.")
        await pilot.press("l")
        await until_text(pilot, "line 79.")
        write(80, 90)
        await until_text(pilot, "line 89.")
        await pilot.press("pageup", "pageup")
        await until(pilot, lambda: "line 89." not in visible(pilot.app))
        write(90, 91)
        screen = pilot.app.screen
        assert isinstance(screen, WatchScreen)
        await until(
            pilot, lambda: screen.data is not None and screen.data.logs[-1]["text"] == "line 90."
        )
        assert "line 90." not in visible(pilot.app)


async def test_any_knob_is_set_after_a_question(db: Path) -> None:
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "REWARD 0.")
        await pilot.press("S")
        await until_text(pilot, "one of lr, max_grad_norm, steps")
        await pilot.press("x", "enter")
        await until_text(pilot, "eval_every needs a number, not '20x'")
        await pilot.press("backspace", "enter")
        await until_text(pilot, "train.eval_every becomes 20")
        await pilot.press("y")
        await until_text(pilot, "waiting: set")
    with Store.open(db) as store:
        assert store.controls.take("run7")[0].data == {"key": "train.eval_every", "value": 20}


def test_a_kl_to_the_old_policy_is_not_called_the_reference() -> None:
    data = WatchData(RunRow("r", "r"), steps=({"step": 1, "approx_kl": 0.0, "reward": 0.1},))
    assert not data.has_reference and data.last("kl") is None
    assert any(
        "KL no reference model" in line.plain for line in overview_charts(data, 60, 30, Look())
    )


async def test_a_run_without_anything_yet(tmp_path: Path) -> None:
    with Store.open(tmp_path / "new.db") as store:
        store.runs.add(RunRow(id="r", name="new", total_steps=10))
        store.runs.add_step("r", 1, {"reward": float("nan"), "loss": float("inf")})
    async with app(tmp_path / "new.db", "new").run_test(notifications=True, size=SMALL) as pilot:
        await until_text(pilot, "no episode runs")
        for key in (
            "enter",
            "down",
            "up",
            *"2456789",
            "r",
            "left_square_bracket",
            "1",
            "space",
            "space",
        ):
            await pilot.press(key)


async def test_a_training_that_begins_takes_the_place_of_an_ended_one(tmp_path: Path) -> None:
    path = tmp_path / "agentrl.db"
    with Store.open(path) as store:
        store.runs.add(RunRow(id="r1", name="old-01", status="finished", started=1.0))
    async with AgentApp(path, lambda reader: WatchScreen(reader, "r1", follow=True)).run_test(
        size=(120, 40)
    ) as pilot:
        await until_text(pilot, "old-01")
        with Store.open(path) as store:
            store.runs.add(RunRow(id="r2", name="ended-02", status="finished"))
            store.runs.add(RunRow(id="r3", name="new-03"))
        await until_text(pilot, "new-03")


async def test_a_run_that_is_missing_is_reported(db: Path) -> None:
    async with app(db, "nope").run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "No run named 'nope'")
        await pilot.press("p", "enter", "2", "1")


def test_reading_again_reads_only_what_is_new(db: Path) -> None:
    with Store.open(db) as store:
        first = load(store, "run7")
        store.runs.add_step("run7", 41, {"reward": 0.9})
        store.journal.add_log("run7", "info", "one more")
        store.flush()
        second = load(store, "run7", first)
    assert [row["step"] for row in second.steps] == list(range(1, 42))
    assert second.steps[0] is first.steps[0]
    assert [row["text"] for row in second.logs][-1] == "one more" and len(second.logs) == len(
        first.logs
    ) + 1
    assert second.last("reward") == 0.9


def test_health_rules_have_values_and_advice() -> None:
    run = RunRow("r", "r", status="finished")
    steps = (
        {
            "step": 1,
            "frac_reward_zero_std": 0.97,
            "entropy": 0.4,
            "loss": float("nan"),
            "tools/error_rate": 0.1,
        },
    )
    found = {check.name: check for check in health_of(WatchData(run, steps=steps))}
    assert (
        found["groups"].level == "bad" and "0.97" in found["groups"].text and found["groups"].advice
    )
    assert (
        found["entropy"].level == "ok"
        and found["tools"].level == "ok"
        and found["nan"].level == "bad"
    )


def test_paused_follows_the_last_control() -> None:
    run = RunRow("r", "r", claim="train", **asdict(Holder.of()))
    kinds = ["control:pause", "control:set"]
    events = tuple({"id": n, "at": 0.0, "kind": kind, "data": {}} for n, kind in enumerate(kinds))
    assert WatchData(run, events=events).paused
    for kind in ("control:resume", "resumed"):
        assert not WatchData(
            run, events=(*events, {"id": 9, "at": 0.0, "kind": kind, "data": {}})
        ).paused
    assert not WatchData(RunRow("r", "r", status="stopped"), events=events).paused


def test_without_a_terminal_one_line_per_step(db: Path) -> None:
    with Store.open(db) as store:
        store.runs.update("run7", status="finished")
    command = [sys.executable, "-m", "agentrl_cli", "watch", "--db", str(db)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (
        len(done.stdout.splitlines()) == 40
        and "step 40" in done.stdout
        and "finished" in done.stderr
    )
    rows = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert json.loads(rows[-1])["step"] == 40


async def test_frozen_does_not_move(db: Path) -> None:
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "REWARD 0.")
        await pilot.press("space")
        await until_text(pilot, "FROZEN")
        screen = pilot.app.screen
        assert isinstance(screen, WatchScreen)
        with Store.open(db) as store:
            store.runs.add_step("run7", 41, {"reward": 0.5})
        await pilot.pause(1.2)
        assert "step 40/400" in visible(pilot.app)
        await pilot.press("space")
        await until(pilot, lambda: screen.data is not None and screen.data.step == 41)


async def test_curves_are_compared_filtered_zoomed_and_logarithmic(db: Path) -> None:
    with Store.open(db) as store:
        store.runs.add(RunRow("run6", "grpo-06", status="finished", started=1.0))
        for step in range(1, 41):
            store.runs.add_step("run6", step, {"reward": 0.3})
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        text = await until_text(pilot, "REWARD 0.")
        assert "ADVANTAGE" in text
        await pilot.press("C")
        await until_text(pilot, "grpo-06  40 steps")
        await pilot.press("1")
        assert "vs 0.3 at 40" in await until_text(pilot, "COMPARE grpo-06")
        await pilot.press("f", *"ent|norm", "enter")
        text = await until_text(pilot, "metrics with 'ent|norm'")
        assert "grad_norm" in text and "kl" not in text.split("metrics with")[1]
        await pilot.press("y", "z")
        assert "last 100 steps" in await until_text(pilot, "log axis")
        await pilot.press("C", "escape", "9")
        await until_text(pilot, "no advantage and teaches nothing")


async def test_ctrl_c_can_stop_now(db: Path) -> None:
    async with app(db).run_test(notifications=True, size=SMALL) as pilot:
        await until_text(pilot, "REWARD")
        await pilot.press("ctrl+c")
        assert "detach: the training goes on" in await until_text(pilot, "stop now")
        await pilot.press("3")
        await until_text(pilot, "stop: asked the trainer")
    with Store.open(db) as store:
        (control,) = store.controls.take("run7")
    assert (control.action, control.data) == ("stop", {"now": True})


def test_rules_over_several_steps() -> None:
    run = RunRow("r", "r", status="finished")
    steps = tuple(
        {"step": n, "reward": n / 20, "grad_norm": 9.0 if n == 20 else 0.3} for n in range(1, 21)
    )
    evals = tuple(EvalRow("r", n, pass_rate=0.4) for n in (5, 10, 20))
    found = {check.name: check for check in health_of(WatchData(run, steps=steps, evals=evals))}
    assert (
        found["hacking"].level == "warn"
        and found["spike"].level == "warn"
        and "30.0 x" in found["spike"].text
    )


def test_the_histogram_counts_every_advantage() -> None:
    lines = [line.plain for line in histogram_lines([0.0, 0.0, 9.0, -9.0], 29)]
    assert (
        "zero 50%" in lines[0]
        and lines[1][1] == "▄"
        and lines[1][13] == "█"
        and lines[1][25] == "▄"
    )
    assert "none yet" in histogram_lines([], 20)[1].plain


def test_a_log_axis_shows_the_numbers() -> None:
    lines = [
        line.plain for line in chart("loss", [(1, 0.01), (2, 100.0), (3, -1.0)], 30, 4, log=True)
    ]
    assert "100" in lines[1] and "0.01" in lines[4]
    assert "-1" in chart("loss", [(1, -1.0), (2, -0.5)], 30, 4, log=True)[4].plain


def group_of(step: int, task: str, solved: int, size: int = 4, level: float = 0.0) -> GroupLine:
    rewards = tuple(1.0 if n < solved else level for n in range(size))
    return GroupLine(step, task, rewards, solved, ("trained",), (), f"{task}-best")


def test_the_ceiling_is_not_a_failure() -> None:
    def steps(solved: float, failed: float) -> tuple[dict[str, float], ...]:
        row = {
            "frac_reward_zero_std": solved + failed,
            "groups/all_solved": solved,
            "groups/all_failed": failed,
        }
        return tuple({"step": n, "at": 10.0 * n, **row} for n in range(1, 7))

    def check(solved: float, failed: float) -> Health:
        data = WatchData(RunRow("r", "r"), steps=steps(solved, failed))
        return next(item for item in health_of(data) if item.name in ("groups", "ceiling"))

    top = check(0.95, 0.0)
    assert (top.level, top.name) == ("done", "ceiling") and "nothing left to learn: 95%" in top.text
    assert "agentrl eval r@best" in top.advice and "harder tasks" in top.advice
    stuck = check(0.0, 1.0)
    assert (stuck.level, stuck.advice) == ("bad", "easier tasks, a warm start, or a larger group")
    data = WatchData(RunRow("r", "r"), steps=steps(0.95, 0.0), health=(top,))
    assert "AT THE CEILING" in head(data).plain and "warning" not in head(data).plain


def test_groups_without_signal_are_one_line_a_step() -> None:
    groups = (
        group_of(7, "a", 4),
        group_of(7, "b", 2),
        group_of(7, "c", 0),
        group_of(7, "d", 0, level=0.5),
    )
    rows = folded(groups, ())
    assert [row.text() if isinstance(row, Fold) else row.task_id for row in rows] == [
        "b",
        ">     7 3 groups without signal: 1 all solved, 2 all failed",
    ]
    assert [row.task_id for row in folded(groups, {7}) if isinstance(row, GroupLine)] == [
        "b",
        "a",
        "c",
        "d",
    ]


async def test_curves_fill_the_middle_and_the_log_is_a_strip(db: Path) -> None:
    with Store.open(db) as store:
        for name in ("grpo-05", "grpo-06"):
            store.runs.add(RunRow(name, name, status="finished", started=1.0))
            for step in range(1, 41):
                store.runs.add_step(name, step, {"reward": 0.3})
    async with app(db).run_test(notifications=True, size=(200, 55)) as pilot:
        await until_text(pilot, "REWARD 0.")
        middle = pilot.app.screen.query_one("#curves")
        assert middle.region.x < 60 and middle.region.width >= 110
        assert pilot.app.screen.query_one("#strip").region.height == 5
        for number in "12":
            await pilot.press("C")
            await until_text(pilot, "curves of other trainings")
            await pilot.press(number)
            await until(pilot, lambda: isinstance(pilot.app.screen, WatchScreen))
        text = await until_text(pilot, "⠒ grpo-05")
        assert "⠒ grpo-06" in text and "vs 0.3 0.3" in text


def test_equal_groups_are_counted_by_what_they_are() -> None:
    words = demo.Words()
    good, bad = (demo.episode(words, 1, solved=solved) for solved in (True, False))
    found = step_metrics([[good, good], [bad, bad], [good, bad], [good, good]], {})
    assert (found["groups/all_solved"], found["groups/all_failed"]) == (0.5, 0.25)
    assert found["frac_reward_zero_std"] == 0.75
