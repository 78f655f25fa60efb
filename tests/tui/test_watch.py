"""Watch: reads the store, writes only controls, survives whatever a run has left there."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.geometry import Size

from agentrl_cli.errors import UsageError
from agentrl_cli.reports.diagnosis import diagnose, stages
from agentrl_cli.reports.run_data import GroupRow, RunData, load, notable_of
from agentrl_cli.store import RunRow, Store, WorkerRow
from agentrl_cli.store.holder import Holder
from agentrl_cli.trainer.controls import CHANGEABLE
from agentrl_cli.trainer.metrics import step_metrics
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.watch.charts import Look, overview_charts
from agentrl_cli.tui.watch.controls import SETTINGS, read_setting
from agentrl_cli.tui.watch.overview import notable_rows, now_rows
from agentrl_cli.tui.watch.page import Fold, Recent, Shown, fold_groups, load_recent
from agentrl_cli.tui.watch.pages import worker_lines
from agentrl_cli.tui.watch.panels import head, health_lines
from agentrl_cli.tui.watch.screen import WatchScreen
from agentrl_cli.types import AgentState, Fact, Outcome, RewardPart, Tokens
from tests.helpers import tui_demo as demo
from tests.helpers.cli import Cli
from tests.helpers.tui import (
    SMALL,
    WIDE,
    press,
    screen_of,
    showing,
    until,
    until_text,
    visible,
    walk,
)
from tests.reports.planted import PLANTED


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "agentrl.db"
    demo.fill(path, steps=40)
    return path


def app(path: Path, run: str = "grpo-07", *, follow: bool = False) -> AgentApp:
    return AgentApp(path, lambda reader: WatchScreen(reader, run, follow=follow))


async def test_every_size_shows_what_fits_and_what_is_new(db: Path) -> None:
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        await walk(pilot, ("worth a look",), ("does not move: CLIPPED 0.031, NO SIGNAL 0.38",))
        await walk(
            pilot, ("ROLLOUT [",), ("p pause / resume",), ("ETA",), ("LIVE",), ("tool error",)
        )
        for size, texts in (
            ((100, 30), ("grpo-07", "HEALTH", "worth a look")),
            ((60, 15), ("step 40", "a larger terminal")),
        ):
            await pilot.resize_terminal(*size)
            await walk(pilot, *((text,) for text in texts))
            await pilot.press(*"234567891")
        await pilot.resize_terminal(*SMALL)
        await walk(pilot, ("ALERTS",), ("tool error rate 3%",))
        with Store.open(db) as store:
            store.runs.add_step("run7", 41, {"reward": 0.777})
        await walk(pilot, ("step 41/400",), ("0.777",))


async def test_controls_ask_first_and_only_yes_sends(db: Path) -> None:
    with Store.open(db) as store:
        store.runs.update("run7", config={"train": {"lr": 1e-4}})
        store.runs.add_step("run7", 41, {"reward": 0.5, "learning_rate": 1e-5})  # a warm-up's
    async with showing(app(db), "step 41", notifications=True, size=WIDE) as pilot:
        for key, answer in (("p", "n"), ("X", "escape"), ("k", "y"), ("E", "y")):
            await press(pilot, key, then="y yes")
            await press(pilot, answer, then=lambda: isinstance(pilot.app.screen, WatchScreen))
        await walk(pilot, ("waiting: checkpoint",), ("│ evaluate  ",))
        assert "0.0001 → 0.00015" in await press(pilot, "plus", then="y yes")
        await walk(
            pilot,
            ("y", "S", "one of lr, max_grad_norm, steps"),
            ("x", "enter", "eval needs a number, not '20x'"),
            ("backspace", "enter", "train.eval.every becomes 20"),
            ("y", "ctrl+c", "detach: the training goes on"),
            ("3", "stop: asked the trainer"),
        )
    with Store.open(db) as store:
        taken = [(control.action, control.data) for control in store.controls.take("run7")]
    assert [action for action, _ in taken[:2]] == ["checkpoint", "evaluate"]
    assert taken[2:] == [
        ("set", {"key": "train.lr", "value": 0.00015}),
        ("set", {"key": "train.eval.every", "value": 20}),
        ("stop", {"now": True}),
    ]
    assert {key for key, _ in SETTINGS.values()} == set(CHANGEABLE)
    for text in ("lr=nan", "lr=inf", "steps=1.5", f"steps={10**400}"):
        with pytest.raises(UsageError, match="needs a number"):
            read_setting(text)


async def test_a_paused_run_reports_it_and_the_pace_leaves_the_pause_out(db: Path) -> None:
    with Store.open(db) as store:
        store.controls.add("run7", "pause")
        store.controls.take("run7")
        store.episodes.cancel("run7")
    async with showing(app(db), "PAUSED", notifications=True, size=WIDE) as pilot:
        text = visible(pilot.app)
        assert "paused after step 40: p resumes" in text and not {"ETA", "LIVE"} & {*text.split()}
        await press(pilot, "p", then="resume grpo-07?")
    steps = tuple({"step": n, "at": at} for n, at in enumerate([0.0, 2.0, 4.0, 600.0, 602.0]))
    assert RunData(RunRow("r", "r", total_steps=20), steps=steps).seconds_per_step() == 2.0
    run = RunRow("r", "r", claim="train", **asdict(Holder.of()))
    for last, paused in (("control:set", True), ("control:resume", False), ("resumed", False)):
        events = tuple(
            {"id": 0, "at": 0.0, "kind": kind, "data": {}} for kind in ("control:pause", last)
        )
        assert RunData(run, events=events).paused == paused
        assert not RunData(RunRow("r", "r", status="stopped"), events=events).paused


async def test_mouse_keys_and_alerts_lead_to_what_they_are_about(db: Path) -> None:
    with Store.open(db) as store:
        run = store.runs.get("grpo-07").id
        for name in ("kl_drift", "mask"):
            store.journal.add_alert(run, "warn", name, 1.0, 0.5, f"about {name}", step=39)
    async with app(db).run_test(notifications=True, size=WIDE) as pilot:
        text = await until_text(pilot, "about mask")
        lines = text.splitlines()
        row = next(n for n, line in enumerate(lines) if " worst" in line)
        for _ in range(2):
            await pilot.click(offset=(lines[row].index("worst"), row))
        await until_text(pilot, "agentrl replay")
        await pilot.press("q")
        await pilot.click(offset=(lines[1].index("Groups"), 1))
        text = await until_text(pilot, "GROUPS 2")
        row = next(n for n, line in enumerate(text.splitlines()) if " 40 calc/0417" in line)
        for _ in range(2):
            await pilot.click(offset=(20, row))
        assert "ep0040006" in await until_text(pilot, "agentrl replay")
        assert "RUNNING" in await press(
            pilot, "q", "1", *["up"] * 9, "enter", then="agentrl replay"
        )
        await press(pilot, "q", "3", then="ep0040008")
        await press(
            pilot, "f", *"reward:>1", "enter", then=lambda: "ep0040008" not in visible(pilot.app)
        )
        await press(pilot, "enter", then="agentrl replay")
        await pilot.press("q", "1")
        screen = screen_of(pilot, WatchScreen)
        assert screen.data is not None
        places = len(screen.data.live) + len(screen.data.notable)
        await pilot.press(*["down"] * (places + 2), "enter")  # the third alert is the newest
        assert (screen.tab, screen.browse.filter) == ("episodes", "step:39 flag:MASK")
        await pilot.press("1", "up", "enter")
        assert (screen.tab, screen.browse.filter) == ("episodes", "step:39")
        await pilot.press("1", "up", "enter")  # this one names no step
        assert screen.tab == "health"
        await press(pilot, "8", "slash", *"prompts_per", "enter", then="prompts_per: 1 of 1")


async def test_the_log_follows_until_it_is_scrolled_up_and_frozen_does_not_move(db: Path) -> None:
    def write(first: int, last: int) -> None:
        with Store.open(db) as store:
            for n in range(first, last):
                store.journal.add_log("run7", "info", f"line {n}.")

    write(0, 80)
    async with showing(app(db), "REWARD 0.", notifications=True, size=WIDE) as pilot:
        screen = screen_of(pilot, WatchScreen)
        await press(pilot, "l", then="line 79.")
        write(80, 90)
        await until_text(pilot, "line 89.")
        await press(pilot, "pageup", "pageup", then=lambda: "line 89." not in visible(pilot.app))
        write(90, 91)

        def newest() -> str:
            return str(screen.data.logs[-1]["text"]) if screen.data is not None else ""

        await until(pilot, lambda: newest() == "line 90.")
        assert "line 90." not in visible(pilot.app)
        await press(pilot, "space", then="FROZEN")
        write(91, 92)
        await pilot.pause(1.2)
        assert newest() == "line 90."
        await press(pilot, "space", then=lambda: newest() == "line 91.")


async def test_runs_that_are_new_missing_or_end(tmp_path: Path) -> None:
    path = tmp_path / "agentrl.db"
    with Store.open(path) as store:
        store.runs.add(RunRow(id="r", name="new", total_steps=10))
        store.runs.add_step("r", 1, {"reward": float("nan"), "loss": float("inf")})
        store.runs.add(RunRow(id="r1", name="old-01", status="finished", started=9e9))
        store.runs.add(RunRow(id="r4", name="bare", started=1.0))
        for step in range(1, 7):
            store.journal.add_alert("r4", "warn", f"rule{step}", text=f"odd {step}", step=step)
    async with showing(app(path, "bare"), "odd 3", size=WIDE) as pilot:
        await pilot.press("enter")  # the first of the four that are shown
        assert screen_of(pilot, WatchScreen).browse.filter == "step:3"
    keys = ("enter", "down", "up", *"2456789", "r", "left_square_bracket", "1", "space", "space")
    async with showing(
        app(path, "new"), "no episode runs", notifications=True, size=SMALL
    ) as pilot:
        await pilot.press(*keys)
    async with showing(
        app(path, "nope"), "No run named 'nope'", notifications=True, size=WIDE
    ) as pilot:
        await pilot.press("p", "enter", "2", "1")
    async with showing(app(path, "r1", follow=True), "old-01", size=WIDE) as pilot:
        with Store.open(path) as store:
            store.runs.add(RunRow(id="r2", name="ended-02", status="finished", started=1e10))
            store.runs.add(RunRow(id="r3", name="new-03", started=1e10))
        await until_text(pilot, "new-03")


async def test_curves_are_compared_filtered_zoomed_and_logarithmic(db: Path) -> None:
    with Store.open(db) as store:
        for name in ("grpo-05", "grpo-06"):
            store.runs.add(RunRow(name, name, status="finished", started=1.0))
            for step in range(1, 41):
                store.runs.add_step(name, step, {"reward": 0.3})
    async with app(db).run_test(notifications=True, size=(200, 55)) as pilot:
        await walk(pilot, ("REWARD 0.",), ("ADVANTAGE",))
        middle = pilot.app.screen.query_one("#curves")
        assert middle.region.x < 60 and middle.region.width >= 110
        assert pilot.app.screen.query_one("#strip").region.height == 5
        for number in "12":
            await press(pilot, "C", then="curves of other trainings")
            await press(pilot, number, then=lambda: isinstance(pilot.app.screen, WatchScreen))
        await walk(pilot, ("⠒ grpo-05",), ("⠒ grpo-06",), ("vs 0.3 0.3",), ("COMPARE grpo-06",))
        text = await press(pilot, "f", *"ent|norm", "enter", then="metrics with 'ent|norm'")
        assert "grad_norm" in text and "kl" not in text.split("metrics with")[1]
        assert "last 100 steps" in await press(pilot, "y", "z", then="log axis")
        await press(pilot, "C", "escape", "9", then="no advantage and teach nothing")
    data = RunData(RunRow("r", "r"), steps=({"step": 1, "approx_kl": 0.0, "reward": 0.1},))
    assert not data.has_reference and data.last("kl") is None
    lines = overview_charts(data, 60, 30, Look())
    assert any("KL no reference model" in line.plain for line in lines)


def test_reading_again_reads_what_is_new_and_a_failure_between_two_steps(db: Path) -> None:
    with Store.open(db) as store:
        first = load(store, "run7")
        store.runs.add_step("run7", 41, {"reward": 0.9})
        store.journal.add_log("run7", "info", "one more")
        store.flush()
        second = load(store, "run7", first)
        store.runs.update("run7", status="failed", error="out of memory")
        store.flush()
        third = load(store, "run7", second)
    assert [row["step"] for row in second.steps] == list(range(1, 42))
    assert second.steps[0] is first.steps[0] and second.last("reward") == 0.9
    before, after = ([row["text"] for row in one.logs] for one in (first, second))
    assert after == [*before, "one more"]
    (machine,) = (one for one in third.health if one.stage == "machine")
    assert "process" not in [one.name for one in second.health]
    assert machine.name == "process" and "out of memory" in machine.text


def test_an_evaluation_is_not_taken_for_the_next_step(db: Path) -> None:
    with Store.open(db) as store:
        going = store.episodes.get("ep_live").with_(
            id="ev1", kind="eval", task_id="calc/test-1", step=41, group_id="ge"
        )
        bad = (RewardPart("r", -3.0),)
        store.episodes.finish(going.with_(id="ev0", outcome=Outcome.FAILED, reward_parts=bad))
        store.episodes.start(going)
        store.live.set("ev1", AgentState.GENERATING, 1, "")
        store.episodes.finish(store.episodes.get("ep_live").with_(outcome=Outcome.FAILED))
        flat = store.episodes.get("ep0040002").with_(
            id="flat", advantage=None, fact=Fact.SKIPPED_ZERO_VARIANCE, step=41
        )
        store.episodes.finish(flat)
        store.runs.add_step("run7", 41, {"reward": 0.0})
        data = load(store, "run7")
    assert data.evaluating and data.done == 1
    assert now_rows(data, 80, 4, 0)[0][0].plain == "NOW EVALUATION after step 41: 1 done, 1 run"
    long = replace(data, live=(replace(data.live[0], text="这是一段很长的中文" * 9),))
    assert [cell_len(text.plain) for text, _ in now_rows(long, 80, 4, 0)[2:]] == [80]
    far = replace(data, notable=(("worst", replace(data.notable[0][1], task_id="t/" * 20)),))
    assert all(" 5t" in notable_rows(far, width)[1][0].plain for width in (35, 44, 80))
    # of the step itself, not of what judges it; a group without spread has no advantage stored
    assert {row.kind for _, row in data.notable} == {"train"} and 0.0 in data.advantages


def test_the_last_step_is_the_run_s_own(db: Path) -> None:
    """Between two steps nothing runs, and of the step that has begun some episodes may have ended: neither is the last
    step, whose best and worst are two episodes even where all are equal."""
    with Store.open(db) as store:
        parts = (RewardPart("r", -3.0),)
        begun = store.episodes.get("ep_live").with_(outcome=Outcome.FAILED, reward_parts=parts)
        store.episodes.finish(begun)
        data, recent = load(store, "run7"), load_recent(store, "run7")
        assert (data.step, len(data.live), len(data.groups), len(recent.lengths)) == (40, 0, 1, 8)
        assert [row.step for _, row in data.notable[:2]] == [40, 40]
        one = (RewardPart("r", 1.0, primary=True),)
        for row in store.episodes.rows(store.episodes.ids("step:40 kind:train", "time", "run7")):
            store.episodes.finish(store.episodes.get(row.id).with_(reward_parts=one))
        (_, best), (_, worst) = notable_of(store, "run7", 40)["notable"][:2]
    assert best.id != worst.id and best.reward == worst.reward == 1.0


def test_the_worst_is_that_of_the_whole_step_and_the_odd_one_has_the_rarest_flags(db: Path) -> None:
    """The worst was that of the best 512 of a large step, the odd one any with a flag."""
    bare = demo.episode(demo.Words(), 1, solved=True, step=40)
    bare = bare.with_(turns=(), tokens=Tokens.empty())
    low, odd = ((RewardPart("r", value),) for value in (-3.0, -2.0))
    with Store.open(db) as store:
        store.episodes.add(bare.with_(id=f"m{n}", sample=n) for n in range(600))
        store.episodes.finish(bare.with_(id="low", reward_parts=low))
        store.episodes.finish(bare.with_(id="odd", reward_parts=odd, flags=("LOOP", "TRUNC")))
        found = {why: row.id for why, row in notable_of(store, "run7", 40)["notable"]}
    assert (found["worst"], found["odd"]) == ("low", "odd")


def test_the_silence_of_a_worker_is_shown_as_it_grows() -> None:
    """Nothing in the store changes then: the page was not drawn again."""
    run = RunRow("r", "r", claim="train", **asdict(Holder.of()))
    worker = WorkerRow("r", 0, "ray", "gpu-1", 1, "ready", "r@3", 1, 2, 3, 4.0, 0, "", at=100.0)
    found = [RunData(run, workers=(worker,), read=100.0 + age) for age in (1, 2, 30, 40)]
    first, second, third, last = (Shown(data, Recent(), Look()).key(Size(80, 24)) for data in found)
    assert first == second and third != last
    assert "seen 40 s ago" in worker_lines(found[-1], 120)[2].plain


def test_without_a_terminal_one_line_per_step(db: Path, cli: Cli) -> None:
    with Store.open(db) as store:
        store.runs.update("run7", status="finished")
    lines = cli("watch", "--db", str(db), said="finished").splitlines()
    assert len(lines) == 40 and "step 40" in lines[-1]
    assert json.loads(cli("watch", "--db", str(db), "--json").splitlines()[-1])["step"] == 40


def test_the_health_panel_is_the_walk_of_the_diagnosis() -> None:
    def panel(case: str, width: int, **options: Any) -> tuple[str, str]:
        run = RunRow("r", "r", status="finished")
        data = RunData(run, health=tuple(stages(diagnose(PLANTED[case]))))
        lines = [line.plain.strip() for line in health_lines(data, width, **options)]
        return " ".join(lines), head(data).plain

    short, _ = panel("truncated", 60)
    assert short.startswith("HEALTH 9 ok  1 warn  0 bad") and "end at a token limit" in short
    whole, title = panel("truncated", 200, advice=True)
    assert "grader" in whole and "Whether the grader tells right from wrong" in whole
    assert "agentrl train --set rollout.max_new_tokens=256" in whole and "1 warning" in title
    solved, title = panel("all_solved", 200)  # the ceiling is not a failure
    assert "AT THE CEILING" in title and "warning" not in title
    assert "agentrl eval demo@last" in solved


def test_groups_without_signal_are_one_line_a_step() -> None:
    def group(task: str, solved: int, level: float = 0.0) -> GroupRow:
        rewards = tuple(1.0 if n < solved else level for n in range(4))
        return GroupRow(7, task, rewards, solved, ("trained",), (), f"{task}-best")

    groups = (group("a", 4), group("b", 2), group("c", 0), group("d", 0, level=0.5))
    rows = [row.text() if isinstance(row, Fold) else row.task_id for row in fold_groups(groups, ())]
    assert rows == ["b", ">     7 3 groups without signal: 1 all solved, 2 all failed"]
    opened = [row.task_id for row in fold_groups(groups, {7}) if isinstance(row, GroupRow)]
    assert opened == ["b", "a", "c", "d"]
    words = demo.Words()
    good, bad = (demo.episode(words, 1, solved=solved) for solved in (True, False))
    found = step_metrics([[good, good], [bad, bad], [good, bad], [good, good]], {})
    assert (found["groups/all_solved"], found["groups/all_failed"]) == (0.5, 0.25)
    assert found["frac_reward_zero_std"] == 0.75
