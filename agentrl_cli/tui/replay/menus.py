"""The menus and windows of replay: what if, edit a turn, chat from here, export, copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.text import Text
from textual.widget import Widget
from textual.widgets import Input, Static

from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.transcript import ChatLine
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.dialogs import Choose, Field, Form, Prompt
from agentrl_cli.tui.common.episode_list import Browse
from agentrl_cli.tui.common.episode_view import EpisodeView, place_of, text_of_turn, whatif_turn
from agentrl_cli.tui.common.load_episode import token_texts
from agentrl_cli.tui.common.text import FAINT
from agentrl_cli.tui.common.token_text import visible
from agentrl_cli.tui.whatif.view import whatif_arguments


class Rewrite(Prompt):
    """One line of settings and a text of many lines, which wraps and scrolls; gives both.

    Enter goes from either, tab is the way between them, ctrl+j a new line in the text.
    """

    AUTO_FOCUS = "ChatLine"
    CHECKS_EMPTY = True

    def __init__(
        self, label: str, settings: str, text: str, help: str, check: Callable[[str], object]
    ) -> None:
        super().__init__(label, settings, help=help, check=check)
        self.edited = text

    def more(self) -> Sequence[Widget]:
        how = Text("its text   (tab: between the two, ctrl+j: new line)", FAINT)
        return Static(how), ChatLine(self.edited, id="text")

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
    choices = ["run its tool calls again, compare, score again"]
    if turn is not None:
        choices += [f"re-roll from turn {turn}", f"edit turn {turn} and go on", "what-ifs"]
    model = f"{view.run}@last" if episode.kind == "train" else ""

    def start(text: str, edit: str | None = None) -> None:
        arguments = whatif_arguments(text) + ([] if edit is None else ["--edit", edit])
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
            Field("model", model, "the project's; → completes", ["tiny", "scripted", *names]),
        ]
        form = Form("re-roll", fields, whatif_text, help=WHATIF, check=whatif_arguments)
        screen.ask(form, lambda text: start(text) if text else None)

    def use(choice: int) -> None:
        if choice == 0:
            start("rerun")
        elif choice == 1:
            screen.run_worker(reroll(), exclusive=True, group="form", exit_on_error=False)
        elif choice == 2:
            settings = f"turn={turn} n=1 T=1.0 seed=0" + f" model={model}" * bool(model)
            rewrite = Rewrite(
                "edit", settings, text_of_turn(view, turn or 0), WHATIF, whatif_arguments
            )
            screen.ask(rewrite, lambda given: start(*given))
        else:
            screen.open_screen("episodes", Browse(f"parent:{episode.id}"))

    screen.ask(Choose("what if", choices), use)


def whatif_text(values: Mapping[str, str]) -> str:
    """Return the fields of a what-if as its line of settings."""
    return " ".join(f"{name}={value}" for name, value in values.items() if value)


def open_chat(screen: AgentScreen, view: EpisodeView, token: int) -> None:
    """Opens a chat that starts with everything before the cursor's turn."""
    turn, episode = whatif_turn(view, token), view.episode
    place = len(episode.turns) if turn is None else turn
    arguments = ["--db", str(screen.reader.path), "--episode", episode.id, "--turn", str(place)]
    if episode.kind == "train":
        arguments += ["--model", f"{view.run}@last"]
    screen.open_screen("chat", ChatClient(arguments))


def ask_export(
    screen: AgentScreen, ids: list[str], view: EpisodeView | None, save_svg: Callable[[], object]
) -> None:
    """Asks in which form to export an episode (`ids`) or its whole group, and writes it."""
    group = [row.id for row in view.siblings] if view is not None else []
    choices = ["JSON lines", "one HTML page", "SVG of this screen"]
    choices += (
        ["the whole group as one HTML page", "the whole group as JSON lines"]
        if len(group) > 1
        else []
    )

    async def write(wanted: list[str], path: Path) -> None:
        from agentrl_cli.reports.html import export_html

        if path.suffix == ".jsonl":
            await screen.reader.export(wanted, path)
        else:
            await screen.reader.call(
                export_html, wanted, path, token_texts, title=f"agentrl {ids[0]}"
            )
        screen.notify(f"wrote {path}", markup=False)

    def use(choice: int) -> None:
        if choice == 2:
            save_svg()
        else:
            whole, lines = choice > 2, choice in (0, 4)
            path = Path(f"{ids[0]}{'-group' * whole}.{'jsonl' if lines else 'html'}").absolute()
            work = write(group if whole else ids, path)
            screen.run_worker(work, exclusive=True, group="export", exit_on_error=False)

    screen.ask(Choose("export", choices), use)


def ask_copy(screen: AgentScreen, episode_id: str, view: EpisodeView | None, token: int) -> None:
    """Asks for a text to copy to the clipboard."""
    targets = copy_targets(episode_id, view, token)

    def use(choice: int) -> None:
        screen.app.copy_to_clipboard(targets[choice][1])
        screen.notify(f"copied {targets[choice][0]}", timeout=2, markup=False)

    screen.ask(Choose("copy", [f"{name:<12} {visible(text)[:60]}" for name, text in targets]), use)


def copy_targets(episode_id: str, view: EpisodeView | None, token: int) -> list[tuple[str, str]]:
    """Return (name, text) of everything that can be copied."""
    if view is None or not view.blocks:
        return [("episode id", episode_id)]
    block = view.blocks[view.block_of(token)]
    return [
        ("token", view.texts[token] if view.texts else ""),
        ("turn", "".join(view.texts[block.start : block.end])),
        ("transcript", "".join(view.texts)),
        ("episode id", episode_id),
        ("link", link(episode_id, view, token)),
        ("token ids", " ".join(str(i) for i in view.tokens.ids[block.start : block.end].tolist())),
    ]


def link(episode_id: str, view: EpisodeView | None, token: int) -> str:
    """Return `agentrl:EPISODE@tTURN.TOKEN`, which `agentrl replay` opens at that place."""
    if view is None or not view.blocks:
        return f"agentrl:{episode_id}"
    turn, offset = place_of(view, token)
    return f"agentrl:{episode_id}@t{turn}.{offset}"
