"""The images of an episode, one at a time and as large as the screen allows; a key opens the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.events import Key
from textual.widgets import Static

from agentrl_cli.store.display import image_file
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.dialogs import Dialog
from agentrl_cli.tui.common.episode_view import EpisodeView
from agentrl_cli.tui.common.picture import open_file, picture_lines
from agentrl_cli.tui.common.text import FAINT, TITLE, join

KEYS = "→ ← other images   o open the file   any other key closes this"
STEPS = {"right": 1, "l": 1, "left": -1, "h": -1}


def show_images(screen: AgentScreen, view: EpisodeView | None, token: int) -> None:
    """Opens a window with the images of an episode, from those of the cursor's turn or before it on."""
    found, start = list[tuple[str, bytes]](), 0
    for block in view.blocks if view is not None else ():
        images = block.turn.shown if block.turn is not None else ()
        if images and view is not None and block.number <= view.block_of(token):
            start = len(found)
        title = f"turn {block.number}, {block.role}, image"
        found += [(f"{title} {n}", data) for n, data in enumerate(images, 1)]
    if view is None or not found:
        screen.notify("This episode has no images.", timeout=2)
    else:
        screen.app.push_screen(Pictures(found, start, view.images))


class Pictures(Dialog[None]):
    """Shows images, each with its name, in half blocks."""

    def __init__(
        self, images: Sequence[tuple[str, bytes]], number: int, folder: Path | None
    ) -> None:
        super().__init__()
        self.images, self.number, self.folder = images, number, folder

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(id="picture")

    def on_mount(self) -> None:
        self._show("")

    def on_key(self, event: Key) -> None:
        event.stop()
        if event.key in STEPS:
            self.number = (self.number + STEPS[event.key]) % len(self.images)
            self._show("")
        elif event.key == "o":
            image = self.images[self.number][1]
            path = image_file(self.folder, image) if self.folder is not None else None
            opened = path and (open_file(path) or f"opened {path}")
            self._show(opened or "the store has no folder for files")
        else:
            self.dismiss()

    def _show(self, note: str) -> None:
        name, data = self.images[self.number]
        title = f"{name}   {self.number + 1} of {len(self.images)}   {len(data):,} bytes"
        size = max(self.app.size.width - 12, 8), max(self.app.size.height - 8, 4)
        lines = [Text(title, TITLE), Text(KEYS, FAINT), *picture_lines(data, *size)]
        lines += [Text(note, FAINT)] * bool(note)
        self.query_one("#picture", Static).update(join(lines))
