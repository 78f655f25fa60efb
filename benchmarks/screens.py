"""Latency of the screens: from mounting to the first painted rows, and from a key to its paint.

    python benchmarks/screens.py [--episodes 100000] [--tokens 32000] [--out benchmarks/results/screens.json]

Prints one line per measurement with its target; exits with 1 if a target is missed. Needs no terminal: Textual's pilot
drives the real application over generated stores. For keys it reports the 95th percentile of twenty presses each,
interleaved, and the first page after opening separately; also the CPU time until the paint, which does not depend on
other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from textual import events
from textual.screen import Screen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.store import RunRow, Store  # noqa: E402
from agentrl_cli.tui.app import AgentApp  # noqa: E402
from agentrl_cli.tui.chat.client import ChatClient  # noqa: E402
from agentrl_cli.tui.chat.screen import ChatScreen  # noqa: E402
from agentrl_cli.tui.common.episode_list import SORTS  # noqa: E402
from agentrl_cli.tui.common.reader import Reader  # noqa: E402
from agentrl_cli.tui.replay.screen import ReplayScreen  # noqa: E402
from agentrl_cli.tui.runs.screen import EpisodesScreen, RunsScreen  # noqa: E402
from agentrl_cli.tui.watch.screen import WatchScreen  # noqa: E402
from agentrl_cli.types import TOP_K, Episode, Origin, Outcome, RewardPart, Tokens, Turn  # noqa: E402
from tests.helpers import tui_demo as demo  # noqa: E402
from tests.helpers.tui_demo import Words, signals_of  # noqa: E402

SIZE = (120, 40)
LONG = (
    "pagedown",
    "j",
    "J",
    "down",
    "3",
    "pagedown",
    "K",
    "k",
    "6",
    "up",
    "pageup",
    "1",
    "space",
    "space",
    "G",
    "g",
)
REPLAY = (
    *(
        "pagedown",
        "j",
        "J",
        "l",
        "down",
        "3",
        "n",
        "right_square_bracket",
        "apostrophe",
        "v",
        "2",
        "h",
        "4",
        "5",
    ),
    *(
        "K",
        "N",
        "left_square_bracket",
        "7",
        "8",
        "9",
        "k",
        "up",
        "space",
        "space",
        "P",
        "1",
        "G",
        "g",
    ),
)
SCREENS: dict[str, tuple[Callable[[Reader], Screen[Any]], str, Sequence[str], str]] = {
    "replay": (lambda r: ReplayScreen(r, "ep0120003"), "TURN 2", REPLAY, ""),
    "watch": (
        lambda r: WatchScreen(r, "grpo-07"),
        "worth a look",
        ("down", "up", *"23456789", "tab", "1", "space"),
        "",
    ),
    "watch, charts": (
        lambda r: WatchScreen(r, "grpo-07"),
        "worth a look",
        ("y", "z", "r", "pagedown", "pageup"),
        "2",
    ),
    "runs": (RunsScreen, "grpo-07", ("j", "k", "space", "G", "g"), ""),
    "chat": (
        lambda r: ChatScreen(r, ChatClient(["--model", "scripted", "--db", str(r.path)])),
        "say something",
        ("a", "space", "/", "left", "ctrl+j", "up", "backspace", "f2", "f3", "f4", "f5", "pageup"),
        "",
    ),
}
"""name → (screen, text that marks it as painted, its keys, keys that lead to them)."""


def many_episodes(path: Path, count: int) -> None:
    """A store with `count` episodes, made by multiplying one row in SQL."""
    with Store.open(path) as store:
        store.runs.add(RunRow(id="run1", name="bench"))
        part = RewardPart("correct", 1.0, primary=True)
        store.episodes.finish(
            Episode(
                id="ep0",
                task_id="t/0",
                run_id="run1",
                step=0,
                outcome=Outcome.SOLVED,
                reward_parts=(part,),
            )
        )
    conn = sqlite3.connect(path)
    names = [row[1] for row in conn.execute("PRAGMA table_info(episodes)") if row[1] != "rowid"]
    new = {
        "id": "printf('ep%09d', n)",
        "task_id": "'calc/' || (n % 997)",
        "started": "1.7e9 + n",
        "step": "n / 64",
        "reward": "(n * 7919 % 1000) / 1000.0",
        "sample": "n % 8",
        "key": "NULL",
    }
    picked = ",".join(new.get(name, name) for name in names)
    conn.execute(
        f"WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {count - 1})"
        f" INSERT INTO episodes ({','.join(names)}) SELECT {picked} FROM episodes, c WHERE id = 'ep0'"
    )
    conn.commit()
    conn.close()


def long_episode(path: Path, n: int) -> None:
    """A store with one trained episode of `n` tokens in 40 turns."""
    words = Words()
    text = "the total price of 12 boxes is 57.9 and def f(x):\n    return x + 1 so print the answer"
    ids = np.resize(np.asarray(words.encode(text), np.int32), n)
    edges = np.linspace(0, n, 41).astype(int)
    model = np.zeros(n, bool)
    turns = []
    for index in range(40):
        role = "assistant" if index % 2 else "tool" if index else "user"
        start, end = int(edges[index]), int(edges[index + 1])
        model[start:end] = role == "assistant"
        turns.append(Turn(index, role, ({"role": role, "content": ""},), start, end))
    rng = np.random.default_rng(0)
    logp = np.where(model, np.log(rng.uniform(0.05, 1, n)), np.nan).astype(np.float32)
    tops = rng.integers(0, 200, (n, TOP_K)).astype(np.int32)
    top_logps = np.where(model[:, None], np.log(rng.uniform(0.01, 1, (n, TOP_K))), np.nan).astype(
        np.float32
    )
    origin = np.where(model, int(Origin.MODEL), int(Origin.TOOL)).astype(np.int8)
    tokens = Tokens(ids, origin, logp, logp, -logp, tops, top_logps)
    part = RewardPart("correct", 1.0, primary=True)
    ep = Episode(
        id="long",
        task_id="t/0",
        run_id="run1",
        step=1,
        turns=tuple(turns),
        tokens=tokens,
        reward_parts=(part,),
        outcome=Outcome.SOLVED,
        fact="trained",
        advantage=0.7,
    )
    with Store.open(path) as store:
        store.tokenizers.add("words", words.json(), "", {})
        store.runs.add(RunRow(id="run1", name="bench", tokenizer="words"))
        store.episodes.finish(ep, tokenizer="words")
        store.signals.add(ep.id, signals_of(ep))


class TimedApp(AgentApp):
    """Records when each paint was complete, including the terminal's text."""

    steady = True
    painted = 0.0
    first = 0.0
    first_cpu = 0.0
    marker = ""
    marker_at = 0.0

    def _display(self, screen: Screen[Any], renderable: Any) -> None:
        super()._display(screen, renderable)
        if renderable is not None and hasattr(renderable, "render_segments"):
            text = renderable.render_segments(self.console)
            self.painted = time.perf_counter()
            self.first = self.first or self.painted
            self.first_cpu = self.first_cpu or time.thread_time()
            if not self.marker_at and self.marker and self.marker in text:
                self.marker_at = self.painted


@dataclass
class Presses:
    """One key, pressed repeatedly: seconds to the first paint, to the last one, CPU seconds to the first."""

    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @staticmethod
    def p95(values: list[float]) -> float:
        """The second largest of twenty."""
        return sorted(values)[max(round(len(values) * 0.95) - 1, 0)]


async def measure(
    db: Path,
    first: Callable[[Reader], Screen[Any]],
    marker: str,
    keys: Sequence[str],
    then: str = "",
) -> tuple[float, dict[str, Presses]]:
    """Seconds from mounting to the first painted row with `marker`, and each key's times in twenty rounds.

    The first of `keys` is pressed once before, as `KEY, the first one`; `then` are keys that lead to them.
    """
    app = TimedApp(db, first)
    app.marker = marker
    start = time.perf_counter()
    found: dict[str, Presses] = {}
    async with app.run_test(size=SIZE) as pilot:
        while not app.marker_at:
            await asyncio.sleep(0.001)
        opened = app.marker_at - start
        await pilot.pause(0.3)
        for key in then:
            await pilot.press(key)
            await pilot.pause(0.5)
        rounds = [
            [(keys[0], f"{keys[0]}, the first one")],
            *([(key, key) for key in keys] for _ in range(20)),
        ]
        for key, name in (pair for pairs in rounds for pair in pairs):
            took, last, cpu = await key_to_paint(app, key)
            if took:  # else nothing changed: it was at an end
                presses = found.setdefault(name, Presses())
                for values, value in (
                    (presses.first, took),
                    (presses.last, last),
                    (presses.cpu, cpu),
                ):
                    values.append(value)
    return opened, found


async def relisted(db: Path) -> dict[str, float]:
    """Seconds from a key in the list of episodes until the sorted or filtered list is painted."""
    out: dict[str, float] = {}
    app = TimedApp(db, EpisodesScreen)

    async def shown(key: str, marker: str) -> float:
        app.marker, app.marker_at = marker, 0.0
        begin = time.perf_counter()
        assert app._driver is not None
        app._driver.send_message(events.Key(key, key if len(key) == 1 else None))
        while not app.marker_at:
            await asyncio.sleep(0.001)
        return app.marker_at - begin

    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(1.0)
        screen: Any = app.screen
        for _ in range(len(SORTS)):
            order = SORTS[(SORTS.index(screen.browse.sort) + 1) % len(SORTS)]
            out[f"sort {order}"] = await shown("o", f"sort {order}")
        for text in (
            "reward:<0.5",
            "reward:<0.5 step:100..120",
            "task:calc/12* -outcome:failed",
            "text:12",
        ):
            screen.browse.filter = ""
            await pilot.press("f", *text)
            out[f"filter {text}"] = await shown("enter", f"filter {text}")
            await pilot.pause(0.2)
    return out


async def key_to_paint(app: TimedApp, key: str) -> tuple[float, float, float]:
    """Seconds from a key's arrival to the first paint after it, to the last one (side panes come a frame later), and
    CPU seconds to the first; zeros if nothing is painted."""
    assert app._driver is not None
    app.first, app.first_cpu, at, cpu = 0.0, 0.0, time.perf_counter(), time.thread_time()
    app._driver.send_message(events.Key(key, key if len(key) == 1 else None))
    while True:
        await asyncio.sleep(0.002)
        if time.perf_counter() - max(app.painted, at) > 0.08:
            return (
                max(app.first - at, 0.0),
                max(app.painted - at, 0.0),
                max(app.first_cpu - cpu, 0.0),
            )


def cold_start(db: Path) -> float:
    """Seconds of `agentrl replay last --plain`-less start-up: imports, store, first frame, then quit."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from agentrl_cli.tui.app import AgentApp\n"
        "from agentrl_cli.tui.replay.screen import ReplayScreen\n"
        "import asyncio\n"
        "async def main():\n"
        "    app = AgentApp(Path(sys.argv[1]), lambda reader: ReplayScreen(reader, 'long'))\n"
        "    async with app.run_test(size=(120, 40)) as pilot:\n"
        "        while app.screen.query_one('#tokens').view is None: await pilot.pause(0.005)\n"
        "        await pilot.pause()\n"
        "asyncio.run(main())\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, str(db)], check=True)
    return time.perf_counter() - start


class Report:
    """Prints the measurements, and keeps them for `--out`."""

    def __init__(self) -> None:
        self.missed = 0
        self.rows: list[dict[str, Any]] = []

    def line(self, name: str, seconds: float, target: float, cpu: float | None = None) -> None:
        """One measurement."""
        self.missed += seconds > target
        row = {"what": name, "ms": round(seconds * 1000, 1), "target_ms": round(target * 1000)}
        self.rows.append(row | ({} if cpu is None else {"cpu_ms": round(cpu * 1000, 1)}))
        verdict = "ok" if seconds <= target else "MISSED"
        more = "" if cpu is None else f"   CPU {cpu * 1000:6.1f} ms"
        print(
            f"{name:<52} {seconds * 1000:8.1f} ms   target {target * 1000:6.0f} ms   {verdict:<6}{more}",
            flush=True,
        )

    def keys(self, screen: str, found: dict[str, Presses]) -> None:
        """All keys of a screen; for those with late side panes, also the time until all have settled."""
        for key, took in found.items():
            first, last = Presses.p95(took.first), Presses.p95(took.last)
            self.line(f"{screen}: {key} to paint, p95", first, 0.05, Presses.p95(took.cpu))
            if last > 1.5 * first:
                self.line(f"{screen}: {key}, all panes settled, p95", last, 0.1)


def main() -> int:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    given = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        big, long, small = (Path(folder) / name for name in ("big.db", "long.db", "small.db"))
        many_episodes(big, given.episodes)
        long_episode(long, given.tokens)
        demo.fill(small)
        opened, found = asyncio.run(
            measure(big, EpisodesScreen, "ep0000", ("pagedown", "j", "k", "pageup", "G", "g"))
        )
        report.line(f"list of {given.episodes:,} episodes: open", opened, 0.5)
        report.keys("list", found)
        for what, seconds in asyncio.run(relisted(big)).items():
            report.line(f"list of {given.episodes:,} episodes: {what}", seconds, 0.3)
        opened, found = asyncio.run(
            measure(long, lambda r: ReplayScreen(r, "long"), "TURN 1/", LONG)
        )
        report.line(f"episode of {given.tokens:,} tokens: open", opened, 0.3)
        report.keys("long episode", found)
        for name, (make, marker, keys, then) in SCREENS.items():
            _, found = asyncio.run(measure(small, make, marker, keys, then))
            report.keys(name, found)
        report.line("cold start of replay, imports included", cold_start(long), 1.5)
    if given.out:
        result = {"episodes": given.episodes, "tokens": given.tokens, "rows": report.rows}
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
