"""The candidates of a prompt optimisation: their tree, scores over episodes, and the diff of two."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.events import Resize
from textual.widgets import Static

from agentrl_cli.plugins.prompts.candidates import (
    Candidates,
    curve_lines,
    diff_lines,
    head_line,
    load_candidates,
    tree_lines,
)
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.episode_list import Browse
from agentrl_cli.tui.common.keys import CLOSING, moving, with_ids
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import join

KEYS = (
    "j/k candidate  enter replay  e episodes  space mark for the diff  J/K scroll  ? keys  q back"
)
HELP = """\
j k          down, up in the tree         enter   an episode of the candidate, n N the others
space        mark: the diff is with it    e       the list of its episodes
J K          scroll the diff              q       back

Without a mark the diff is with the parent. ★ has the best validation score.
Columns: origin, validation, test, episodes, candidate.
"""
POLL = 2.0


class PromptsScreen(AgentScreen):
    """`run`: a search as `store.runs.get` takes it."""

    BINDINGS: ClassVar[list[BindingType]] = with_ids(
        "prompts",
        [
            *moving("move"),
            Binding("J,pagedown", "scroll(5)", "the diff down", show=False),
            Binding("K,pageup", "scroll(-5)", "the diff up", show=False),
            Binding("space", "mark", "mark"),
            Binding("enter", "open", "open"),
            Binding("e", "episodes", "episodes"),
            *CLOSING,
        ],
    )
    HELP_TITLE, HELP_TEXT = "prompts", HELP

    def __init__(self, reader: Reader, run: str) -> None:
        super().__init__(reader)
        self.run_name = run
        self.found: Candidates | None = None
        self.chosen = self.marked = ""

    def compose(self) -> ComposeResult:
        yield Static(Text("agentrl optimize   reading …", "bold"), id="head")
        with Container(id="both"):
            yield Lines(id="tree")
            with Vertical(id="right"):
                yield Static(id="curve")
                yield Lines(id="diff")
        yield Static(Text(KEYS, no_wrap=True), id="keys")

    def on_mount(self) -> None:
        self.poll()
        self.set_interval(POLL, self.poll)

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.width < 100, "-small")

    async def read_store(self) -> None:
        """Reads the candidates."""
        self.found = await self.reader.call(load_candidates, self.run_name)

    def paint(self) -> None:
        """Everything; the chosen candidate is kept by its id."""
        if self.problem:
            self.put_head(self.problem)
        if self.found is None:
            return
        found, ids = self.found, [row.id for row, _ in self.found.rows]
        if not self.problem:
            self.put_head(f"agentrl optimize   {head_line(found)}")
        tree, diff, curve = (
            self.query_one("#tree", Lines),
            self.query_one("#diff", Lines),
            self.query_one("#curve"),
        )
        tree.show(tree_lines(found, self.marked, tree.size.width) or [Text("no candidate yet")])
        small = self.has_class("-small")
        self.query_one("#curve", Static).update(
            join(curve_lines(found, curve.size.width, 3 if small else 8))
        )
        if not ids:
            return
        self.chosen = self.chosen if self.chosen in ids else found.best or ids[0]
        tree.mark(ids.index(self.chosen))
        rows = {row.id: row for row, _ in found.rows}
        new = rows[self.chosen]
        other = self.marked if self.marked not in ("", new.id) else new.parent_id
        diff.show(diff_lines(rows.get(other or ""), new, diff.size.width - 1))

    def _choose(self, index: int) -> None:
        if self.found is not None and self.found.rows:
            rows = self.found.rows
            self.chosen = rows[max(0, min(index, len(rows) - 1))][0].id
            self.query_one("#diff", Lines).scroll_home(animate=False)
            self.paint()

    def action_move(self, step: int) -> None:
        if self.found is not None:
            ids = [row.id for row, _ in self.found.rows]
            self._choose(ids.index(self.chosen) + step if self.chosen in ids else 0)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        if self.query_one("#tree", Lines).is_mouse_over:
            self._choose(event.line)

    def action_scroll(self, step: int) -> None:
        self.query_one("#diff", Lines).scroll_relative(y=step, animate=False)

    def action_mark(self) -> None:
        self.marked = "" if self.marked == self.chosen else self.chosen
        self.paint()

    def _browse(self) -> Browse | None:
        run = self.found.run.id if self.found is not None else None
        return Browse(f"tag:prompt:{self.chosen}", "time", run) if self.chosen else None

    @work(exclusive=True, group="open", exit_on_error=False)
    async def action_open(self) -> None:
        browse = self._browse()
        first = await self.reader.call(browse.first) if browse is not None else None
        if first is None:
            self.notify("no episode of this candidate yet", timeout=2)
        else:
            self.open_screen("replay", first, browse)

    def action_episodes(self) -> None:
        browse = self._browse()
        if browse is not None:
            self.open_screen("episodes", browse)
