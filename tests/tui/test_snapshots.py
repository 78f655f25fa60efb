"""Every screen at 120x40 and 80x24 as text and a digest of its colours, over an invented run whose clock stands.

A change of a screen fails here with the text that is new; where it was meant:

    AGENTRL_SNAPSHOTS=update python -m pytest tests/tui/test_snapshots.py
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot

from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.compare.screen import CompareScreen
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.runs.screen import EpisodesScreen, RunsScreen
from agentrl_cli.tui.watch.screen import WatchScreen
from tests.helpers.tui import rendered, steady, text_of, until_text
from tests.helpers.tui_shots import MORE, Make, fill_still, reroll, versus

FOLDER = Path(__file__).with_name("snapshots")
# name → (screen, keys, text that marks it as painted).
SCREENS: dict[str, tuple[Make, tuple[str, ...], str]] = {
    "runs": (RunsScreen, (), "took 83 min"),
    "episodes": (EpisodesScreen, (), "ep0120003"),
    "replay": (lambda reader: ReplayScreen(reader, "ep0120003"), (), "TURN 2"),
    "replay-logp": (lambda reader: ReplayScreen(reader, "ep0120003"), ("3", "j"), "TURN 3"),
    "replay-help": (
        lambda reader: ReplayScreen(reader, "ep0120003"),
        ("question_mark",),
        "gradient weight",
    ),
    "versus": (versus, (), "first fork turn"),
    "compare": (lambda reader: CompareScreen(reader, "grpo-06", "grpo-07"), (), "EVALUATIONS"),
    "watch": (lambda reader: WatchScreen(reader, "grpo-07"), (), "worth a look"),
    "watch-charts": (lambda reader: WatchScreen(reader, "grpo-07"), ("2",), "grad_norm"),
    "watch-episodes": (lambda reader: WatchScreen(reader, "grpo-07"), ("3",), "ep0120003"),
    "watch-groups": (lambda reader: WatchScreen(reader, "grpo-07"), ("4",), "GROUPS 2"),
    "watch-tokens": (lambda reader: WatchScreen(reader, "grpo-07"), ("5",), "sampled tokens"),
    "watch-tools": (lambda reader: WatchScreen(reader, "grpo-07"), ("6",), "calculator"),
    "watch-log": (lambda reader: WatchScreen(reader, "grpo-07"), ("7",), "LOG"),
    "watch-config": (lambda reader: WatchScreen(reader, "grpo-07"), ("8",), "prompts_per_step"),
    "watch-health": (lambda reader: WatchScreen(reader, "grpo-07"), ("9",), "machine"),
    "watch-help": (
        lambda reader: WatchScreen(reader, "grpo-07"),
        ("question_mark",),
        "attaches again",
    ),
    "runs-help": (RunsScreen, ("question_mark",), "flipped tasks"),
    "episodes-help": (EpisodesScreen, ("question_mark",), "open the episode"),
    "compare-help": (
        lambda reader: CompareScreen(reader, "grpo-06", "grpo-07"),
        ("question_mark",),
        "every metric",
    ),
    "versus-help": (versus, ("question_mark",), "both to the first"),
    "whatif-help": (reroll, ("question_mark",), "Nothing here touches"),
    "palette": (
        lambda reader: ReplayScreen(reader, "ep0120003"),
        ("ctrl+p", *"bookmark"),
        "replay.bookmark",
    ),
    **MORE,
}


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shots") / "project" / "runs"
    folder.mkdir(parents=True)
    path = folder / "agentrl.db"
    fill_still(path)
    return path


def shot(app: App[Any]) -> str:
    """The text, what depends on the machine struck out, and under it a digest of the colours."""
    strips = rendered(app)
    text = text_of(strips)
    text = re.sub(r"\d\d \d\d:\d\d:\d\d", "dd hh:mm:ss", text)
    text = re.sub(r"\d\d:\d\d:\d\d", "hh:mm:ss", text)
    text = re.sub(r"[\d,.]+ (GiB|MiB)", r"n \1", text)
    runs: list[str] = []
    for strip in strips:
        for segment in strip:
            style = segment.style
            mark = (
                f"{style.color} {style.bgcolor} {style.bold} {style.reverse}"
                if style is not None
                else ""
            )
            if not runs or runs[-1] != mark:
                runs.append(mark)
    return f"{text}\n-- colours {hashlib.sha256('|'.join(runs).encode()).hexdigest()[:16]}\n"


SMALL = (
    "runs",
    "episodes",
    "replay",
    "versus",
    "compare",
    "watch",
    "watch-charts",
    "watch-groups",
    "chat",
    "whatif",
)
SIZES = {
    (120, 40): tuple(SCREENS),
    (80, 24): (*SMALL, "dialog-whatif", "watch-help"),
    (160, 50): ("watch",),
}
# By the first word of a screen's name the text that it shows before its keys are pressed.
EARLY = {
    "runs": "grpo-07",
    "compare": "grpo-07",
    "watch": "step 120/400",
    "whatif": "agentrl what if",
}


async def take_shot(pilot: Pilot[Any], name: str, *, marked: bool) -> str:
    app = pilot.app
    assert isinstance(app, AgentApp)
    make, keys, marker = SCREENS[name]
    await app.push_screen(make(app.reader))
    if keys or not marked:
        await until_text(pilot, EARLY.get(name.partition("-")[0], "calc"))
    await app.reader.call(lambda store: None)
    await pilot.pause()
    await pilot.press(*keys)
    await until_text(pilot, marker) if marked or name == "palette" else None
    for _ in range(3):
        await app.reader.call(lambda store: None)
        await pilot.pause(0.02)
    steady(app)
    app.screen.refresh()  # what is under a dialog may have been painted before it was complete
    await pilot.pause(0.02)
    found = shot(app)
    while len(app.screen_stack) > 2:
        await app.pop_screen()
    return found


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_screens_are_as_they_were(size: tuple[int, int], db: Path) -> None:
    async with AgentApp(db, RunsScreen).run_test(size=size) as pilot:
        await until_text(pilot, "grpo-07")
        found = {name: await take_shot(pilot, name, marked=size[0] > 80) for name in SIZES[size]}
    paths = {name: FOLDER / f"{name}-{size[0]}x{size[1]}.txt" for name in found}
    if os.environ.get("AGENTRL_SNAPSHOTS") == "update":
        for name, path in paths.items():
            path.write_text(found[name], "utf-8")
    kept = {name: path.read_text("utf-8") for name, path in paths.items() if path.is_file()}
    assert {name: found[name] for name in found if found[name] != kept.get(name)} == {}
