"""What-if: the child process's results as they arrive; enter opens a stored episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.binding import Binding, BindingType

from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.common.agent_screen import LinesScreen
from agentrl_cli.tui.common.episode_list import Browse
from agentrl_cli.tui.common.keys import CLOSING, FINDING, moving, with_ids
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import HERE, TITLE, clip, num
from agentrl_cli.tui.whatif.view import MODULE, event_lines

KEYS = "j/k choose  enter open  i all what-ifs of this episode  ? keys  q back"
HELP = """\
j k ↑ ↓      choose an episode that was stored      enter   open it in replay
i            all what-ifs of this episode           q       back; what still runs is stopped
/ .          find text on this page, the next match

Nothing here touches the episode itself: results are stored as its children (parent:ID in a filter).
"""


class WhatIfScreen(LinesScreen):
    """One request; `arguments` as `view.whatif_arguments` returns them."""

    BINDINGS: ClassVar[list[BindingType]] = with_ids(
        "whatif",
        [
            *moving("move", page=10),
            Binding("enter", "open", "open"),
            Binding("i", "list", "what-ifs"),
            *FINDING,
            *CLOSING,
        ],
    )

    KEYS, HELP_TITLE, HELP_TEXT = KEYS, "what if", HELP

    def __init__(self, reader: Reader, episode_id: str, arguments: Sequence[str]) -> None:
        super().__init__(reader)
        self.episode_id = episode_id
        self.arguments = list(arguments)
        self.client = ChatClient(
            ["--db", str(reader.path), "--episode", episode_id, *arguments], MODULE
        )
        self.events: list[dict[str, Any]] = []
        self.cursor = self.line = 0
        """The chosen episode, and its line."""
        self.state = "starting …"

    def on_mount(self) -> None:
        self.paint()
        self.listen()

    async def on_unmount(self) -> None:
        await self.client.kill()

    @work(group="listen", exit_on_error=False)
    async def listen(self) -> None:
        """Takes the child's events until it ends."""
        await self.client.listen(self.take, "fatal")

    def take(self, event: dict[str, Any]) -> None:
        """Shows one event."""
        self.events.append(event)
        done = sum(item["ev"] == "progress" for item in self.events)
        states = {
            "ready": "running …",
            "progress": f"running … {done} done",
            "done": "done",
            "fatal": "failed",
        }
        self.state = states.get(event["ev"], self.state)
        self.paint()

    @property
    def stored(self) -> list[str]:
        """The ids of the stored episodes, in the order they are shown."""
        return [
            str(event["episode"])
            for event in self.events
            if event.get("episode") and event["ev"] != "from"
        ]

    def paint(self) -> None:
        """Paints everything so far."""
        asked = clip(" ".join(self.arguments), 60)
        self.put_head(f"agentrl what if   {self.episode_id}   {asked}   {self.state}")
        chosen = self.stored[self.cursor] if self.cursor < len(self.stored) else ""
        lines: list[Text] = []
        for event in self.events:
            shown = event_lines(event, max(self.size.width - 4, 30))
            if shown and chosen and event.get("episode") == chosen and event["ev"] != "from":
                shown[0].stylize(HERE)
                self.line = len(lines)
            lines += shown
        children = [event for event in self.events if event["ev"] == "child"]
        if children:
            graded = [event["reward"] for event in children if event["reward"] is not None]
            mean = num(sum(graded) / len(graded) if graded else None, ".2f")
            solved = sum(event["outcome"] == "solved" for event in children)
            text = f"{solved} of {len(children)} solved, mean reward {mean}"
            lines.append(Text(text, TITLE))
        self.page.show(lines)

    def action_move(self, step: int) -> None:
        """Chooses another stored episode; scrolls if there is none to choose from."""
        if len(self.stored) < 2:
            self.action_scroll_by(step)
            return
        self.cursor = max(0, min(self.cursor + step, len(self.stored) - 1))
        self.paint()
        self.page.keep_in_sight(self.line, middle=True)

    def action_open(self) -> None:
        if self.cursor < len(self.stored):
            self.open_screen("replay", self.stored[self.cursor])

    def action_list(self) -> None:
        self.open_screen("episodes", Browse(f"parent:{self.episode_id}"))
