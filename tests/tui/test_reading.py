"""Reading an episode as messages, finding text on every page, forms with completion, the light theme."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.color import Color
from rich.segment import Segment
from rich.style import Style

from agentrl_cli.errors import UsageError
from agentrl_cli.store import Store
from agentrl_cli.store.filters import compile_filter
from agentrl_cli.tui.app import LIGHT, AgentApp, invert, is_light, light_background
from agentrl_cli.tui.common.episode_list import filter_text
from agentrl_cli.tui.common.picture import picture_rows
from agentrl_cli.tui.common.settings import read_settings
from agentrl_cli.tui.replay.menus import whatif_text
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.whatif.view import whatif_arguments
from agentrl_cli.types import Origin, ToolResult
from agentrl_cli.types.content import image_part
from tests.helpers import tui_demo as demo
from tests.helpers.tui import until, until_text, visible

ROWS = json.dumps({"rows": [{"n": n, "name": f"row {n}"} for n in range(60)], "total": 60})


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


async def test_an_episode_is_read_as_messages(db: Path) -> None:
    app = AgentApp(db, lambda reader: ReplayScreen(reader, "longone"))
    async with app.run_test(notifications=True, size=(120, 40)) as pilot:
        await until_text(pilot, "TURN")
        await pilot.press("M")
        text = await until_text(pilot, "2 keys: rows, total")
        assert "• read all rows" in text and "# Plan" not in text and "row 59" not in text
        assert "\x1b[31m" not in text and "␀1b[31mred" in text
        await pilot.press("enter")
        await until_text(pilot, '"name": "row 0"')
        await pilot.press("slash", *"row 59", "enter")
        await until_text(pilot, '"name": "row 59"')
        await pilot.press("g", "enter")
        await until(pilot, lambda: '"row 0"' not in visible(app))
        await pilot.press("q")
        await until_text(pilot, "TURN")


async def test_images_are_half_blocks_and_open_by_a_key(db: Path) -> None:
    """Of a prompt and of a tool: in the transcript, large on `I`, and in the reading; the file is written for `o`."""
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
    with Store.open(db) as store:
        shown = replace(
            demo.episode(words, 9, solved=True, step=3), id="pictured", turns=tuple(w.turns)
        )
        store.episodes.finish(replace(shown, tokens=w.tokens()))
    app = AgentApp(db, lambda reader: ReplayScreen(reader, "pictured"))
    async with app.run_test(notifications=True, size=(120, 70)) as pilot:
        text = await until_text(pilot, "▀▀▀▀")
        assert "image 8x8" in text and "cannot be shown" in text, text
        await pilot.press("I")
        text = await until_text(pilot, "1 of 3")
        assert "turn 0, user, image 1" in text
        await pilot.press("right", "o")
        await until_text(pilot, "2 of 3")
        await until(pilot, lambda: len(list((db.parent / "images").glob("*.png"))) >= 2)
        assert "▀" * 40 in visible(app)
        await pilot.press("x", "M")
        text = await until_text(pilot, "reading")
        assert "[image 8x8" in text and "▀▀▀▀" in text
    rows = picture_rows(pictures[0], 4, 4)
    assert (
        len(rows) == 2
        and rows[0][0].style == Style(color="#ff0000", bgcolor="#ff0000")
        and len(rows[0]) == 4
    )


async def test_a_filter_is_a_form(db: Path) -> None:
    app = AgentApp(db, lambda reader: ReplayScreen(reader, "longone"))
    async with app.run_test(notifications=True, size=(120, 40)) as pilot:
        await until_text(pilot, "TURN")
        await pilot.press(
            "f",
            *"reward:<1",
            "tab",
            "tab",
            "tab",
            "tab",
            *"fai",
            "right",
            "tab",
            *"bad",
            "right",
            "enter",
        )
        await until_text(pilot, "filter reward:<1 outcome:failed flag:BADARG")


def test_forms_make_the_lines_that_are_checked() -> None:
    fields = {
        "filter": "-tag:seen",
        "task": "calc/*",
        "step": "3..9",
        "text": "two words",
        "flag": "",
    }
    text = filter_text(fields)
    assert text == '-tag:seen task:calc/* step:3..9 text:"two words"' and compile_filter(text)
    line = whatif_text({"turn": "2", "n": "4", "T": "1.0", "seed": "", "model": "grpo-07@last"})
    assert whatif_arguments(line) == [
        "--turn",
        "2",
        "--samples",
        "4",
        "--temperature",
        "1.0",
        "--model",
        "grpo-07@last",
    ]
    with pytest.raises(UsageError, match="needs a number"):
        whatif_arguments(whatif_text({"turn": "2", "n": "four"}))


def test_the_light_theme_follows_the_terminal(tmp_path: Path) -> None:
    assert is_light("light", {}) and not is_light("dark", {"COLORFGBG": "0;15"})
    assert is_light("auto", {"COLORFGBG": "0;default;15"}) and not is_light(
        "auto", {"COLORFGBG": "15;0"}
    )
    assert light_background(b"\x1b]11;rgb:ffff/fafa/f0f0\x1b\\\x1b[?62;22c") and light_background(
        b"\x1b]11;rgb:ff/ff/ff\x07"
    )
    assert not light_background(b"\x1b]11;rgb:1010/1010/1414\x1b\\") and not light_background(
        b"\x1b[?62c"
    )
    back, text = (invert(Color.parse(name)).get_truecolor() for name in ("#101014", "#d8d8d8"))
    assert min(back) > 240 and max(text) < 60
    assert invert(Color.default()).is_default
    style = Style.parse("bold #8fbfff on #101014")
    (segment,) = LIGHT.apply([Segment("x", style)], None)  # type: ignore[arg-type]
    assert segment.style is not None and segment.style.bold and segment.style.color != style.color
    path = tmp_path / "screens.yaml"
    path.write_text("theme: light\n")
    assert read_settings(path)[0].theme == "light"
    path.write_text("theme: pink\n")
    assert (
        read_settings(path)[0].theme == "auto"
        and "theme 'pink': Input should be 'auto'" in read_settings(path)[1]
    )
