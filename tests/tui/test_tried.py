"""What trying the screens in a real terminal showed: each was a fault once."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text
from textual.binding import Binding

from agentrl_cli.commands import main
from agentrl_cli.errors import StoreError
from agentrl_cli.reports.html import PAGE
from agentrl_cli.store import Store
from agentrl_cli.tui.app import HARMLESS, AgentApp, unknown_key
from agentrl_cli.tui.common.episode_list import row_text
from agentrl_cli.tui.common.episode_view import make_view
from agentrl_cli.tui.common.keys import describe
from agentrl_cli.tui.common.layers import LAYERS
from agentrl_cli.tui.common.layout import Kind, Layout
from agentrl_cli.tui.common.token_text import TokenTexts
from agentrl_cli.tui.compare.screen import CompareScreen
from agentrl_cli.tui.replay.inspector import token_numbers
from agentrl_cli.tui.replay.panels import turn_lines
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.watch.screen import WatchScreen
from agentrl_cli.types import ToolCall
from tests.helpers import tui_demo as demo
from tests.helpers.tui import until, until_text

WIDE, SMALL = (120, 40), (80, 24)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """The invented run, whose process is this one, so that it counts as alive."""
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


async def test_no_text_steers_the_terminal(db: Path) -> None:
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
    async with AgentApp(db, lambda reader: ReplayScreen(reader, "ep0040003")).run_test(
        size=WIDE
    ) as pilot:
        await until_text(pilot, "TOKEN 1/64")
        pilot.app.screen.query_one("#why").update(Text("a\x1b[2Jb\x07c\x9bd"))  # type: ignore[attr-defined]
        await until_text(pilot, "a[2Jbcd")
        assert HARMLESS in pilot.app.get_line_filters()


def test_the_list_shows_tags_kinds_and_parents(db: Path) -> None:
    with Store.open(db) as store:
        child = store.episodes.get("ep0040003").with_(
            id="child", kind="whatif", parent_id="ep0040003", flags=("LOOP",)
        )
        store.episodes.finish(child)
        store.marks.tag("child", "seen")
        store.marks.note("child", "why?")
        row = store.episodes.row("child")
    assert row_text(row, 160).rstrip().endswith("LOOP #seen note whatif of ep0040003")


async def test_keys_move_the_choice_of_a_comparison_whatever_has_the_focus(db: Path) -> None:
    from agentrl_cli.reports.compare import compare_runs

    async with AgentApp(db, lambda reader: CompareScreen(reader, "grpo-07", "grpo-07")).run_test(
        size=SMALL
    ) as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, CompareScreen)
        await until(pilot, lambda: screen.found is not None)
        found = screen.found
        assert found is not None and len(found.tasks) == 1
        screen.found = replace(found, tasks=found.tasks * 30)
        for key, place in (("down", 1), ("pagedown", 11), ("up", 10), ("pageup", 0)):
            await pilot.press(key)
            assert screen.cursor == place, key
        await pilot.press("pagedown")
        await until_text(pilot, "calc/0417")  # in sight, where it is
    with Store.open(db, readonly=True) as store:
        assert compare_runs(store, "grpo-07", "grpo-07").gained == 0


def test_last_with_a_filter_is_the_last_that_it_lets_through(
    db: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "last", "--plain", "--db", str(db), "-f", "outcome:solved"]) == 0
    assert "solved" in capfd.readouterr().out.splitlines()[0]


async def test_a_damaged_episode_is_reported_and_the_next_one_opens(db: Path) -> None:
    with sqlite3.connect(db) as conn:
        conn.execute(
            "UPDATE turn_tokens SET top_ids=x'0102030405' WHERE episode_id='ep0040003' AND idx=2"
        )
        conn.execute("UPDATE turns SET messages='{bad' WHERE episode_id='ep0040002' AND idx=1")
        conn.execute("UPDATE turn_tokens SET ratio=x'01' WHERE episode_id='ep0040001' AND idx=2")
    conn.close()
    with Store.open(db, readonly=True) as store:
        for name in ("ep0040003", "ep0040002"):
            with pytest.raises(StoreError, match=f"Episode {name} is damaged"):
                store.episodes.get(name)
        with pytest.raises(
            StoreError, match="The training signals of episode ep0040001 is damaged"
        ):
            store.signals.get("ep0040001")
    async with AgentApp(db, lambda reader: ReplayScreen(reader, "ep0040003")).run_test(
        size=SMALL
    ) as pilot:
        await until_text(pilot, "Episode ep0040003 is damaged")
        await pilot.press("n", "n", "N", "q")


def with_a_secret(path: Path) -> None:
    """A store with an episode `plain` and one that contains a key."""
    episode = demo.episode(demo.Words(), 3, solved=False)
    turn = replace(
        episode.turns[1],
        messages=({"role": "user", "content": "my key is sk-abcdefghijklmnopqrstuvwx"},),
    )
    with Store.open(path) as store:
        store.episodes.finish(episode.with_(id="plain", run_id=None, group_id="a"))
        turns = (episode.turns[0], turn, *episode.turns[2:])
        store.episodes.finish(episode.with_(id="telling", run_id=None, group_id="b", turns=turns))


async def test_a_picture_of_a_secret_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with_a_secret(tmp_path / "s.db")
    for name, asks in (("plain", False), ("telling", True)):
        app = AgentApp(tmp_path / "s.db", lambda reader, name=name: ReplayScreen(reader, name))  # type: ignore[misc]
        target = tmp_path / f"replay-{name}.svg"
        async with app.run_test(size=WIDE, notifications=True) as pilot:
            await until_text(pilot, "TOKEN 1/")
            await pilot.press("s")
            if asks:
                await until_text(pilot, "A picture masks nothing")
                await pilot.press("n", "s")
                await until_text(pilot, "A picture masks nothing")
                assert not target.exists()
                await pilot.press("y")
            await until(pilot, target.exists)
        assert "masks" not in target.read_text("utf-8")


def test_a_picture_of_a_secret_needs_a_flag(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with_a_secret(tmp_path / "s.db")
    target = tmp_path / "r.svg"

    def run(*more: str) -> int:
        return main(["replay", *more, "--db", str(tmp_path / "s.db")])

    assert run("telling", "--svg", str(target)) == 2
    assert "--no-mask" in capfd.readouterr().err and not target.exists()
    assert run("telling", "--svg", str(target), "--no-mask") == 0 and target.is_file()
    assert run("plain", "--svg", str(tmp_path / "p.svg")) == 0 and (tmp_path / "p.svg").is_file()
    assert run("plain", "--no-mask") == 2


async def test_a_picture_of_watch_is_asked_for_where_its_log_has_a_secret(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(db.parent)
    async with AgentApp(db, lambda reader: WatchScreen(reader, "run7")).run_test(
        size=WIDE
    ) as pilot:
        await until_text(pilot, "worth a look")
        await pilot.press("s")
        await until(pilot, (db.parent / "watch-run7.svg").exists)
    (db.parent / "watch-run7.svg").unlink()
    with Store.open(db) as store:
        store.journal.add_log("run7", "warn", "no answer from https://me:hunter22@example.org")
    async with AgentApp(db, lambda reader: WatchScreen(reader, "run7")).run_test(
        size=WIDE
    ) as pilot:
        await until_text(pilot, "worth a look")
        await pilot.press("s")
        await until_text(pilot, "A picture masks nothing")
        assert not (db.parent / "watch-run7.svg").exists()


async def test_keys_of_the_user_and_clicks(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "screens.yaml"
    path.write_text("keys:\n  replay.tag: ctrl+t\n  runs.watch: W\n")
    monkeypatch.setenv("AGENTRL_SCREENS", str(path))
    app = AgentApp(db, lambda reader: ReplayScreen(reader, "ep0040003"))
    async with app.run_test(size=WIDE) as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, ReplayScreen)
        await until_text(pilot, "TOKEN 1/64")
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
        await pilot.press("ctrl+t")
        await until_text(pilot, "tags, with a minus")
        await pilot.press("escape", "question_mark")
        text = await until_text(pilot, "Your own keys")
        assert re.search(r"ctrl\+t +tag", text) and not re.search(r"W +watch", text)
        await pilot.press("z", "ctrl+p", *"replay.tag")
        assert "ctrl+t   replay.tag" in await until_text(pilot, "   replay.tag")
    known = {"replay.tag": "ctrl+t", "watch.control.pause": "P", "chat.side": "f6"}
    assert unknown_key(known) == ""
    assert "did you mean replay.tag?" in unknown_key({"replay.tagg": "z"})
    cases = {
        ("turn(-1)", "turn"): "previous turn",
        ("line(15)", ""): "next line ×15",
        ("end(0)", ""): "first",
        ("rate(1.5)", "raise the rate"): "raise the rate",
        ("layer('kl')", "KL"): "KL",
    }
    assert {key: describe(Binding("x", *key)) for key in cases} == cases


def test_what_was_never_to_be_trained_does_not_wait_for_it() -> None:
    words = demo.Words()
    episode = demo.episode(words, 3, solved=False).with_(kind="eval", fact="")
    view = make_view(episode, TokenTexts(words.json()))
    assert dict(token_numbers(view, 60))["trained"] == "no: an evaluation"
    assert "sampled" in turn_lines(view, 2)[3].plain
