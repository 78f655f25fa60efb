"""Draws the screens that the documentation shows, of a real training.

    python docs/make_screens.py [PROJECT]    writes docs/screens/*.svg and docs/replay.svg

Without a project with a training it makes one first: `agentrl init code-task`, `agentrl train --steps 60 --set
train.eval=20`, seed 0, about three CPU minutes. The replayed episode is the shortest failed one whose tool call failed
while an attempt beside it was solved.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from textual.screen import Screen

from agentrl_cli.commands import main
from agentrl_cli.store import Store
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.screen import ChatScreen
from agentrl_cli.tui.common.agent_screen import picture
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.runs.screen import RunsScreen
from agentrl_cli.tui.watch.screen import WatchScreen
from agentrl_cli.tui.whatif.screen import WhatIfScreen

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "screens"
NAMES = ("runs", "watch", "replay", "replay-logp", "whatif", "chat", "chat-ids")
MARKS = ("GROUP", "TURN ", "◂", "REWARD", "TOKEN", "DIFF", "WHY IT")
"""Words of replay beside which the README's numbers 1 to 7 stand."""
CLIP = re.compile(r'<text[^>]*? x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
Make = Callable[[Reader], Screen[Any]]


async def draw(
    db: Path, name: str, make: Make, keys: tuple[str, ...], marker: str, then: tuple[str, ...] = ()
) -> str:
    """One screen as SVG, once it shows `marker` after the keys; `then`: further keys, and their own marker last."""
    app = AgentApp(db, make)
    async with app.run_test(size=(120, 40)) as pilot:
        for group, text in ((keys, marker), (then[:-1], "".join(then[-1:]))):
            await app.workers.wait_for_complete() if not name.startswith(("chat", "what")) else None
            await pilot.pause(0.3)
            await pilot.press(*group)
            for _ in range(1200):
                if text in shown(app):
                    break
                await pilot.pause(0.1)
            else:
                raise RuntimeError(f"{name} never showed {text!r}:\n{shown(app)}")
        for widget in app.screen.query("Input, TextArea"):
            widget.cursor_blink = False  # type: ignore[attr-defined]
        await pilot.pause(0.5)
        return re.sub(
            r"terminal-\d+", "terminal", picture(app, f"agentrl {name.partition('-')[0]}")
        )


def shown(app: AgentApp) -> str:
    """The text on the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def annotate(svg: str) -> str:
    """The picture with the README's numbers on it."""
    style = 'font-family="sans-serif" font-size="18" font-weight="bold" text-anchor="middle"'
    found = [(float(x), float(y), text) for x, y, text in CLIP.findall(svg)]
    left, top = map(float, re.findall(r"translate\(([\d.]+), ([\d.]+)\)", svg)[0])
    marks = ""
    for number, word in enumerate(MARKS, 1):
        texts = ((x, y, text.replace("&#160;", " ")) for x, y, text in found)
        x, y = next(
            (min(left + x + 12.2 * len(text.rstrip()) + 20, 1455), top + y)
            for x, y, text in texts
            if word in text
        )
        marks += (
            f'<circle cx="{x:.0f}" cy="{y - 6:.0f}" r="13" fill="#e5484d" stroke="#fff" stroke-width="2"/>'
            f'<text x="{x:.0f}" y="{y + 1:.0f}" {style} fill="#fff">{number}</text>'
        )
    return svg.replace("</svg>", f"{marks}</svg>")


def choose(store: Store) -> str:
    """The episode that replay shows."""
    ids = store.episodes.ids("kind:train fact:trained outcome:failed flag:TOOLFAIL", "tokens")
    for row in store.episodes.rows(ids):
        if any(one.outcome == "solved" for one in store.episodes.siblings(row.id)):
            return row.id
    raise RuntimeError("no failed episode whose call failed has a solved sibling")


def train(project: Path) -> Path:
    """The store of a project with a training, made if the folder is empty."""
    if not project.exists():
        os.chdir(project.parent)
        done = main(["init", "code-task", project.name, "--yes"])
        os.chdir(project)
        done = done or main(["train", "--steps", "60", "--set", "train.eval=20"])
        if done:
            raise SystemExit(done)
    return project / "runs" / "agentrl.db"


def draw_all(project: Path) -> None:
    """Every documented screen."""
    db = train(project)
    os.chdir(project)
    with Store.open(db, readonly=True) as store:
        run, episode = store.runs.training("last"), choose(store)
    model = [
        "--db",
        str(db),
        "--project",
        str(project),
        "--model",
        f"{run.name}@best",
        "--seed",
        "1",
    ]
    whatif = ["--turn", "2", "--samples", "4", "--seed", "0", "--model", f"{run.name}@best"]

    def chat(reader: Reader) -> Screen[Any]:
        return ChatScreen(reader, ChatClient(model))

    model += ["--task", "test-0003"]
    make: dict[str, tuple[Make, tuple[str, ...], str, tuple[str, ...]]] = {
        "runs": (RunsScreen, (), "took", ()),
        "watch": (lambda reader: WatchScreen(reader, run.id), (), "worth a look", ()),
        "replay": (lambda reader: ReplayScreen(reader, episode), (), "WHY IT", ()),
        "replay-logp": (lambda reader: ReplayScreen(reader, episode), ("3",), "LAYER log", ()),
        "whatif": (lambda reader: WhatIfScreen(reader, episode, whatif), (), "of 4 solved", ()),
        "chat": (chat, (), "Answer: ", (*"/reward", "enter", "REWARD")),
        "chat-ids": (chat, (), "Answer: ", ("f5", "CONTEXT")),
    }
    assert tuple(make) == NAMES
    for name, (screen, keys, marker, then) in make.items():
        svg = asyncio.run(draw(db, name, screen, keys, marker, then))
        (FOLDER / f"{name}.svg").write_text(svg, "utf-8")
        print(f"wrote {FOLDER / name}.svg", flush=True)
    (HERE / "replay.svg").write_text(annotate((FOLDER / "replay.svg").read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    given = [Path(one).resolve() for one in sys.argv[1:2]]
    with tempfile.TemporaryDirectory() as scratch:
        draw_all(given[0] if given else Path(scratch) / "code-task")
