"""What replay does beyond one episode, the runs screen, comparing: driven by keys and mouse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.reports.compare import compare_runs
from agentrl_cli.reports.html import export_html, page_object
from agentrl_cli.store import EvalRow, RunRow, Store
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.common.layers import PALETTES, palette_name, shade
from agentrl_cli.tui.common.load_episode import token_texts
from agentrl_cli.tui.common.settings import read_settings
from agentrl_cli.tui.common.text import quote
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.compare.screen import VersusScreen
from agentrl_cli.tui.replay import related
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.runs.screen import EpisodesScreen, RunsScreen
from agentrl_cli.types import Episode, Outcome, RewardPart
from tests.helpers import tui_demo as demo
from tests.helpers.tui import until, until_text, visible

WIDE, SMALL = (120, 40), (80, 24)
EP = "ep0120003"


def fill(path: Path) -> None:
    """The invented run, the same task at two earlier steps and in another run that ended."""
    demo.fill(path)
    words = demo.Words()
    with Store.open(path) as store:
        for step in (100, 110):
            for sample in (3, 4):
                episode = demo.episode(words, sample, solved=step == 110, step=step)
                store.episodes.finish(episode)
                store.signals.add(episode.id, demo.signals_of(episode))
        config = {"train": {"lr": 1e-4}, "rollout": {"group_size": 8}}
        store.runs.add(
            RunRow(
                "run6",
                "grpo-06",
                status="finished",
                started=1.0,
                ended=60.0,
                config=config,
                model="tiny",
            )
        )
        store.runs.add_step("run6", 1, {"reward": 0.25})
        store.runs.add_eval(EvalRow("run6", 1, "step-1", "test", 150, 4, 0.2, 0.1, 0.3))
        for sample in (1, 2):
            episode = demo.episode(words, sample, solved=sample == 2, step=1, run_id="run6")
            store.episodes.finish(episode.with_(id=f"old{sample}"))


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("more") / "agentrl.db"
    fill(path)
    return path


def replay(db: Path, episode: str = EP) -> AgentApp:
    return AgentApp(db, lambda reader: ReplayScreen(reader, episode))


async def test_marks_are_kept(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    demo.fill(db, steps=2)
    async with replay(db, "ep0002003").run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "TOKEN 1/64")
        await pilot.press("t", *"bad keep", "enter")
        await until_text(pilot, "TAGS bad, keep")
        await pilot.press("b")
        await until_text(pilot, "TAGS bad, keep, mark")
        await pilot.press("b", "t", *"-bad", "enter")
        await until(pilot, lambda: "TAGS keep" in visible(pilot.app))
        await pilot.press("m", *"a comma", "enter")
        await until_text(pilot, "NOTE a comma")
        await pilot.press("x")
        assert "flag:BADARG step:2" in await until_text(pilot, "5 episodes")
        assert isinstance(pilot.app.screen, EpisodesScreen)
    with Store.open(db, readonly=True) as store:
        row = store.episodes.row("ep0002003")
        assert row.tags == ("keep",) and row.note == "a comma"


async def test_a_sibling_beside_the_transcript_where_there_is_room(db: Path) -> None:
    async with replay(db).run_test(notifications=True, size=(180, 45)) as pilot:
        await until_text(pilot, "DIFF with sibling")
        await until(pilot, lambda: pilot.app.screen.query_one("#other", TokenView).view is not None)
        text = visible(pilot.app)
        assert "12 * 4.5 + 3.9" in text and "12 * 4,5 + 3.9" in text
        assert "BESIDE #1  reward 1.20" in text and "BY STEP  this task in training" in text
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: "12 * 4.5 + 3.9" not in visible(pilot.app))


def test_settings_file(tmp_path: Path) -> None:
    path = tmp_path / "screens.yaml"
    assert read_settings(path)[1] == ""
    path.write_text("palette: grey\nkeys:\n  replay.tag: ctrl+t\n")
    found, problem = read_settings(path)
    assert (found.palette, dict(found.keys), problem) == (
        "grey",
        {"replay.tag": "ctrl+t"},
        "",
    )
    for text, said in (
        ("palette: gray", "grey"),
        ("- 1", "valid dictionary"),
        ("keys: 3", "keys 3: Input should be"),
        ("a: [", "read"),
    ):
        path.write_text(text)
        assert said in read_settings(path)[1]


async def test_runs_are_listed_and_lead_everywhere(db: Path) -> None:
    async with AgentApp(db, RunsScreen).run_test(notifications=True, size=WIDE) as pilot:
        text = await until_text(pilot, "grpo-06")
        assert "2 runs" in text and "120/400" in text and "grpo-07" in text
        assert "checkpoints (1): best 100" in await until_text(pilot, "REWARD")
        await pilot.press("c")
        await until_text(pilot, "grpo-07/checkpoints/step_100")
        await pilot.press("escape", "enter")
        await until_text(pilot, "agentrl watch")
        await pilot.press("q", "e")
        await until_text(pilot, "run grpo-07")
        await pilot.press("q", "D")
        await until_text(pilot, "is running: stop it first")
        await pilot.press("slash", *"06", "enter")
        await until_text(pilot, "holding '06'")
        await pilot.press("slash", "backspace", "backspace", "enter")
        await pilot.press("C")
        await until_text(pilot, "agentrl compare")
        assert "grpo-06" in await until_text(pilot, "METRICS")


async def test_deleting_a_run_asks_and_takes_its_folder(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    fill(db)
    folder = tmp_path / "grpo-06"
    folder.mkdir()
    with Store.open(db) as store:
        store.runs.update("run6", dir="grpo-06")
    async with AgentApp(db, RunsScreen).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "grpo-06")
        for answer in ("n", "y"):
            await pilot.press("G", "D")
            await until_text(pilot, "Delete grpo-06?")
            assert folder.exists()
            await pilot.press(answer)
            # Keys that come while the question is still open would be lost on a busy machine.
            await until(pilot, lambda: "Delete grpo-06?" not in visible(pilot.app))
        await until_text(pilot, "1 run")
    assert not folder.exists()
    with Store.open(db, readonly=True) as store:
        assert [run.name for run in store.runs.all()] == ["grpo-07"] and not store.episodes.ids(
            "id:old1"
        )


async def test_the_list_shows_the_test_split_of_an_evaluation(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add(RunRow("e", "judged", kind="eval", status="finished", model="tiny"))
        for split, rate in (("train", 0.91), ("test", 0.42)):
            store.runs.add_eval(
                EvalRow(run.id, 5, f"base-{split}", split, 10, 1, rate, rate - 0.1, rate + 0.1)
            )
            part = (RewardPart("correct", rate, primary=True),)
            episode = Episode(
                f"e{split}", "t", run_id=run.id, step=5, kind="eval", reward_parts=part
            )
            store.episodes.finish(episode.with_(outcome=Outcome.FAILED), split=split)
    async with AgentApp(tmp_path / "a.db", RunsScreen).run_test(
        notifications=True, size=WIDE
    ) as pilot:
        text = await until_text(pilot, "judged")
        row = next(line for line in text.splitlines() if "judged" in line and "eval" in line)
        assert "0.420" in row and " 0.42 " in row and "0.91" not in row and "        2 " in row
        text = await until_text(pilot, "base-train")
        assert (
            "base-train train step 5: 0.910 [0.81, 1.01]" in text
            and "base-test test step 5: 0.420" in text
        )


async def test_steps_and_checkpoints_of_a_task_side_by_side(db: Path) -> None:
    async with replay(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "TOKEN 1/64")
        await pilot.press("J", "left_square_bracket")
        assert "TOKEN 2/" in await until_text(pilot, "step 110")
        await pilot.press("left_square_bracket")
        await until_text(pilot, "ep0100003")
        await pilot.press("left_square_bracket")
        await until_text(pilot, "not tried at an earlier step")
        await pilot.press("right_square_bracket", "right_square_bracket")
        await until_text(pilot, "ep0120003")
        await pilot.press("V")
        await until_text(pilot, "checkpoints tried this task")
        assert "step-119" in await until_text(pilot, "DIFF  they part at token")
        screen = pilot.app.screen
        assert isinstance(screen, VersusScreen) and screen.fork is not None
        assert screen.tokens(0).cursor == screen.fork.position
        before = screen.sides[0]
        await pilot.press("l")
        await until(pilot, lambda: screen.sides[0] != before)
        await pilot.press("tab", "j", "k", "right", "down", "up", "3", "v")
        assert screen.side == 1 and screen.tokens(1).lens == "logp"
        await pilot.press("enter")
        await until_text(pilot, "ep0")
    with Store.open(db, readonly=True) as store:
        steps = [related.at_step(store, EP, step) for step in (-1, 1)]
        assert steps == ["ep0110003", "ep_live"]
        rows = related.versions(store, EP)
        place = related.other_version(rows, EP)
        assert EP in [row.id for row in rows] and place is not None and rows[place].id != EP
        assert related.same_flag(store, EP) == ("flag:BADARG step:120", "run7")
    assert quote('a "b"') == '"a \\"b\\""'


async def test_exports_hold_everything_but_secrets_and_palettes_change(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"1": ".jsonl", "2": ".html", "4": "-group.html", "5": "-group.jsonl"}
    async with replay(db).run_test(notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "TOKEN 1/64")
        for key, name in names.items():
            await pilot.press("e")
            await until_text(pilot, "one HTML page")
            await pilot.press(key)
            await until(pilot, (tmp_path / f"{EP}{name}").exists)
        first, *others = PALETTES
        for name in [*others, first]:  # all the way round, for the tests that follow
            await pilot.press("P")
            await until_text(pilot, f"colours {name}")
    assert palette_name() == "blue-orange" and shade("#123456") == "#123456"
    words = demo.Words()
    episode = demo.episode(words, 3, solved=False)
    turn = episode.turns[1]
    secret = {"role": "user", "content": "my key is sk-abcdefghijklmnopqrstuvwx"}
    leaking = type(turn)(1, "user", (secret,), turn.start, turn.end)
    with Store.open(tmp_path / "s.db") as store:
        turns = (episode.turns[0], leaking, *episode.turns[2:])
        store.episodes.finish(episode.with_(id="secret", run_id=None, turns=turns))
        hidden = page_object(store, "secret", token_texts)
    assert hidden["masked"] and hidden["tokens"] is None and "sk-abc" not in json.dumps(hidden)
    assert "[masked:api-key]" in hidden["turns"][1]["messages"][0]
    with Store.open(db, readonly=True) as store:
        assert export_html(store, [EP], tmp_path / "e.html", token_texts, title="<x>") == 1
        facts = page_object(store, EP, token_texts)
    text = (tmp_path / "e.html").read_text("utf-8")
    assert "&lt;x&gt;" in text and not [a for a in ("http://", "https://", "src=") if a in text]
    assert json.loads(text.split('id="data">')[1].split("</script>")[0]) == [facts]
    assert "".join(facts["tokens"]["texts"]).startswith("<|im_start|>system")
    assert len(facts["tokens"]["weight"]) == len(facts["tokens"]["ids"]) == 147
    assert facts["parts"][0][:2] == ["correct", 0.0] and facts["masked"] is False
    command = ["export", EP, "--group", "--format", "html", "--db", str(db)]
    assert main([*command, "-o", "g.html"]) == 0 and Path("g.html").is_file()
    assert "8 episodes" in capfd.readouterr().err and main(command) == 2


async def test_a_store_without_runs_or_that_cannot_be_read(tmp_path: Path) -> None:
    keys = ("j", "enter", "w", "e", "c", "C", "D", "m", "space", "k")
    Store.open(tmp_path / "e.db").close()
    async with AgentApp(tmp_path / "e.db", RunsScreen).run_test(size=SMALL) as pilot:
        await until_text(pilot, "agentrl rollout -n 16")
        await pilot.press(*keys, "question_mark")
    (tmp_path / "junk.db").write_text("hello", "utf-8")
    app = AgentApp(tmp_path / "junk.db", RunsScreen)
    async with app.run_test(notifications=True, size=SMALL) as pilot:
        await until(pilot, lambda: "Name another with --db." in " ".join(visible(app).split()))
        text = " ".join(visible(app).split())
        assert "is not an agentrl store: it is not a SQLite file" in text
        assert "No runs yet" not in text and isinstance(app.screen, RunsScreen)
        for _ in range(3):
            app.screen.poll()
            await app.workers.wait_for_complete()
        await pilot.press(*keys)
        assert not list(app._notifications)


def test_comparing_two_runs(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Store.open(db, readonly=True) as store:
        found = compare_runs(store, "grpo-06", "grpo-07")
    (line,) = found.tasks
    assert found.source == "all attempts" and line.task_id == "calc/0417"
    assert (line.before, line.after, line.flip) == ((1, 2), (5, 12), "")
    assert {name: a for name, a, _ in found.metrics}["reward"] == 0.25
    assert any(name.startswith("train") for name, _, _ in found.settings)
    assert found.evals[0][1] is not None and found.evals[0][1].pass_rate == 0.2
    assert found.difference is not None and found.difference.value == pytest.approx(5 / 12 - 1 / 2)
    command = ["compare", "grpo-06", "grpo-07", "--db", str(db)]
    assert main(command) == 0
    text = capfd.readouterr().out
    assert "1 tasks attempted by both" in text and "test, newest" in text and "calc/0417" in text
    assert main([*command, "--json"]) == 0
    row = json.loads(capfd.readouterr().out)
    assert row["tasks"][0]["before"] == [1, 2] and row["metrics"]["reward"]["before"] == 0.25
