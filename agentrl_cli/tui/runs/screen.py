"""The screen to start from: the runs of a project, and the list of all stored episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events, work
from textual.actions import SkipAction
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError, pluralise
from agentrl_cli.registry.plugins import offers
from agentrl_cli.reports.compare import series
from agentrl_cli.store import RunRow
from agentrl_cli.store.maintenance import delete_run, run_folder
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.dialogs import Help, Prompt
from agentrl_cli.tui.common.episode_list import Browse, EpisodeList
from agentrl_cli.tui.common.keys import CLOSING, moving, with_ids
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import ALARM, BAD, FAINT, HERE, join, quote, wrap
from agentrl_cli.tui.runs.data import (
    RunSummary,
    checkpoint_lines,
    detail_lines,
    head_line,
    load_runs,
    run_line,
)

KEYS = (
    "enter open  w watch  e episodes  c checkpoints  space mark  C compare  / name  D delete"
    "  r again  ? keys  q quit"
)
KEYS_SMALL = "enter open  w watch  e episodes  c ckpts  space C compare  D delete  ? keys"
HELP = """\
enter        a training: watch it; a prompt search: its candidates; anything else: its episodes
w            watch             e    episodes         E   episodes of all runs
c            checkpoints       m    another name
space        mark              C    compare the marked run with this one (metrics, evaluations, flipped tasks)
/            only runs whose name, model or pack holds this text
D            delete, with its episodes, checkpoints and logs; asks first
r            read again        q    quit        W    words, explained
"""
EMPTY = """\
No runs yet. In another terminal, or after q:

    agentrl rollout -n 16      sample episodes with the configured model
    agentrl train --watch      train, with the dashboard
    agentrl chat               talk to the model with its tools
"""
POLL = 2.0


BINDINGS: list[BindingType] = with_ids(
    "runs",
    [
        *moving("move", page=10, end=100_000),
        Binding("enter", "open", "open"),
        Binding("w", "watch", "watch"),
        Binding("e", "episodes", "episodes"),
        Binding("E", "all_episodes", "episodes of all runs"),
        Binding("c", "checkpoints", "checkpoints"),
        Binding("m", "rename", "another name"),
        Binding("space", "mark", "mark"),
        Binding("C", "compare", "compare"),
        Binding("slash", "filter", "filter"),
        Binding("D", "delete", "delete"),
        Binding("r", "reload", "read again"),
        Binding("question_mark", "help", "keys"),
        Binding("W", "words", "words"),
        Binding("q", "back", "quit"),
        CLOSING[-1],
    ],
)


class RunsScreen(AgentScreen):
    """All runs of a store."""

    BINDINGS = BINDINGS
    HELP_TITLE, HELP_TEXT = "runs", HELP
    every: Sequence[RunSummary] = ()
    curve: tuple[str, Sequence[tuple[float, float]]] = ("", ())
    """The id of the run whose details are shown, and its curve."""
    marked = ""
    cursor = 0
    read = False

    def compose(self) -> ComposeResult:
        yield from (Static(id="head"), Static(id="columns"), Lines(id="list"))
        yield from (Static(id="detail"), Static(id="keys"))

    def on_mount(self) -> None:
        self.put_head("agentrl   reading …")
        self.poll()
        self.set_interval(POLL, self.poll)

    def on_resize(self, event: events.Resize) -> None:
        self.put("keys", Text(KEYS_SMALL if event.size.width < 100 else KEYS, no_wrap=True))
        self.query_one("#detail").display = event.size.height >= 20

    @property
    def runs(self) -> list[RunSummary]:
        """The runs that match the filter."""
        texts = ((f, f"{f.run.name} {f.run.model} {f.run.pack} {f.run.kind}") for f in self.every)
        return [found for found, text in texts if self.needle.lower() in text.lower()]

    @property
    def chosen(self) -> RunSummary:
        """The run under the cursor; without one a key does nothing."""
        if not (runs := self.runs):
            raise SkipAction
        return runs[min(self.cursor, len(runs) - 1)]

    # -- reading --------------------------------------------------------------------------------------------------

    async def read_store(self) -> None:
        """Reads the runs, then the chosen one's curve; the cursor stays on its run."""
        found = await self.reader.call(load_runs)
        here = self.chosen.run.id if self.runs else ""
        self.every, self.read = found, True
        self.cursor = next((n for n, f in enumerate(self.runs) if f.run.id == here), self.cursor)
        self.detail()

    @work(exclusive=True, group="detail", exit_on_error=False)
    async def detail(self) -> None:
        """Reads the curve of the chosen run; keys that follow one another fast cost one look."""
        run = self.chosen.run.id if self.runs else ""
        steps = await self.reader.call(lambda store: store.runs.steps(run)) if run else []
        self.curve = run, series(steps, "reward")
        self.paint()

    # -- painting -------------------------------------------------------------------------------------------------

    def paint(self) -> None:
        """Paints the list and the details of the chosen run."""
        width, runs = max(self.size.width, 40), self.runs
        self.cursor = max(0, min(self.cursor, len(runs) - 1))
        path = "/".join(self.reader.path.parts[-3:])  # enough to distinguish projects
        head = Text(f"agentrl   {path}   ", "bold", no_wrap=True, overflow="ellipsis")
        holding = f"   holding {self.needle!r}" if self.needle else ""
        head.append(f"{len(runs)} run{'s' * (len(runs) != 1)}{holding}", "not bold")
        head.append("   cannot be read now" if self.problem else "", BAD)
        self.put("head", head)
        self.put("columns", head_line(width - 2))
        lines = [run_line(f, width - 2, marked=f.run.id == self.marked) for f in runs]
        if lines:
            lines[self.cursor].stylize("reverse " + HERE)
        elif self.problem:
            lines = [Text(part, ALARM) for part in wrap(self.problem, width - 2)]
        elif self.read:
            empty = EMPTY if not self.every else "no run matches"
            lines = [Text(line, FAINT) for line in empty.splitlines()]
        self.query_one(Lines).show(lines)
        of, curve = self.curve
        if not runs:
            self.put("detail", "")
        elif of == runs[self.cursor].run.id:  # else its curve is read now, and the details stay
            self.put("detail", join(detail_lines(runs[self.cursor], curve, width - 2)))

    # -- keys -----------------------------------------------------------------------------------------------------

    def action_move(self, step: int) -> None:
        self.cursor = max(0, min(self.cursor + step, len(self.runs) - 1))
        self.paint()
        self.query_one(Lines).keep_in_sight(self.cursor, middle=True)
        self.detail()

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        """Chooses a run on a click, opens it on a second one."""
        if event.line == self.cursor and self.runs:
            self.action_open()
        elif event.line < len(self.runs):
            self.action_move(event.line - self.cursor)

    def action_open(self) -> None:
        run = self.chosen.run
        if run.kind in offers("screens"):
            self.open_screen(run.kind, run.id)
        elif run.kind != "train":
            self.action_episodes()
        else:
            self.action_watch()

    def action_watch(self) -> None:
        self.open_screen("watch", self.chosen.run.id)

    def action_episodes(self) -> None:
        self.open_screen("episodes", Browse(run=self.chosen.run.id))

    def action_all_episodes(self) -> None:
        self.open_screen("episodes")

    def action_checkpoints(self) -> None:
        lines = checkpoint_lines(self.chosen, max(self.size.width - 12, 30))
        text = "\n".join(line.plain for line in lines)
        self.app.push_screen(Help(f"checkpoints of {self.chosen.run.name}", text, what=""))

    def action_mark(self) -> None:
        self.marked = "" if self.marked == self.chosen.run.id else self.chosen.run.id
        self.paint()

    def action_compare(self) -> None:
        """Compares the marked run with this one; without a mark, the run before this one."""
        chosen, runs = self.chosen, self.runs
        older = runs[runs.index(chosen) + 1].run.id if chosen in runs[:-1] else ""
        other = self.marked if self.marked and self.marked != chosen.run.id else older
        if not other:
            self.notify("space marks the other run first.", timeout=3)
            return
        self.open_screen("compare", other, chosen.run.id)

    def action_filter(self) -> None:
        def done(text: str) -> None:
            self.needle, self.cursor = text, 0
            self.paint()
            self.detail()

        self.ask(Prompt("runs whose name, model, pack or kind holds", self.needle), done)

    def action_rename(self) -> None:
        run = self.chosen.run
        prompt = Prompt("another name; its folder keeps the old one", run.name)
        self.ask(prompt, lambda text: text and text != run.name and self._rename(run, text))

    @work(group="write", exit_on_error=False)
    async def _rename(self, run: RunRow, name: str) -> None:
        await self.reader.write(lambda store: store.runs.rename(run.id, name))
        self.action_reload()

    def action_delete(self) -> None:
        chosen = self.chosen
        if chosen.run.held:
            self.notify(
                f"{chosen.run.name} is running: stop it first.", severity="warning", markup=False
            )
            return
        folder = run_folder(self.reader.path, chosen.run)
        detail = f"{pluralise(chosen.episodes, 'episode')}, {pluralise(chosen.run.step, 'step')}"
        detail += f"\nand the folder {folder}" if folder else ""
        self.confirm(f"Delete {chosen.run.name}?", detail, lambda: self._delete(chosen))

    @work(group="write", exit_on_error=False)
    async def _delete(self, summary: RunSummary) -> None:
        try:
            count = await self.reader.write(delete_run, summary.run)
        except (OSError, AgentRLError) as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.notify(
                f"deleted {summary.run.name} with {pluralise(count, 'episode')}", markup=False
            )
        self.action_reload()

    def action_reload(self) -> None:
        self._version = None
        self.poll()


class EpisodesScreen(AgentScreen):
    """Every stored episode; enter opens replay."""

    BINDINGS: ClassVar[list[BindingType]] = with_ids(
        "episodes",
        [
            Binding("j,down", "move(1)", "down", show=False),
            Binding("k,up", "move(-1)", "up", show=False),
            Binding("pagedown,space", "page(1)", "a page down", show=False),
            Binding("pageup", "page(-1)", "a page up", show=False),
            Binding("g,home", "end(0)", "first", show=False),
            Binding("G,end", "end(1)", "last", show=False),
            Binding("enter", "open", "open"),
            Binding("f", "filter", "filter"),
            Binding("slash", "find", "find"),
            Binding("o", "sort", "sort"),
            Binding("r", "reload", "read again"),
            *CLOSING,
        ],
    )

    HELP_TITLE = "episodes"
    HELP_TEXT = """\
enter  open the episode          j k  down, up
g G    first, last               space / pgup  a page down, up
f      filter: reward:<0.5 step:100..120 task:calc/* tool:calculator flag:LOOP
       text:"4,5" outcome:failed turns:>8 run:x tag:x -tag:seen
o      next sort                 /    look for text in the transcripts
r      read again                q    back
"""

    def __init__(self, reader: Reader, browse: Browse | None = None) -> None:
        super().__init__(reader)
        self.browse = browse or Browse()
        self.listing = EpisodeList(reader, self.browse)
        self.table = table = self.listing.table
        self.take_actions(
            move=table.move_by,
            page=table.move_pages,
            end=table.move_to_end,
            open=table.open_current,
            reload=self.listing.read_again,
            sort=self.listing.next_sort,
            filter=self.listing.ask_filter,
        )

    def compose(self) -> ComposeResult:
        yield from (Static(id="head"), self.listing)
        yield Static(
            "enter open  j/k move  f filter  / find  o sort  r read again  ? keys  q back",
            id="keys",
        )

    def on_mount(self) -> None:
        self.table.focus()
        self._title("reading …")
        self.listing.read_again()

    def _title(self, count: str, error: str = "") -> None:
        head = Text().append("agentrl episodes", "bold")
        head.append(f"   {count}   {self.browse.describe()}")
        self.put("head", head.append(f"   {error}" if error else "", BAD))

    def on_episode_list_listed(self, event: EpisodeList.Listed) -> None:
        some = "no episodes yet: `agentrl rollout -n 8` makes some"
        empty = "no episodes match" if self.browse.filter else some
        count = pluralise(event.count, "episode") if event.count else empty
        self._title("" if event.error else count, event.error)

    def action_find(self) -> None:
        def done(text: str) -> None:
            if text:
                self.browse.filter = f"{self.browse.filter} text:{quote(text)}".strip()
                self.listing.read_again()

        self.ask(Prompt("text in the transcripts"), done)
