"""The runs screen, comparing, marks, exports, the user's keys and colours, and faults that trying showed."""

import csv
import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult

from agentrl_cli.errors import StoreError
from agentrl_cli.registry import names, resolve
from agentrl_cli.reports.html import PAGE, export_html, page_object
from agentrl_cli.store import EvalRow, RunRow, Store
from agentrl_cli.store.maintenance import delete_run
from agentrl_cli.tui.app import (
    HARMLESS,
    LIGHT,
    AgentApp,
    invert,
    unknown_key,
)
from agentrl_cli.tui.common.agent_screen import SCREENS
from agentrl_cli.tui.common.episode_list import row_text
from agentrl_cli.tui.common.episode_view import make_view
from agentrl_cli.tui.common.keys import Settings, read_settings
from agentrl_cli.tui.common.layers import LAYERS, PALETTES, palette_name, shade
from agentrl_cli.tui.common.layout import Kind, Layout
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.reader import token_texts
from agentrl_cli.tui.common.token_text import TokenTexts
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.compare.screen import CompareScreen, VersusScreen, top_lines
from agentrl_cli.tui.replay.inspector import token_numbers
from agentrl_cli.tui.replay.panels import turn_lines
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.runs.screen import RunsScreen
from agentrl_cli.tui.watch.screen import WatchScreen
from agentrl_cli.types import Episode, Outcome, RewardPart, Task, ToolCall
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
from tests.tui.test_replay import EP, replay


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


async def test_words_are_explained_in_every_screen(db: Path) -> None:
    app = replay(db)
    async with showing(app, "TURN 2", size=SMALL) as pilot:
        assert "above (+) or below" in await press(pilot, "W", then="On the screens")
        await pilot.press("escape")
        await app.push_screen(RunsScreen(app.reader))
        await press(pilot, "W", then="On the screens")


async def test_a_line_that_was_found_is_marked_as_long_as_it_is_there() -> None:
    page, shown = Lines(), [Text("one"), Text("two")]

    class Found(App[None]):
        def compose(self) -> ComposeResult:
            yield page

    async with Found().run_test():
        page.show(shown)
        page.mark(1)
        for lines, marked in (([*shown, Text("three")], 1), ([Text("zero"), *shown], -1)):
            page.show(lines)
            assert page.marked == marked


async def test_a_sibling_beside_the_transcript_where_there_is_room(db: Path) -> None:
    async with showing(
        replay(db), "DIFF with sibling", notifications=True, size=(180, 45)
    ) as pilot:
        await until(pilot, lambda: pilot.app.screen.query_one("#other", TokenView).view is not None)
        text = visible(pilot.app)
        assert "12 * 4.5 + 3.9" in text and "12 * 4,5 + 3.9" in text
        assert "BESIDE #1  reward 1.20" in text and "BY STEP  this task in training" in text
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: "12 * 4.5 + 3.9" not in visible(pilot.app))


def test_settings_file(tmp_path: Path) -> None:
    path = tmp_path / "screens.yaml"
    assert read_settings(path)[1] == ""
    path.write_text("palette: grey\ntheme: light\nkeys:\n  replay.tag: ctrl+t\n")
    assert read_settings(path) == (
        Settings(palette="grey", theme="light", keys={"replay.tag": "ctrl+t"}),
        "",
    )
    for text, said in (
        ("palette: gray", "grey"),
        ("theme: pink", "theme 'pink': Input should be 'auto'"),
        ("- 1", "valid dictionary"),
        ("keys: 3", "keys 3: Input should be"),
        ("a: [", "read"),
        ("1: x\npalette: grey", "1 'x'"),
        ("true: x", "True 'x'"),
    ):
        path.write_text(text)
        found, problem = read_settings(path)
        assert said in problem and found.theme == "auto"


async def test_runs_are_listed_and_lead_everywhere(db: Path) -> None:
    app = AgentApp(db, RunsScreen)
    async with showing(app, "grpo-06", notifications=True, size=WIDE) as pilot:
        await until_text(pilot, "checkpoints (1): best 100")
        await walk(
            pilot,
            ("c", "grpo-07/checkpoints/step_100"),
            ("escape", "enter", "agentrl watch"),
            ("q", "e", "run grpo-07"),
            ("q", "D", "is running: stop it first"),
            ("slash", *"06", "enter", "holding '06'"),
        )
        await pilot.press("slash", "backspace", "backspace", "enter")
        screen = screen_of(pilot, RunsScreen)
        chosen = screen.chosen.run.id
        with Store.open(db) as store:
            store.runs.add(RunRow("later", "later-01", status="finished", started=9e9))
        await until_text(pilot, "later-01")
        assert screen.chosen.run.id == chosen
        with Store.open(db) as store:
            delete_run(store, store.runs.get("later"))
        await until(pilot, lambda: "later-01" not in visible(app))
        await press(pilot, "C", then="agentrl compare")
        assert "grpo-06" in await until_text(pilot, "METRICS")


async def test_deleting_a_run_asks_and_takes_its_folder(tmp_path: Path) -> None:
    db, folder = tmp_path / "a.db", tmp_path / "grpo-06"
    fill(db)
    folder.mkdir()
    with Store.open(db) as store:
        store.runs.update("run6", dir="grpo-06")
    async with showing(AgentApp(db, RunsScreen), "grpo-06", notifications=True, size=WIDE) as pilot:
        for answer in ("n", "y"):
            await press(pilot, "G", "D", then="Delete grpo-06?")
            assert folder.exists()
            # Keys that come while the question is still open would be lost on a busy machine.
            await press(pilot, answer, then=lambda: "Delete grpo-06?" not in visible(pilot.app))
        await until_text(pilot, "1 run")
        await press(pilot, "m", *" x", "enter", then="'grpo-07 x' cannot be the name of a run")
    assert not folder.exists()
    with Store.open(db, readonly=True) as store:
        assert [run.name for run in store.runs.all()] == ["grpo-07"]
        assert not store.episodes.ids("id:old1")


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
    async with showing(replay(db), "TOKEN 1/64", notifications=True, size=WIDE) as pilot:
        back, on = "left_square_bracket", "right_square_bracket"
        assert "TOKEN 2/" in await press(pilot, "J", back, then="step 110")
        await walk(
            pilot,
            (back, "ep0100003"),
            (back, "not tried at an earlier step"),
            (on, on, "ep0120003"),
            ("V", "checkpoints tried this task"),
        )
        assert "step-119" in await until_text(pilot, "DIFF with right: first fork")
        screen = screen_of(pilot, VersusScreen)
        assert screen.fork is not None and screen.texts[0].cursor == screen.fork.position
        before = screen.sides[0]
        await press(pilot, "l", then=lambda: screen.sides[0] != before)
        here = screen.texts[1].cursor
        await pilot.press("tab", "right")
        assert screen.side == 1 and screen.texts[1].cursor == here + 1
        await pilot.press("j", "k", "down", "up", "3", "v")
        assert screen.texts[1].lens == "logp"
        await press(pilot, "enter", then="ep0")


async def test_exports_hold_everything_and_palettes_change(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"1": ".jsonl", "2": ".html", "4": "-group.html", "5": "-group.jsonl"}
    async with showing(replay(db), "TOKEN 1/64", notifications=True, size=WIDE) as pilot:
        for key, name in names.items():
            await press(pilot, "e", then="one HTML page")
            await press(pilot, key, then=(tmp_path / f"{EP}{name}").exists)
        first, *others = PALETTES
        # all the way round, for the tests that follow
        await walk(pilot, *(("P", f"colours {name}") for name in [*others, first]))
    assert palette_name() == "blue-orange" and shade("#123456") == "#123456"
    with Store.open(db, readonly=True) as store:
        assert export_html(store, [EP], tmp_path / "e.html", token_texts, title="<x>") == 1
        facts = page_object(store, EP, token_texts)
    text = (tmp_path / "e.html").read_text("utf-8")
    assert "&lt;x&gt;" in text and not [a for a in ("http://", "https://", "src=") if a in text]
    assert json.loads(text.split('id="data">')[1].split("</script>")[0]) == [facts]
    assert "".join(facts["tokens"]["texts"]).startswith("<|im_start|>system")
    assert len(facts["tokens"]["weight"]) == len(facts["tokens"]["ids"]) == 147
    assert facts["parts"][0][:2] == ["correct", 0.0] and facts["masked"] is False


async def test_a_store_without_runs_or_that_cannot_be_read(tmp_path: Path) -> None:
    keys = ("j", "enter", "w", "e", "c", "C", "D", "m", "space", "k")
    Store.open(tmp_path / "e.db").close()
    async with showing(
        AgentApp(tmp_path / "e.db", RunsScreen), "agentrl rollout -n 16", size=SMALL
    ) as pilot:
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


def test_comparing_two_runs(db: Path, cli: Cli) -> None:
    cli.always = ("--db", str(db))
    text = cli("compare", "grpo-06", "grpo-07")
    assert "1 tasks attempted by both" in text and "test, newest" in text and "calc/0417" in text
    row = cli.json("compare", "grpo-06", "grpo-07")
    (task,) = row["tasks"]
    assert (task["task_id"], task["before"], task["after"]) == ("calc/0417", [1, 2], [5, 12])
    assert (row["tasks_from"], task["flip"], row["gained"]) == ("all attempts", "", 0)
    assert row["difference"]["value"] == pytest.approx(5 / 12 - 1 / 2)
    assert row["evals"]["test, newest"]["before"]["pass_rate"] == 0.2
    assert row["metrics"]["reward"]["before"] == 0.25
    assert any(name.startswith("train") for name in row["settings"])


def test_evaluations_of_other_tasks_stand_in_rows_of_their_own(tmp_path: Path, cli: Cli) -> None:
    cli.always = ("--db", str(tmp_path / "agentrl.db"))
    with Store.open(tmp_path / "agentrl.db") as store:
        for number, (pack, rate) in enumerate([("a", 0.2), ("a", 0.4), ("b", 0.6)]):
            run = store.runs.add(RunRow("", f"run{number}", kind="eval", status="finished"))
            store.runs.add_eval(EvalRow(run.id, 0, "base", "test", 1, 1, rate))
            store.tasks.add([Task("calc/0417", pack, "price", "test", ())])
            episode = demo.episode(demo.Words(), number, solved=True, step=0, run_id=run.id)
            store.episodes.finish(episode.with_(kind="eval", pack=pack))
    same = cli.json("compare", "run0", "run1")["evals"]["test, newest"]
    assert [same[side]["pass_rate"] for side in ("before", "after")] == [0.2, 0.4]
    found = cli.json("compare", "run1", "run2")["evals"]
    assert found["test, newest"]["after"] is None
    assert found["test, newest, other tasks"]["after"]["pass_rate"] == 0.6


@pytest.fixture
def live(tmp_path: Path) -> Path:
    path = tmp_path / "agentrl.db"
    demo.fill(path, steps=40)
    return path


def test_the_page_has_every_layer_of_the_screen_in_its_order_and_no_colour_without_a_mark() -> None:
    text = PAGE.read_text("utf-8")
    table = text[text.index("const LAYERS = {") : text.index("const el = ")]
    assert re.findall(r"^  (\w+): \[", table, re.M) == list(LAYERS)
    assert all(f'"{layer.title}"' in table for layer in LAYERS.values())
    marks = re.findall(r"^\.c\d \{ background: [^;]+; text-decoration: ([^;]+);", text, re.M)
    assert len(marks) == len(set(marks)) == 9


async def test_no_text_steers_the_terminal(live: Path) -> None:
    """A note of several lines tore the screen; what a tool printed could clear it."""
    words = demo.Words()
    episode = demo.episode(words, 3, solved=False)
    call = ToolCall(
        "", "calc\x1b[2J", None, "x", "cut off. Expected:\n<tool_call>\n\x1b]0;title\x07\tend"
    )
    turns = tuple(replace(turn, calls=(call,)) if turn.calls else turn for turn in episode.turns)
    view = make_view(
        episode.with_(turns=turns), TokenTexts(words.json()), live="first\nsecond 漢字漢字"
    )
    layout = Layout(view, 24)
    assert all(text.isprintable() for _, text in layout.notes)
    shown = [text for _, text in layout.notes]
    assert (
        "  <tool_call>" in shown
        and "second 漢字漢字" in shown
        and not any("\n" in text for text in shown)
    )
    assert all(sum(2 if ord(c) > 0x2E80 else 1 for c in text) <= 24 for text in shown)
    assert [kind for kind, *_ in layout.lines].count(Kind.NOTE) == len(shown)
    async with showing(
        AgentApp(live, lambda reader: ReplayScreen(reader, "ep0040003")), "TOKEN 1/64", size=WIDE
    ) as pilot:
        pilot.app.screen.query_one("#why").update(Text("a\x1b[2Jb\x07c\x9bd"))  # type: ignore[attr-defined]
        await until_text(pilot, "a[2Jbcd")
        assert HARMLESS in pilot.app.get_line_filters()


def test_the_list_shows_tags_kinds_and_parents(live: Path) -> None:
    with Store.open(live) as store:
        child = store.episodes.get("ep0040003").with_(
            id="child", kind="whatif", parent_id="ep0040003", flags=("LOOP",)
        )
        store.episodes.finish(child)
        store.marks.tag("child", "seen")
        store.marks.note("child", "why?")
        row = store.episodes.row("child")
    assert row_text(row, 160).rstrip().endswith("LOOP #seen note whatif of ep0040003")
    wide, outcome = row_text(replace(row, task_id="商店/乘法"), 100), str(row.outcome)
    assert cell_len(wide) == 100
    assert cell_len(wide.partition(outcome)[0]) == row_text(row, 100).index(outcome)


async def test_keys_move_the_choice_of_a_comparison_whatever_has_the_focus(live: Path) -> None:
    app = AgentApp(live, lambda reader: CompareScreen(reader, "grpo-07", "grpo-07"))
    async with app.run_test(size=SMALL) as pilot:
        screen = screen_of(pilot, CompareScreen)
        await until(pilot, lambda: screen.found is not None)
        found = screen.found
        assert found is not None and len(found.tasks) == 1
        named = replace(
            found, before=replace(found.before, name="商店"), settings=[("a", "商", "b")]
        )
        heads, row, *_ = (
            x.plain
            for x in top_lines(named, 80, every=True)
            if "商" in x.plain and "REWARD" not in x.plain
        )
        assert cell_len(heads) == 74 and cell_len(row) == 74
        screen.found = replace(found, tasks=found.tasks * 30)
        for key, place in (("down", 1), ("pagedown", 11), ("up", 10), ("pageup", 0)):
            await pilot.press(key)
            assert screen.cursor == place, key
        await press(pilot, "pagedown", then="calc/0417")  # in sight, where it is
        await press(pilot, "m", then=lambda: screen.every and screen.page.max_scroll_y > 30)
        for key, top in (("pagedown", 10), ("pageup", 0)):  # to what is above the tasks
            await pilot.press(key)
            assert (screen.cursor, screen.page.scroll_offset.y) == (0, top)


async def test_a_damaged_episode_is_reported_and_the_next_one_opens(live: Path) -> None:
    with closing(sqlite3.connect(live)) as conn, conn:
        conn.execute(
            "UPDATE turn_tokens SET top_ids=x'0102030405' WHERE episode_id='ep0040003' AND idx=2"
        )
        conn.execute("UPDATE turns SET messages='{bad' WHERE episode_id='ep0040002' AND idx=1")
        conn.execute("UPDATE turn_tokens SET ratio=x'0102' WHERE episode_id='ep0040001' AND idx=2")
    conn.close()
    with Store.open(live, readonly=True) as store:
        for name in ("ep0040003", "ep0040002"):
            with pytest.raises(StoreError, match=f"Episode {name} is damaged"):
                store.episodes.get(name)
        with pytest.raises(
            StoreError, match="The training signals of episode ep0040001 is damaged"
        ):
            store.signals.get("ep0040001")
    async with showing(
        AgentApp(live, lambda reader: ReplayScreen(reader, "ep0040003")),
        "Episode ep0040003 is damaged",
        size=SMALL,
    ) as pilot:
        await pilot.press("n", "n", "N", "q")


def with_a_secret(path: Path) -> None:
    episode = demo.episode(demo.Words(), 3, solved=False).with_(run_id=None)
    message = {"role": "user", "content": "my key is sk-abcdefghijklmnopqrstuvwx"}
    first, second, *rest = episode.turns
    turns = (first, replace(second, messages=(message,)), *rest)
    with Store.open(path) as store:
        store.episodes.finish(episode.with_(id="plain", group_id="a"))
        store.episodes.finish(episode.with_(id="telling", group_id="b", turns=turns))


async def test_a_picture_of_a_secret_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with_a_secret(tmp_path / "s.db")
    plain, telling = (tmp_path / f"replay-{name}.svg" for name in ("plain", "telling"))
    app = replay(tmp_path / "s.db", "plain")
    async with showing(app, "TOKEN 1/", size=WIDE, notifications=True) as pilot:
        await press(pilot, "s", then=plain.exists)
        await app.push_screen(ReplayScreen(app.reader, "telling"))
        await until_text(pilot, "TOKEN 1/")
        await press(pilot, "s", then="A picture masks nothing")
        await press(pilot, "n", "s", then="A picture masks nothing")
        assert not telling.exists()
        await press(pilot, "y", then=telling.exists)
    assert "masks" not in plain.read_text("utf-8") + telling.read_text("utf-8")


def test_a_picture_of_a_secret_needs_a_flag(cli: Cli) -> None:
    with_a_secret(cli.folder / "s.db")
    cli.always = ("--db", "s.db")
    cli("replay", "telling", "--svg", "r.svg", code=2, said="--no-mask")
    assert not (cli.folder / "r.svg").exists()
    for words, made in ((("telling", "--no-mask"), "r.svg"), (("plain",), "p.svg")):
        cli("replay", *words, "--svg", made)
        assert "calculator" in (cli.folder / made).read_text("utf-8")
    cli("replay", "plain", "--no-mask", code=2)


async def test_a_picture_of_watch_is_asked_for_where_its_log_has_a_secret(
    live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(live.parent)
    with Store.open(live) as store:
        store.runs.rename("run7", "team/a")
        store.runs.add_step("run7", 1, {"rewards/near, far/mean": 0.5})
    async with showing(
        AgentApp(live, lambda reader: WatchScreen(reader, "run7")), "worth a look", size=WIDE
    ) as pilot:
        await press(pilot, "e", then=(metrics := live.parent / "team-a-metrics.csv").exists)
        head, first, *_ = csv.reader(metrics.read_text().splitlines())
        assert dict(zip(head, first, strict=True))["rewards/near, far/mean"] == "0.5"
        await press(pilot, "s", then=(live.parent / "watch-run7.svg").exists)
        (live.parent / "watch-run7.svg").unlink()
        with Store.open(live) as store:
            store.journal.add_log("run7", "warn", "no answer from https://me:hunter22@example.org")
        await until_text(pilot, "hunter22")
        await press(pilot, "s", then="A picture masks nothing")
        assert not (live.parent / "watch-run7.svg").exists()


async def test_keys_of_the_user_and_clicks(
    live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "screens.yaml"
    path.write_text("keys:\n  replay.tag: ctrl+t\n  runs.watch: W\n")
    monkeypatch.setenv("AGENTRL_SCREENS", str(path))
    app = replay(live, "ep0040003")
    async with showing(app, "TOKEN 1/64", size=WIDE) as pilot:
        screen = screen_of(pilot, ReplayScreen)
        await until_text(pilot, "BADARG: 5 of 8")
        titles = {item.title for item in app.get_system_commands(screen)}
        assert "Quit" in titles and "Screenshot" not in titles
        await pilot.click("#turns", offset=(3, 2))
        assert screen.view is not None and screen.view.block_of(screen.tokens.cursor) == 1
        await pilot.click("#map", offset=(5, 1))
        assert screen.tokens.cursor == 0
        await pilot.click("#group", offset=(3, 3))
        await until(pilot, lambda: screen.episode_id == "ep0040001")
        await pilot.click("#group", offset=(3, 0))  # its title
        assert screen.episode_id == "ep0040001"
        tags, own = ("ctrl+t", "tags, with a minus"), ("escape", "question_mark", "Your own keys")
        text = await walk(pilot, tags, own)
        assert re.search(r"ctrl\+t +tag", text) and not re.search(r"W +watch", text)
        await press(pilot, "z", "ctrl+p", *"replay.tag", then="tag   ctrl+t   replay.tag")
    assert (
        unknown_key({"replay.tag": "ctrl+t", "watch.control.pause": "P", "chat.side": "f6"}) == ""
    )
    assert "did you mean replay.tag?" in unknown_key({"replay.tagg": "z"})
    # `first first` and `next down` were made of an action and its number
    for screen in (resolve("screens", SCREENS, name) for name in names("screens", SCREENS)):
        words = {(key.action, key.description) for key in screen.BINDINGS}
        assert len({text for _, text in words if text}) == len(words), screen


def test_what_was_never_to_be_trained_does_not_wait_for_it() -> None:
    words = demo.Words()
    episode = demo.episode(words, 3, solved=False).with_(kind="eval", fact="")
    view = make_view(episode, TokenTexts(words.json()))
    assert dict(token_numbers(view, 60))["trained"] == "no: an evaluation"
    assert "sampled" in turn_lines(view, 2)[3].plain


def test_a_light_theme_inverts_colours() -> None:
    back, text = (invert(Color.parse(name)).get_truecolor() for name in ("#101014", "#d8d8d8"))
    assert min(back) > 240 and max(text) < 60 and invert(Color.default()).is_default
    style = Style.parse("bold #8fbfff on #101014")
    (segment,) = LIGHT.apply([Segment("x", style)], None)  # type: ignore[arg-type]
    assert segment.style is not None and segment.style.bold and segment.style.color != style.color
