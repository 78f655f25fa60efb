"""The images of an episode, one at a time and as large as the screen allows; a key opens the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.events import Key
from textual.widgets import Static

from agentrl_cli.store.images import image_file
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.dialogs import Dialog
from agentrl_cli.tui.common.episode_view import EpisodeView
from agentrl_cli.tui.common.picture import open_file, picture_lines

Shown = tuple[str, bytes]
"""What an image is called, and its bytes."""
KEYS = "→ ← other images   o open the file   any other key closes this"


def images_near(view: EpisodeView, token: int) -> tuple[list[Shown], int]:
    """Return all images of an episode with their turns, and the number of the first one of the cursor's turn or before
    it.
    """
    found: list[Shown] = []
    here, start = view.block_of(token), 0
    for block in view.blocks:
        images = block.turn.shown if block.turn is not None else ()
        if images and block.number <= here:
            start = len(found)
        found += [
            (f"turn {block.number}, {block.role}, image {n}", data)
            for n, data in enumerate(images, 1)
        ]
    return found, start


def show_images(screen: AgentScreen, view: EpisodeView | None, token: int) -> None:
    """Opens a window with the images of an episode, from the cursor's turn on."""
    found, start = images_near(view, token) if view is not None else ([], 0)
    if view is None or not found:
        screen.notify("This episode has no images.", timeout=2)
    else:
        screen.app.push_screen(Pictures(found, start, view.images))


class Pictures(Dialog[None]):
    """Shows images in half blocks."""

    def __init__(self, images: Sequence[Shown], number: int, folder: Path | None) -> None:
        super().__init__()
        self.images, self.number, self.folder, self.said = images, number, folder, ""

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(id="picture")

    def on_mount(self) -> None:
        self._show()

    def on_key(self, event: Key) -> None:
        event.stop()
        if event.key in ("right", "left", "l", "h"):
            self.number = (self.number + (1 if event.key in ("right", "l") else -1)) % len(
                self.images
            )
            self.said = ""
        elif event.key == "o":
            path = (
                image_file(self.folder, self.images[self.number][1])
                if self.folder is not None
                else None
            )
            self.said = (
                "the store has no folder for files"
                if path is None
                else open_file(path) or f"opened {path}"
            )
        else:
            self.dismiss()
            return
        self._show()

    def _show(self) -> None:
        name, data = self.images[self.number]
        title = Text(
            f"{name}   {self.number + 1} of {len(self.images)}   {len(data):,} bytes",
            "bold #8fbfff",
        )
        size = max(self.app.size.width - 12, 8), max(self.app.size.height - 8, 4)
        notes = [Text(self.said, "#8a8a8a")] if self.said else []
        lines = [title, Text(KEYS, "#8a8a8a"), *picture_lines(data, *size), *notes]
        self.query_one("#picture", Static).update(Text("\n").join(lines))
