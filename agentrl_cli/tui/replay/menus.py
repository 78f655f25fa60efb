"""The menus and windows of replay: what if, edit a turn, chat from here, export, copy, images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Key
from textual.widgets import Input, Static

from agentrl_cli.store.display import image_file
from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.transcript import ChatLine
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.dialogs import Dialog, Field, Form, Prompt
from agentrl_cli.tui.common.episode_list import Browse
from agentrl_cli.tui.common.episode_view import EpisodeView, place_of, text_of_turn, whatif_turn
from agentrl_cli.tui.common.picture import open_file, picture_lines
from agentrl_cli.tui.common.reader import token_texts
from agentrl_cli.tui.common.text import FAINT, TITLE, join
from agentrl_cli.tui.common.token_text import visible
from agentrl_cli.tui.whatif.view import whatif_arguments


class Rewrite(Prompt, inherit_bindings=False):
    """One line of settings and a text of many lines, which wraps and scrolls; gives both.

    Enter goes from either, tab is the way between them, ctrl+j a new line in the text.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "cancel")]
    AUTO_FOCUS = "ChatLine"

    def __init__(self, label: str, settings: str, text: str) -> None:
        super().__init__(label, settings, help=WHATIF, check=whatif_arguments)
        how = Text("its text   (tab: between the two, ctrl+j: new line)", FAINT)
        self.more = Static(how), ChatLine(text, id="text")

    def on_chat_line_completion(self) -> None:
        self.query_one(Input).focus()

    def on_chat_line_submitted(self) -> None:
        self.on_input_submitted()

    def result(self, text: str) -> object:
        return text, self.query_one(ChatLine).text


WHATIF = (
    "model: tiny, a folder, a name, RUN@best, RUN@STEP or scripted.  n: how many.  T: temperature."
)


def ask_whatif(screen: AgentScreen, view: EpisodeView, token: int) -> None:
    """Asks for a what-if from the cursor's turn on; the answer runs in a process of its own."""
    turn, episode = whatif_turn(view, token), view.episode

    def start(text: str, edit: str | None = None) -> None:
        arguments = whatif_arguments(text) + ([] if edit is None else [f"--edit={edit}"])
        screen.open_screen("whatif", episode.id, arguments)

    async def reroll() -> None:
        runs = await screen.reader.call(
            lambda store: [run.name for run in store.runs.all() if run.kind == "train"]
        )
        names = [f"{name}@{place}" for name in runs for place in ("last", "best")]
        fields = [
            Field("turn", str(turn), "from which turn"),
            Field("n", "4", "how many episodes"),
            Field("T", "1.0", "temperature"),
            Field("seed", "0"),
            Field("model", "", "the nearest one; → completes", ["tiny", "scripted", *names]),
        ]
        screen.ask(Form("re-roll", fields, whatif_text, help=WHATIF, check=whatif_arguments), start)

    def edit() -> None:
        rewrite = Rewrite("edit", f"turn={turn} n=1 T=1.0 seed=0", text_of_turn(view, turn or 0))
        screen.ask(rewrite, lambda given: start(*given))

    ways: dict[str, Callable[[], object]] = {
        "run its tool calls again, compare, score again": partial(start, "rerun")
    }
    if turn is not None:
        ways |= {
            f"re-roll from turn {turn}": lambda: screen.run_worker(
                reroll(), exclusive=True, group="form", exit_on_error=False
            ),
            f"edit turn {turn} and go on": edit,
        }
    ways["what-ifs"] = lambda: screen.open_screen("episodes", Browse(f"parent:{episode.id}"))
    screen.choose("what if", ways)


def whatif_text(values: Mapping[str, str]) -> str:
    """Return the fields of a what-if as its line of settings."""
    return " ".join(f"{name}={value}" for name, value in values.items() if value)


def open_chat(screen: AgentScreen, view: EpisodeView, token: int) -> None:
    """Opens a chat that starts with everything before the cursor's turn, with the checkpoint nearest to the episode."""
    turn, episode = whatif_turn(view, token), view.episode
    place = len(episode.turns) if turn is None else turn
    arguments = ["--db", str(screen.reader.path), "--episode", episode.id, "--turn", str(place)]
    screen.open_screen("chat", ChatClient(arguments))


def ask_export(
    screen: AgentScreen, episode: str, view: EpisodeView | None, save_svg: Callable[[], object]
) -> None:
    """Asks in which form to export an episode or its whole group, and writes it."""
    group = [row.id for row in view.siblings] if view is not None else []

    async def write(wanted: list[str], ending: str) -> None:
        from agentrl_cli.reports.export import export_lines, write_lines
        from agentrl_cli.reports.html import export_html

        path = Path(f"{episode}{ending}").absolute()
        if path.suffix == ".jsonl":
            await screen.reader.call(lambda store: write_lines(export_lines(store, wanted), path))
        else:
            await screen.reader.call(
                export_html, wanted, path, token_texts, title=f"agentrl {episode}"
            )
        screen.notify(f"wrote {path}", markup=False)

    def export(wanted: list[str], ending: str) -> None:
        screen.run_worker(
            write(wanted, ending), exclusive=True, group="export", exit_on_error=False
        )

    ways: dict[str, Callable[[], object]] = {
        "JSON lines": partial(export, [episode], ".jsonl"),
        "one HTML page": partial(export, [episode], ".html"),
        "SVG of this screen": save_svg,
    }
    if len(group) > 1:
        ways |= {
            "the whole group as one HTML page": partial(export, group, "-group.html"),
            "the whole group as JSON lines": partial(export, group, "-group.jsonl"),
        }
    screen.choose("export", ways)


def ask_copy(screen: AgentScreen, episode_id: str, view: EpisodeView | None, token: int) -> None:
    """Asks for a text to copy to the clipboard."""
    targets = {"episode id": episode_id}
    if view is not None and view.blocks:
        block = view.blocks[view.block_of(token)]
        ids = view.tokens.ids[block.start : block.end].tolist()
        targets = {
            "token": view.texts[token] if view.texts else "",
            "turn": "".join(view.texts[block.start : block.end]),
            "transcript": "".join(view.texts),
            "episode id": episode_id,
            "link": link(episode_id, view, token),
            "token ids": " ".join(map(str, ids)),
        }

    def copy(name: str) -> None:
        screen.app.copy_to_clipboard(targets[name])
        screen.notify(f"copied {name}", timeout=2, markup=False)

    labels = {name: f"{name:<12} {visible(text)[:60]}" for name, text in targets.items()}
    screen.choose("copy", {label: partial(copy, name) for name, label in labels.items()})


def link(episode_id: str, view: EpisodeView | None, token: int) -> str:
    """Return `agentrl:EPISODE@tTURN.TOKEN`, which `agentrl replay` opens at that place."""
    if view is None or not view.blocks:
        return f"agentrl:{episode_id}"
    turn, offset = place_of(view, token)
    return f"agentrl:{episode_id}@t{turn}.{offset}"


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


class Pictures(Dialog):
    """Shows images, each with its name, in half blocks, one at a time and as large as the screen allows."""

    KEYS = "→ ← other images   o open the file   any other key closes this"
    STEPS: ClassVar[dict[str, int]] = {"right": 1, "l": 1, "left": -1, "h": -1}

    def __init__(
        self, images: Sequence[tuple[str, bytes]], number: int, folder: Path | None
    ) -> None:
        super().__init__()
        self.images, self.number, self.folder = images, number, folder

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(id="picture")

    def on_mount(self) -> None:
        self.show("")

    def on_key(self, event: Key) -> None:
        event.stop()
        if event.key in self.STEPS:
            self.number = (self.number + self.STEPS[event.key]) % len(self.images)
            self.show("")
        elif event.key == "o":
            image = self.images[self.number][1]
            path = image_file(self.folder, image) if self.folder is not None else None
            opened = path and (open_file(path) or f"opened {path}")
            self.show(opened or "the store has no folder for files")
        else:
            self.dismiss()

    def show(self, note: str) -> None:
        """Shows the image, and a note under it."""
        name, data = self.images[self.number]
        title = f"{name}   {self.number + 1} of {len(self.images)}   {len(data):,} bytes"
        size = max(self.app.size.width - 12, 8), max(self.app.size.height - 8, 4)
        lines = [Text(title, TITLE), Text(self.KEYS, FAINT), *picture_lines(data, *size)]
        self.query_one("#picture", Static).update(join([*lines, Text(note, FAINT)]))
