"""Every screen at 120x40 and 80x24 as text and a digest of its colours, over an invented run whose clock stands.

A change of a screen fails here with the text that is new; where it was meant:

    AGENTRL_SNAPSHOTS=update python -m pytest tests/tui/test_snapshots.py
"""

import asyncio
import hashlib
import os
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen

from agentrl_cli.chat_session.child import call_object
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.screen import ChatScreen
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.token_text import TokenTexts
from agentrl_cli.tui.compare.screen import CompareScreen, VersusScreen
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.runs.screen import EpisodesScreen, RunsScreen
from agentrl_cli.tui.watch.screen import WatchScreen
from agentrl_cli.tui.whatif.screen import WhatIfScreen
from agentrl_cli.types import Episode, Turn
from tests.helpers import tui_demo as demo
from tests.helpers.tui import rendered, steady, text_of, until_text

# --- screens with a fixed clock; the chat and the what-ifs come from a list of events, without a child ---

STOOD = 1.7e9 + 5000
EP = "ep0120003"
Make = Callable[[Reader], Screen[Any]]
Event = dict[str, Any]


class Scripted(ChatClient):
    """A child process with a list of events; `stays`: it stays alive after the last one."""

    def __init__(self, events: Sequence[Event], *, stays: bool) -> None:
        super().__init__([])
        self.given, self.stays = list(events), stays

    async def events(self) -> AsyncIterator[Event]:
        for event in self.given:
            yield event
        if self.stays:
            await asyncio.Event().wait()

    async def nothing(self, *given: Any, **values: Any) -> None:
        """Nothing is started, nothing receives a request, and nothing ends."""

    start = send = kill = stop = nothing


def turn_event(episode: Episode, turn: Turn, decoder: TokenTexts) -> Event:
    tokens = episode.tokens.slice(turn.start, turn.end)
    results = [
        {"text": r.text, "error": r.error, "seconds": r.seconds, "level": r.level}
        for r in turn.results
    ]
    return {
        "ev": "turn", "index": turn.index, "role": turn.role, "text": decoder.text(tokens.ids),
        "content": str(turn.messages[0]["content"]).partition("\n<tool_call>")[0], "ids": tokens.ids.tolist(),
        "origin": tokens.origin.tolist(),
        "logp": [None if value != value else value for value in tokens.logp_policy.tolist()],
        "calls": [call_object(call) for call in turn.calls], "results": results, "stop": turn.stop_reason,
        "seconds": turn.seconds,
    }  # fmt: skip


def chat(reader: Reader) -> Screen[Any]:
    """A conversation that went wrong at the tool, scored and saved."""
    words = demo.Words()
    episode = demo.episode(words, 4, solved=False)
    decoder = TokenTexts(words.json())
    template = "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    ready = {"ev": "ready", "model": "grpo-07@best", "weights": "grpo-07@best", "context": 4096, "pack": "calc-task",
             "tools": ["calculator"], "user": False, "sandbox": "ns", "note": "", "tokenizer": words.json(),
             "template": template + "{%- endfor %}"}  # fmt: skip
    parts = [{"name": "person", "value": 0.0, "weight": 1.0, "detail": "given in chat"}]
    events: list[Event] = [ready, *(turn_event(episode, turn, decoder) for turn in episode.turns)]
    events += [{"ev": "reward", "parts": parts, "total": 0.0}, {"ev": "saved", "episode": "1m7yj29rp6ck8f", "db": ""},
               {"ev": "idle"}]  # fmt: skip
    return ChatScreen(reader, Scripted(events, stays=True))


def whatif(reader: Reader, arguments: Sequence[str], events: Sequence[Event]) -> Screen[Any]:
    screen = WhatIfScreen(reader, EP, arguments)
    screen.client = Scripted(events, stays=False)
    return screen


def child(sample: int, reward: float, advantage: float, text: str, *flags: str) -> Event:
    return {"ev": "child", "episode": f"1m7yj29rp6ck8{sample}", "sample": sample, "seed": sample, "reward": reward,
            "outcome": "solved" if reward > 1 else "failed", "advantage": advantage, "turns": 5, "tokens": 78,
            "flags": list(flags), "text": text}  # fmt: skip


def again(call: int, turn: int, expression: str, before: str, after: str) -> Event:
    same = before == after
    return {"call": call, "turn": turn, "name": "calculator", "arguments": {"expr": expression}, "before": before,
            "after": after, "error_before": None, "error_after": None, "same": same, "seconds": 0.002,
            "diverged": "" if same else f"diverged at call {call} (calculator, turn {turn})",
            "diff": [] if same else [f"-{before}", f"+{after}"]}  # fmt: skip


def reroll(reader: Reader) -> Screen[Any]:
    arguments = [
        "--turn",
        "2",
        "--samples",
        "4",
        "--temperature",
        "1.0",
        "--seed",
        "0",
        "--model",
        "grpo-07@last",
    ]
    start = {**child(3, 0.0, -0.77, "", "BADARG"), "ev": "from", "episode": EP}
    events: list[Event] = [
        {"ev": "ready", "model": "grpo-07@last", "weights": "grpo-07@last", "note": ""},
        start,
        child(0, 1.2, 0.87, "The total is 57.9"),
        child(
            1, 0.0, -0.87, "The tool failed. I will guess the answer: 52.9", "BADARG", "AFTERERR"
        ),
        child(2, 1.2, 0.87, "The total is 57.9"),
        child(3, 0.0, -0.87, "The answer is 54", "NOTOOL"),
        {"ev": "done"},
    ]
    return whatif(reader, arguments, events)


def rerun(reader: Reader) -> Screen[Any]:
    def part(name: str, value: float, detail: str = "") -> Event:
        return {"name": name, "value": value, "weight": 1.0, "primary": name == "correct", "detail": detail,
                "fakeable": False}  # fmt: skip

    rewards = {"ev": "rewards", "before": [part("correct", 1.0), part("format", 1.0)], "same": False, "episode": "",
               "after": [part("correct", 0.0, "expected 57.9"), part("format", 1.0)], "total_before": 1.2,
               "total_after": 0.2, "advantage_before": 1.29, "advantage_after": -0.35}  # fmt: skip
    events: list[Event] = [
        {"ev": "ready", "model": "", "weights": "", "note": ""},
        {"ev": "rerun", **again(1, 2, "12 * 4.5", "54.0", "54.0")},
        {"ev": "rerun", **again(2, 4, "54.0 + 3.9", "57.9", "57.90000000000001")},
        rewards,
        {"ev": "done"},
    ]
    return whatif(reader, ["--rerun"], events)


def replay(reader: Reader) -> Screen[Any]:
    return ReplayScreen(reader, EP)


def versus(reader: Reader) -> Screen[Any]:
    with Store.open(reader.path, readonly=True) as store:
        return VersusScreen(reader, store.episodes.siblings(EP), (0, 2))


# name → (screen, keys, text that marks it as painted).
MORE: dict[str, tuple[Make, tuple[str, ...], str]] = {
    "chat": (chat, (), "saved: agentrl replay"),
    "chat-mask": (chat, ("f3",), "saved: agentrl replay"),
    "chat-ids": (chat, ("f5",), "CONTEXT"),
    "chat-help": (chat, ("f1",), "/as-model TEXT"),
    "whatif": (reroll, (), "2 of 4 solved"),
    "whatif-rerun": (rerun, (), "diverged at call 2"),
    "dialog-whatif": (replay, ("R",), "re-roll from turn 2"),
    "dialog-export": (replay, ("e",), "one HTML page"),
    "dialog-copy": (replay, ("y",), "token ids"),
    "dialog-filter": (replay, ("f",), "enter: go"),
}


# --- the snapshots ---

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
    """The invented run and a small earlier one, finished, every time of day the same."""
    folder = tmp_path_factory.mktemp("shots") / "project" / "runs"
    folder.mkdir(parents=True)
    path = folder / "agentrl.db"
    demo.fill(path)
    with Store.open(path) as store:
        store.runs.add(
            RunRow(
                "run6",
                "grpo-06",
                model="tiny",
                pack="calc-task",
                status="finished",
                total_steps=400,
            )
        )
        for step in range(1, 41):
            store.runs.add_step("run6", step, {"reward": 0.3})
        store.runs.update("run7", status="finished")
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("UPDATE steps SET at=? + 40 * step", (1.7e9,))
        conn.execute("UPDATE episodes SET started=? WHERE outcome IS NULL", (STOOD - 3,))
        conn.execute("UPDATE live SET started=?, updated=?", (STOOD - 3, STOOD))
        conn.execute("UPDATE runs SET started=?, ended=?", (1.7e9, STOOD))
        conn.execute("UPDATE runs SET started=started - 9000, ended=ended - 9000 WHERE id='run6'")
        for table in ("logs", "alerts", "evals", "checkpoints"):
            conn.execute(f"UPDATE {table} SET at=?", (STOOD,))
    conn.close()
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


SIZES = {
    (120, 40): tuple(SCREENS),
    (80, 24): (
        *(
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
        ),
        "dialog-whatif",
        "watch-help",
    ),
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
