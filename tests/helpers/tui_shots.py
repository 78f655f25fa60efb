"""Screens over an invented run with a fixed clock, for the snapshots.

The chat and the what-ifs come from a list of events instead of a child process.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from textual.screen import Screen

from agentrl_cli.chat_session.child import call_object
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.screen import ChatScreen
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.token_text import TokenTexts
from agentrl_cli.tui.compare.screen import VersusScreen
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.whatif.screen import WhatIfScreen
from agentrl_cli.types import Episode, Turn
from tests.helpers import tui_demo as demo

STOOD = 1.7e9 + 5000
EP = "ep0120003"
Make = Callable[[Reader], Screen[Any]]
Event = dict[str, Any]


def fill_still(path: Path) -> None:
    """The invented run and a small earlier one, finished, every time of day the same."""
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


class Scripted(ChatClient):
    """A child process with a list of events; `stays`: it stays alive after the last one."""

    def __init__(self, events: Sequence[Event], *, stays: bool) -> None:
        super().__init__([])
        self.given, self.stays = list(events), stays

    async def start(self) -> None:
        """Nothing to start."""

    async def send(self, op: str, **values: Any) -> None:
        """Nothing receives it."""

    async def events(self) -> AsyncIterator[Event]:
        for event in self.given:
            yield event
        if self.stays:
            await asyncio.Event().wait()

    async def kill(self) -> None:
        """Nothing to end."""

    stop = kill


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
