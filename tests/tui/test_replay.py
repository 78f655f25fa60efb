"""Replay and the list of episodes, driven by keys and mouse, read as messages, and printed without a screen."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.style import Style
from rich.text import Text
from textual.app import App
from textual.events import Key
from textual.screen import Screen
from textual.widgets import Input

from agentrl_cli.store import Store
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.common.dialogs import Form
from agentrl_cli.tui.common.episode_list import Browse, EpisodeTable
from agentrl_cli.tui.common.episode_view import fork_of, make_view, whatif_turn
from agentrl_cli.tui.common.picture import picture_rows
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.token_text import TokenTexts
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.replay import related
from agentrl_cli.tui.replay.panels import step_lines
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.runs.screen import EpisodesScreen
from agentrl_cli.types import (
    ROOT,
    Episode,
    Origin,
    Outcome,
    RewardPart,
    Tokens,
    ToolResult,
    TrainSignals,
    Turn,
)
from agentrl_cli.types.content import image_part
from tests.helpers import tui_demo as demo
from tests.helpers.cli import Cli
from tests.helpers.trees import episode, fork, sub_agent
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

EP = "ep0120003"


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "agentrl.db"
    demo.fill(path)
    return path


def replay(db: Path, episode: str = EP) -> AgentApp:
    return AgentApp(db, lambda reader: ReplayScreen(reader, episode))


def tokens(app: App[int]) -> TokenView:
    return app.screen.query_one(TokenView)


async def test_layer_and_episode_change_while_the_transcript_is_hidden(db: Path) -> None:
    async with showing(replay(db), "j/k turn", size=SMALL) as pilot:
        view = tokens(pilot.app)
        await press(pilot, "tab", *"0123456789", then=lambda: view.lens == "kl" and not view.size)
        await press(pilot, "l", then=lambda: len(view.view.tokens) == 135 if view.view else False)
        assert view.layout_ is not None and view.layout_.view is view.view
        assert "▾ TURN" in await press(pilot, "tab", "tab", then="TURN")


async def test_keys_move_find_fold_and_lead_to_other_episodes(db: Path) -> None:
    async with showing(replay(db), "TOKEN 1/64", notifications=True, size=WIDE) as pilot:
        view, screen = tokens(pilot.app), screen_of(pilot, ReplayScreen)
        start = view.cursor
        await walk(pilot, ("J", "right", "TOKEN 3/64"), ("K", "left", "j", "TOKEN 1/22"))
        assert "not trained" in visible(pilot.app)
        for key, cursor in (("g", 0), ("G", 146), ("up", 132)):
            await pilot.press(key)
            assert view.cursor == cursor
        moves = ("g", "k", "down", "pagedown", "pageup")
        found = "matches, . for the next"
        assert '" total"' in await walk(pilot, (*moves, "slash", *"total", "enter", found))
        first = view.cursor
        await pilot.press("full_stop")
        assert view.cursor != first
        await until_text(pilot, "DIFF with sibling #1")
        await pilot.press("v")
        assert view.cursor == 59
        await pilot.press("space")
        assert "I need the total" not in visible(pilot.app)
        await walk(
            pilot,
            ("space", "apostrophe", "I need the total"),
            ("B", "This episode has one branch."),
            ("y", "4  episode id"),
        )
        for _ in range(2):  # typed ahead: the second reaches a window that is closed
            pilot.app.screen.post_message(Key("4", "4"))
        await pilot.pause()
        assert pilot.app.clipboard == EP
        view.move_to(start)
        await pilot.press("J")
        await pilot.resize_terminal(50, 12)
        await until_text(pilot, "too small")
        await pilot.resize_terminal(*WIDE)
        await until_text(pilot, "TOKEN 2/64")
        text = await press(pilot, "J", "l", then="4 of 8")
        assert "TOKEN 3/64" in text and "reward 1.20" in text
        await press(pilot, "h", "h", then="2 of 8")
        await until(pilot, lambda: screen.browse.ids is not None)
        before = screen.episode_id
        await press(pilot, "n", then=lambda: screen.episode_id != before)
        await press(pilot, "i", then=lambda: isinstance(pilot.app.screen, EpisodesScreen))
        await press(pilot, "escape", then=lambda: pilot.app.screen is screen)
        await press(pilot, "escape", then="q quits")
        assert pilot.app.is_running and pilot.app.return_value is None


async def test_a_line_that_is_too_long_is_cut_and_moves_none_below_it(db: Path) -> None:
    async with showing(replay(db), "? all", size=(100, 30)) as pilot:
        assert "j/k turn" in visible(pilot.app)
        await pilot.resize_terminal(*WIDE)
        await until_text(pilot, "DIFF with sibling")
        screen = screen_of(pilot, ReplayScreen)
        shown = " ".join(line.plain.strip() for line in screen.panel("failure").lines)
        assert shown == "BADARG: 5 of 8 in step 120, x"
        panel = screen.panel("diff")
        panel.show([*(Text(char * 80) for char in "我你"), Text("policy: this p")])
        text = await until_text(pilot, "policy: this p")
        assert "我我" in text and "你你" in text


async def test_panes_of_another_episode_than_the_transcript_are_dimmed(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dimmed: list[dict[str, float]] = []
    later = {"failure", "diff", "steps", "beside"}
    names = {"group", "turns", "reward", "token", "why", "map", *later}
    async with showing(replay(db), "BESIDE", size=(170, 44)) as pilot:
        screen = screen_of(pilot, ReplayScreen)

        def opacity() -> dict[str, float]:
            return {name: screen.query_one(f"#{name}").styles.text_opacity for name in names}

        def before_paint(paint: Callable[[], None] = screen.paint) -> None:
            dimmed.append(opacity())
            paint()
            dimmed.append(opacity())

        monkeypatch.setattr(screen, "paint", before_paint)
        await until(pilot, lambda: set(opacity().values()) == {1.0})
        before = screen.episode_id
        await pilot.press("l")
        await until(pilot, lambda: screen.episode_id != before and {*opacity().values()} == {1.0})
    assert set(dimmed[0].values()) == {0.35}
    assert {name for name, shown in dimmed[1].items() if shown == 1.0} >= names - later


async def test_filter_typo_is_reported_and_a_filter_opens_its_first_episode(db: Path) -> None:
    async with showing(replay(db), "TOKEN 1/64", notifications=True, size=WIDE) as pilot:
        assert "fields: adv branches calls" in await press(
            pilot, "f", then="enter: go"
        )  # the dialog lists the fields
        await press(pilot, *"rewar:<1", "enter", then="Did you mean reward")
        assert isinstance(pilot.app.screen, Form)  # a typo does not get past the dialog
        for key in ("down", "down", "x"):  # at once, as a paste or a slow machine brings them
            pilot.app.post_message(Key(key, key if len(key) == 1 else None))
        await until(
            pilot,
            lambda: any(
                item.value for item in pilot.app.screen.query(Input) if item.name == "step"
            ),
        )
        assert "ep ep0120006" in await press(
            pilot,
            "backspace",
            "up",
            "up",
            *["backspace"] * 8,
            *"reward:>1",
            "enter",
            then="reward 1.20",
        )


async def test_half_written_and_unknown_episodes_open_and_a_running_one_is_followed(
    tmp_path: Path,
) -> None:
    """Episodes as a run leaves them when it is killed, or before it has trained."""
    done = demo.episode(demo.Words(), 1, solved=True)
    odd = Tokens.from_ids([0, 1, 2], [Origin.MODEL] * 3)
    said = Turn(0, "assistant", ({"role": "assistant", "content": None},), 0, 3)
    with Store.open(tmp_path / "half.db") as store:
        for number, name in enumerate(("begun", "nan", "cut")):
            store.episodes.start(Episode(name, f"t/{number}", group_id=f"g{number}"))
        store.episodes.add_turn("nan", said, odd)
        for turn in done.turns[:2]:
            store.episodes.add_turn("cut", turn, done.tokens.slice(turn.start, turn.end))
    moves = ("j", "k", "J", "K", "down", "up", "G", "g", "v", "apostrophe", "space", "l", "tab")
    app = replay(tmp_path / "half.db", "nothing")
    async with showing(app, "No episode named 'nothing'", notifications=True, size=WIDE) as pilot:
        await pilot.press("j", "l", "n", "v", "y", "escape", "3")
        for episode, size in (("begun", WIDE), ("nan", SMALL), ("cut", WIDE)):
            await pilot.resize_terminal(*size)
            screen = ReplayScreen(app.reader, episode)
            await app.push_screen(screen)
            await until_text(pilot, "RUNNING")
            await press(
                pilot, *moves, *"123456789", then="not graded yet" if size == WIDE else "RUNNING"
            )
        with Store.open(tmp_path / "half.db") as store:
            store.episodes.finish(done.with_(group_id="g2", run_id=None))
        screen = ReplayScreen(app.reader, "cut")
        await app.push_screen(screen)
        await until(pilot, lambda: screen.fork is not None)
        assert screen.view is not None and len(screen.view.blocks) == 2
        turn = done.turns[2]
        with Store.open(tmp_path / "half.db") as store:
            store.episodes.add_turn("cut", turn, done.tokens.slice(turn.start, turn.end))
        await until(pilot, lambda: screen.view is not None and len(screen.view.blocks) == 3)
        # the difference with a sibling is that of the longer episode too
        await until(pilot, lambda: screen.fork is not None and screen.fork.position == turn.end)


async def test_list_reads_only_what_is_visible(tmp_path: Path) -> None:
    Store.open(tmp_path / "e.db").close()
    async with showing(
        AgentApp(tmp_path / "e.db", EpisodesScreen), "no episodes yet", size=SMALL
    ) as pilot:
        await pilot.press("j", "k", "G", "g", "enter", "pagedown")
    path = tmp_path / "many.db"
    with Store.open(path) as store, store.transaction():
        for number in range(1500):
            store.episodes.start(Episode(f"e{number:05d}", "t/0", started=1.0 + number))
    async with showing(
        AgentApp(path, lambda reader: EpisodesScreen(reader, Browse(sort="time"))),
        "e00000",
        notifications=True,
        size=SMALL,
    ) as pilot:
        table = pilot.app.screen.query_one(EpisodeTable)
        assert len(table.rows) < 200
        await press(pilot, "G", then="e01499")
        assert len(table.rows) < 600


async def test_a_list_that_is_read_again_stays_on_its_episode(tmp_path: Path) -> None:
    path = tmp_path / "many.db"

    def add(*numbers: int) -> None:
        with Store.open(path) as store, store.transaction():
            for number in numbers:
                store.episodes.start(Episode(f"e{number:05d}", "t/0", started=1.0 + number))

    add(*range(100))
    async with showing(AgentApp(path, EpisodesScreen), "e00099", size=SMALL) as pilot:
        table = pilot.app.screen.query_one(EpisodeTable)

        def line() -> str:
            row = table.cursor - round(table.scroll_offset.y)
            return f"{row} {table.rows[table.ids[table.cursor]].id}"

        add(100, 101)
        await press(pilot, "r", then="102 episodes")
        assert line() == "2 e00099"  # the newer ones stand above it
        for _ in range(4):
            await pilot.press("pagedown")
        # rows are read once they are painted
        await until(
            pilot, lambda: bool(visible(pilot.app)) and table.ids[table.cursor] in table.rows
        )
        before = line()
        add(*range(102, 150))
        await press(pilot, "r", then="150 episodes")
        assert line() == before
        await press(pilot, "g", "o", then="sort time")
        assert line() == "0 e00000"
    browse = Browse(sort="time")
    with Store.open(path) as store:
        browse.load(store)
        store.episodes.delete(["e00003", "e00004"])
        assert browse.neighbour(store, "e00002", 1) == "e00005"
        assert browse.neighbour(store, "e00005", -1) == "e00002"
        assert browse.neighbour(store, "e00000", -1) is None


def test_the_first_episode_of_a_filter_one_as_text_and_its_tokens_are_printed(
    db: Path, cli: Cli
) -> None:
    cli.always = ("--db", str(db))
    with Store.open(db, readonly=True) as store:
        wanted = store.episodes.rows(store.episodes.ids("reward:<0.5", "reward"))[0].id
    out = cli("replay", "--plain", "--filter", "reward:<0.5", "--sort", "reward")
    assert wanted in out.splitlines()[0]
    solved = cli("replay", "last", "--plain", "-f", "outcome:solved")
    assert "solved" in solved.splitlines()[0]
    for words, said in (
        ("--plain -f reward:>99", "No episode matches"),
        ("zzz", "No episode named 'zzz'"),
        (f"{EP} --plain --layer nope", "push, advantage"),
        (f"{EP} --filter rewrd:<1 --svg x.svg", "reward"),
    ):
        cli("replay", *words.split(), code=2, said=said)
    out = cli("replay", EP, "--plain")
    for shown in (
        "> 3  0.00 -0.77",
        "--- TURN 2/4 assistant",
        "▸ calculator",
        "*correct",
        "DIFF with sibling #1",
        "! BADARG",
        "eeeeee",
        "abcdefg down",
    ):
        assert shown in out, shown
    rows = [json.loads(line) for line in cli("replay", EP, "--tokens").splitlines()]
    assert len(rows) == 147 and rows[0]["logp_policy"] is None
    sampled = next(row for row in rows if row["origin"] == "model")
    assert sampled["advantage"] == pytest.approx(-0.77) and len(sampled["top"]) == 5


def test_without_colours_the_glyphs_say_the_same(
    db: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    cli("replay", EP, "--svg", "r.svg", "--db", str(db))
    text = (cli.folder / "r.svg").read_text("utf-8")
    assert "eeeeee" in text and "~~~~" in text
    cli("replay", EP, "--svg", "none/r.svg", "--db", str(db), code=3, said="could not be written")


async def test_marks_are_kept_and_following_goes_on_to_the_newest_episode_until_something_moves(
    tmp_path: Path,
) -> None:
    db = tmp_path / "a.db"
    demo.fill(db, steps=2)
    words = demo.Words()
    async with showing(
        replay(db, "ep0002003"), "TOKEN 1/64", notifications=True, size=WIDE
    ) as pilot:
        screen = screen_of(pilot, ReplayScreen)
        await press(pilot, "t", *"bad keep", "enter", then="TAGS bad, keep")
        await press(pilot, "b", then="TAGS bad, keep, mark")
        await press(
            pilot, "b", "t", *"-bad", "enter", then=lambda: "TAGS keep" in visible(pilot.app)
        )
        await press(pilot, "m", *"a comma", "enter", then="NOTE a comma")
        assert "flag:BADARG step:2 kind:train" in await press(pilot, "x", then="5 episodes")
        assert isinstance(pilot.app.screen, EpisodesScreen)
        await press(pilot, "escape", then=lambda: pilot.app.screen is screen)
        assert "FOLLOWING" in await press(pilot, "L", then="FOLLOWING")
        await until(pilot, lambda: screen.episode_id != "ep0002003" and screen._version is not None)
        newer = demo.episode(words, 5, solved=True, step=3).with_(
            id="newer", started=4e9, ended=4e9
        )
        with Store.open(db) as store:
            row = store.episodes.row("ep0002003")
            assert row.tags == ("keep",) and row.note == "a comma"
            store.episodes.cancel("run7")
            store.episodes.finish(newer)
        await until(pilot, lambda: screen.episode_id == "newer" and screen.view is not None)
        await until(pilot, lambda: tokens(pilot.app).cursor == len(newer.tokens) - 1)
        assert "FOLLOWING" in visible(pilot.app)
        await press(pilot, "K", then=lambda: "FOLLOWING" not in visible(pilot.app))
        with Store.open(db) as store:
            store.episodes.finish(newer.with_(id="newest", started=5e9))
        await pilot.pause(1.2)
        assert screen.episode_id == "newer"


def test_the_same_task_at_another_step_is_that_of_the_same_pack(tmp_path: Path) -> None:
    with Store.open(tmp_path / "packs.db") as store:
        for step, pack in ((1, "a"), (2, "b"), (3, "a")):
            store.episodes.finish(
                demo.episode(demo.Words(), 1, solved=True, step=step).with_(pack=pack, run_id=None)
            )
        assert related.at_step(store, "ep0001001", 1) == "ep0003001"
        assert related.at_step(store, "ep0002001", 1) is None


def test_what_else_failed_so_and_how_the_task_went_by_step(db: Path) -> None:
    with Store.open(db, readonly=True) as store:
        assert related.same_failure(store, EP) == [("BADARG", 5, 8)]
        assert related.same_failure(store, "ep0120001") == []
        assert related.by_step(store, EP) == ("", [])
    many = [(step, step / 100, 4) for step in range(0, 100, 10)]
    title, line = step_lines("eval", many, 90, 40)
    assert title.plain.startswith("BY STEP  this task in evaluations")
    assert line.plain.split() == ["60:0.60", "70:0.70", "80:0.80", "90:0.90"]


def test_best_is_the_most_pushed_of_the_solved_and_never_of_a_skipped_group(tmp_path: Path) -> None:
    def tried(name: str, weight: float, p: float, **changes: Any) -> None:
        tokens = Tokens.from_ids(list(range(6)), [Origin.USER] * 2 + [Origin.MODEL] * 4)
        episode = Episode(
            name, "t", turns=(Turn(0, "assistant", (), 0, 6),), tokens=tokens, advantage=weight,
            reward_parts=(RewardPart("r", 1.0, primary=True),), outcome=Outcome.SOLVED, fact="trained",
        ).with_(**changes)  # fmt: skip
        store.episodes.finish(episode)
        pushed, logp, ratio = (
            np.array([np.nan, np.nan, *[number] * 4], np.float32)
            for number in (weight, math.log(p), 1.0)
        )
        store.signals.add(name, TrainSignals(pushed, logp, ratio, np.zeros(6, np.int8), pushed))
        store.flush()

    with Store.open(tmp_path / "b.db") as store:
        tried("certain", 2.0, 0.99)
        tried("pushed", 0.5, 0.2)
        tried("failed", 9.0, 0.1, outcome=Outcome.FAILED)
        tried("skipped", 9.0, 0.1, fact="skipped:no_signal: all rewards of the group are equal")
        assert store.episodes.resolve("best") == "pushed"
        assert store.episodes.resolve("best@t1.0") == "pushed"
        # the failed one trained too
        assert store.signals.push_scale(None) == pytest.approx(9.0 * 0.9, rel=0.2)
        assert store.signals.push_scale("nosuch") == 0.0


def test_best_is_what_is_typical_and_not_a_fluke(tmp_path: Path) -> None:
    part = (RewardPart("r", 1.0, primary=True),)
    rows = [
        ("lone", 2.5, ()),
        ("odd", 0.3, ("NOTOOL",)),
        ("often", 0.4, ()),
        ("untrained", None, ()),
    ]
    with Store.open(tmp_path / "b.db") as store:
        for n, (name, advantage, flags) in enumerate(rows):
            store.episodes.finish(
                Episode(name, "t", reward_parts=part, outcome=Outcome.SOLVED, advantage=advantage, flags=flags,
                        started=1.0 + n)
            )  # fmt: skip
        assert store.episodes.resolve("best") == "often"


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trees") / "agentrl.db"
    run, words = demo.fill(path), demo.Words()
    w, plain = demo.Writer(words, 1), demo.episode(words, 1, solved=True)
    # an agent that asks a second one, and whose history was then cut after its first call
    w.given("user", "Ask the expert for the price.", Origin.USER)
    w.assistant("I ask the expert.", [demo.call("ask", {"question": "price?"})])
    w.given("user", "You are the expert: what is the price?", Origin.USER)
    w.turns[-1] = replace(w.turns[-1], parent=ROOT)
    w.assistant("The price is 54.")
    for answer, price in (("54", "54"), ("an older answer", "12")):
        w.given("tool", answer, Origin.TOOL, [ToolResult(answer)])
        w.turns[-1] = replace(w.turns[-1], parent=1)
        w.assistant(f"It costs {price}.")
    one = plain.with_(id="tree", group_id=None, run_id=run, turns=tuple(w.turns), tokens=w.tokens())
    with Store.open(path) as store:
        store.tokenizers.add("tree-tokenizer", words.json(), "", {})
        store.episodes.add([one], tokenizer="tree-tokenizer")
        store.signals.add("tree", demo.signals_of(one))
    return path


Step = tuple[str | tuple[str, ...], ...]
ATTEMPT, EXPERT = "the expert: what is the price", "It costs 54"
# The store, the screen, what it shows first, its size, and steps: keys, and the text that they bring.
WALKS: dict[str, tuple[str, Callable[[Reader], Screen[Any]], str, tuple[int, int], list[Step]]] = {
    "a small terminal shows one pane": (
        "db",
        lambda reader: ReplayScreen(reader, EP),
        "1* 2. 3> 4*",
        SMALL,
        [
            ("tab", ("REWARD", "I need the total", "WHY IT FAILED")),
            ("pagedown", "pagedown", "WHY IT FAILED"),  # what is shown, not the transcript
            ("tab", "GROUP calc/0417"),
            ("tab", "I need the total"),
        ],
    ),
    "the list sorts, filters and opens": (
        "db",
        lambda reader: EpisodesScreen(reader, Browse()),
        "9 episodes",
        WIDE,
        [
            ("ep_live",),
            ("running",),
            ("o", "o", "sort -reward"),
            ("f", *"rewrd:>1", "enter", "Did you mean reward"),
            (*(["backspace"] * 8), *"reward:>1", "enter", "3 episodes"),
            ("j", "enter", "agentrl replay"),
            ("q", "agentrl episodes"),
        ],
    ),
    "a tree and each branch alone": (
        "trees",
        lambda reader: ReplayScreen(reader, "tree"),
        "3 branches",
        WIDE,
        [
            ("> 1 asst +tool",),
            ("  2 └user",),
            ("  4 tool",),
            ("  6 └tool",),
            ("TURN 2/7 user  another context",),
            ("TURN 4/7 tool  continues turn 1",),
            ("B", ("BRANCH 1 of 3: turns 2-3", EXPERT)),
            (ATTEMPT,),
            ("B", ("BRANCH 2 of 3: turns 0-1 4-5", "It costs 12")),
            (EXPERT,),
            ("B", ("BRANCH 3 of 3: turns 0-1 6-7", EXPERT)),
            ("It costs 12",),
            ("> 6 ",),  # the first token that is the branch's own
            ("TOKEN 1/",),
            ("B", EXPERT),
        ],
    ),
    "an episode is read as messages": (
        "page",
        lambda reader: ReplayScreen(reader, "longone"),
        "TURN",
        (120, 40),
        [
            ("M", ("> {2 keys: rows, total}", "# Plan", "row 59", "\x1b[31m")),
            ("• read all rows",),
            ("␀1b[31mred",),
            ("enter", '"name": "row 0"'),
            ("slash", *"row 59", "enter", '"name": "row 59"'),
            ("g", "enter", ("> {2 keys: rows, total}", '"row 0"')),
            ("q", "TURN"),
        ],
    ),
    "a filter is a form": (
        "page",
        lambda reader: ReplayScreen(reader, "longone"),
        "TURN",
        WIDE,
        [
            (
                *(
                    "f",
                    *"reward:<1",
                    *["tab"] * 4,
                    *"fai",
                    "right",
                    "tab",
                    *"bad",
                    "right",
                    "enter",
                ),
                "filter reward:<1 outcome:failed flag:BADARG",
            )
        ],
    ),
}


@pytest.mark.parametrize(("store", "make", "first", "size", "steps"), WALKS.values(), ids=WALKS)
async def test_keys_bring_what_they_should(
    request: pytest.FixtureRequest,
    store: str,
    make: Callable[[Reader], Screen[Any]],
    first: str,
    size: tuple[int, int],
    steps: list[Step],
) -> None:
    app = AgentApp(request.getfixturevalue(store), make)
    async with showing(app, first, notifications=True, size=size) as pilot:
        await walk(pilot, *steps)


def test_printed_and_as_json(trees: Path, cli: Cli) -> None:
    text = cli("replay", "tree", "--plain", "--db", str(trees))
    assert "--- TURN 6/7 tool  continues turn 1" in text
    assert "3 branches, B: turns 2-3, 0-1 4-5, 0-1 6-7" in text
    shown = cli.json("replay", "tree", "--db", str(trees))
    assert shown["branches"] == [[2, 3], [0, 1, 4, 5], [0, 1, 6, 7]]
    assert [turn["parent"] for turn in shown["turns"]] == [None, None, -1, None, 1, None, 1, None]
    text = cli("show", "tree", "--db", str(trees))
    assert "branches 2-3, 0-1 4-5, 0-1 6-7" in text and "── turn 4 tool ── continues turn 1" in text


def test_what_if_and_forks_follow_the_path(trees: Path) -> None:
    one = episode(fork())
    view = make_view(one, TokenTexts())
    at = {turn.index: turn.start for turn in one.turns}
    assert [whatif_turn(view, at[n]) for n in (0, 1, 2, 4)] == [1, 1, 3, 5]
    assert (
        whatif_turn(make_view(episode(sub_agent()), TokenTexts()), 7) == 3
    )  # of the second agent, not the first
    # main branches: 0-1 4-5 here; the other says 26 for 25 there
    found = fork_of(view, episode([*fork()[:5], replace(fork()[5], ids=(26,))], "other"))
    assert (
        found is not None
        and found.position == one.turns[5].start
        and one.tokens.ids[found.position] == 25
    )


ROWS = json.dumps({"rows": [{"n": n, "name": f"row {n}"} for n in range(60)], "total": 60})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The invented run, and an episode with Markdown, long JSON and control characters."""
    path = tmp_path_factory.mktemp("reading") / "agentrl.db"
    demo.fill(path, steps=3)
    words = demo.Words()
    w = demo.Writer(words, 1)
    w.given("user", "list them", Origin.USER)
    w.assistant("# Plan\n\n- read **all** rows\n- [click](javascript:alert)\n\n\x1b[31mred", [])
    w.given("tool", ROWS, Origin.TOOL, [ToolResult(ROWS, seconds=0.1)])
    with Store.open(path) as store:
        long = replace(
            demo.episode(words, 8, solved=True, step=3),
            id="longone",
            turns=tuple(w.turns),
            tokens=w.tokens(),
        )
        store.episodes.finish(long)
        store.tokenizers.add("words", words.json(), "", {})
    return path


async def test_images_are_half_blocks_and_open_by_a_key(page: Path) -> None:
    pytest.importorskip("PIL")
    from tests.helpers.vision import png

    pictures = png(8, 8, (255, 0, 0)), png(40, 20, (0, 0, 255))
    words = demo.Words()
    w = demo.Writer(words, 1)
    parts = [
        {"type": "image", **image_part(pictures[0], 8, 8, 1)},
        {"type": "text", "text": "look"},
    ]
    w.given("user", "look", Origin.USER)
    w.turns[-1] = replace(
        w.turns[-1], messages=({"role": "user", "content": parts},), images=pictures[:1]
    )
    w.given(
        "tool",
        "it",
        Origin.TOOL,
        [ToolResult("it", images=pictures[1:]), ToolResult("", images=(b"none",))],
    )
    with Store.open(page) as store:
        shown = replace(
            demo.episode(words, 9, solved=True, step=3), id="pictured", turns=tuple(w.turns)
        )
        store.episodes.finish(replace(shown, tokens=w.tokens()))
    app = AgentApp(page, lambda reader: ReplayScreen(reader, "pictured"))
    async with app.run_test(notifications=True, size=(120, 70)) as pilot:
        text = await until_text(pilot, "▀▀▀▀")
        assert "image 8x8" in text and "cannot be shown" in text, text
        # what-ifs are listed behind the last turn of the model too
        await press(pilot, "R", then="2  what-ifs")
        await press(pilot, "escape", then=lambda: isinstance(pilot.app.screen, ReplayScreen))
        text = await press(pilot, "I", then="1 of 3")
        assert "turn 0, user, image 1" in text
        await press(pilot, "right", "o", then="2 of 3")
        await until(pilot, lambda: len(list((page.parent / "images").glob("*.png"))) >= 2)
        assert "▀" * 40 in visible(app)
        text = await press(pilot, "x", "M", then="reading")
        assert "[image 8x8" in text and "▀▀▀▀" in text
    rows = picture_rows(pictures[0], 4, 4)
    assert (
        len(rows) == 2
        and rows[0][0].style == Style(color="#ff0000", bgcolor="#ff0000")
        and len(rows[0]) == 4
    )
