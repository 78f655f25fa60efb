"""How long the screens take from mounting to the first painted rows, and from a key to its paint.

    python benchmarks/screens.py [--episodes 100000] [--tokens 32000] [--out benchmarks/results/screens.json]

Prints one line per measurement with its target; exits 1 where a target is missed. No terminal needed: Textual's pilot
drives the real application over a store made on the spot.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from textual import events
from textual.screen import Screen

from agentrl_cli.store import RunRow, Store
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.demo import Words, signals_of
from agentrl_cli.tui.episode_table import SORTS
from agentrl_cli.tui.episodes import EpisodesScreen
from agentrl_cli.tui.reader import Reader
from agentrl_cli.tui.replay import ReplayScreen
from agentrl_cli.types import TOP_K, Episode, Origin, Outcome, RewardPart, Tokens, Turn

SIZE = (120, 40)


def many_episodes(path: Path, count: int) -> None:
    """A store with `count` episodes, made by multiplying one row in SQL."""
    with Store.open(path) as store:
        store.add_run(RunRow(id="run1", name="bench"))
        part = RewardPart("correct", 1.0, primary=True)
        store.finish_episode(
            Episode(id="ep0", task_id="t/0", run_id="run1", step=0, outcome=Outcome.SOLVED, reward_parts=(part,))
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
    top_logps = np.where(model[:, None], np.log(rng.uniform(0.01, 1, (n, TOP_K))), np.nan).astype(np.float32)
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
        store.put_tokenizer("words", words.json(), "", {})
        store.add_run(RunRow(id="run1", name="bench", tokenizer="words"))
        store.finish_episode(ep, tokenizer="words")
        store.add_signals(ep.id, signals_of(ep))


class TimedApp(AgentApp):
    """Notes when each paint was complete, the text for the terminal included."""

    painted = 0.0
    first = 0.0
    marker = ""
    marker_at = 0.0

    def _display(self, screen: Screen[Any], renderable: Any) -> None:
        super()._display(screen, renderable)
        if renderable is not None and hasattr(renderable, "render_segments"):
            text = renderable.render_segments(self.console)
            self.painted = time.perf_counter()
            self.first = self.first or self.painted
            if not self.marker_at and self.marker and self.marker in text:
                self.marker_at = self.painted


async def measure(db: Path, first: Callable[[Reader], Screen[Any]], marker: str, keys: list[str]) -> dict[str, float]:
    """Seconds from mounting to the first painted row that holds `marker`; per key the 95th percentile to its paint."""
    out: dict[str, float] = {}
    app = TimedApp(db, first)
    app.marker = marker
    start = time.perf_counter()
    async with app.run_test(size=SIZE) as pilot:
        while not app.marker_at:
            await asyncio.sleep(0.001)
        out["open"] = app.marker_at - start
        await pilot.pause(0.3)
        for key in keys:
            times = [await key_to_paint(app, key) for _ in range(20)]
            out[f"key {key}"] = sorted(first for first, _ in times)[18]
            out[f"key {key}, all panes settled"] = sorted(last for _, last in times)[18]
    return out


async def relisted(db: Path) -> dict[str, float]:
    """Seconds from a key in the list of episodes until the list in another order, or a filtered one, is painted."""
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
        for text in ("reward:<0.5", "reward:<0.5 step:100..120", "task:calc/12* -outcome:failed", "text:12"):
            screen.browse.filter = ""
            await pilot.press("f", *text)
            out[f"filter {text}"] = await shown("enter", f"filter {text}")
            await pilot.pause(0.2)
    return out


async def key_to_paint(app: TimedApp, key: str) -> tuple[float, float]:
    """Seconds from a key's arrival to the first paint after it, and to the last one (side panes come a frame later)."""
    assert app._driver is not None
    app.first, at = 0.0, time.perf_counter()
    app._driver.send_message(events.Key(key, key if len(key) == 1 else None))
    while True:
        await asyncio.sleep(0.002)
        if time.perf_counter() - max(app.painted, at) > 0.08:
            return max(app.first - at, 0.0), max(app.painted - at, 0.0)


def cold_start(db: Path) -> float:
    """Seconds of `agentrl replay last --plain`-less start-up: imports, store, first frame, then quit."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from agentrl_cli.tui.app import AgentApp\n"
        "from agentrl_cli.tui.replay import ReplayScreen\n"
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


def main() -> int:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    given = parser.parse_args()
    missed, rows = 0, []

    def report(name: str, seconds: float, target: float) -> None:
        nonlocal missed
        missed += seconds > target
        rows.append({"what": name, "ms": round(seconds * 1000, 1), "target_ms": round(target * 1000)})
        print(
            f"{name:<44} {seconds * 1000:8.1f} ms   target {target * 1000:6.0f} ms   "
            f"{'ok' if seconds <= target else 'MISSED'}",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        big, long = Path(folder) / "big.db", Path(folder) / "long.db"
        many_episodes(big, given.episodes)
        long_episode(long, given.tokens)
        found = asyncio.run(measure(big, EpisodesScreen, "ep0000", ["j", "pagedown"]))
        report(f"list of {given.episodes:,} episodes: open", found.pop("open"), 0.5)
        for key, seconds in found.items():
            report(f"list: {key} to paint, p95", seconds, 0.1 if "settled" in key else 0.05)
        for what, seconds in asyncio.run(relisted(big)).items():
            report(f"list of {given.episodes:,} episodes: {what}", seconds, 0.3)
        found = asyncio.run(measure(long, lambda r: ReplayScreen(r, "long"), "TURN 1/", ["pagedown", "j", "J"]))
        report(f"episode of {given.tokens:,} tokens: open", found.pop("open"), 0.3)
        for key, seconds in found.items():
            report(f"episode: {key} to paint, p95", seconds, 0.1 if "settled" in key else 0.05)
        report("cold start of replay, imports included", cold_start(long), 1.5)
    if given.out:
        result = {"episodes": given.episodes, "tokens": given.tokens, "rows": rows}
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
