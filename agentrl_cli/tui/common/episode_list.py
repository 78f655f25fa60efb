"""A list of episodes as a widget, read by a filter and an order in the reader's thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.store import Store
from agentrl_cli.store.filters import compile_filter, fields
from agentrl_cli.tui.common.agent_screen import report_failure
from agentrl_cli.tui.common.dialogs import Field, Form
from agentrl_cli.tui.common.episode_table import EpisodeTable, head_text
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import quote
from agentrl_cli.types import Outcome

SORTS = ("-time", "time", "-reward", "reward", "-step", "-advantage", "-tokens", "-turns")
EXAMPLES = """\
reward:<0.5  step:100..120  task:calc/*  flag:LOOP  tool:calculator
text:"4,5"  outcome:failed,timeout  tag:mark  -tag:seen  parent:none"""


class Browse:
    """A filter, an order and the ids they select: shared by the list and by n/N of the replay screen."""

    def __init__(self, filter: str = "", sort: str = "-time", run: str | None = None) -> None:
        self.filter = filter
        self.sort = sort
        self.run = run
        self.ids: list[int] | None = None
        self.named = ""
        """The run's name, after the list was read."""

    def load(self, store: Store) -> list[int]:
        """Return the ordered row ids (in the reader's thread). Raises UsageError for an invalid filter."""
        self.ids = list(store.episodes.ids(self.filter, self.sort, run=self.run))
        self.named = store.runs.get(self.run).name if self.run else ""
        return self.ids

    def first(self, store: Store) -> str | None:
        """Return the id of the first episode (in the reader's thread), None if the list is empty. Raises UsageError."""
        ids = self.load(store)
        return store.episodes.rows(ids[:1])[0].id if ids else None

    def neighbour(self, store: Store, episode_id: str, step: int) -> str | None:
        """Return the id of the episode `step` further in the list (in the reader's thread), None at its ends."""
        ids = self.ids if self.ids is not None else self.load(store)
        here = store.episodes.row(episode_id).rowid
        at = ids.index(here) + step if here in ids else 0
        rows = store.episodes.rows([ids[at]]) if 0 <= at < len(ids) else []
        return rows[0].id if rows else None

    def next_sort(self) -> None:
        """Takes the next order of SORTS; the caller reads the list again."""
        at = SORTS.index(self.sort) if self.sort in SORTS else -1
        self.sort, self.ids = SORTS[(at + 1) % len(SORTS)], None

    def describe(self) -> str:
        text = f"filter {self.filter or '(none)'}   sort {self.sort}"
        return f"{text}   run {self.named or self.run}" if self.run else text


FLAGS = (
    "TOOLFAIL",
    "BADARG",
    "NOTOOL",
    "LOOP",
    "TRUNC",
    "AFTERERR",
    "MALFORMED",
    "DRIFT",
    "DIVERGED",
    "MASK",
    "*",
)
KINDS = ("train", "eval", "rollout", "chat", "whatif")


def filter_form(value: str) -> Form:
    """Asks for a filter: the line itself, and fields whose conditions are added to it. An invalid one is refused."""
    asked = [
        Field(
            "filter", value, "reward:<0.5 step:100.. task:calc/*", [f"{name}:" for name in fields()]
        ),
        Field("task", hint="calc/*"),
        Field("step", hint="120 or 100..120 or >100"),
        Field("reward", hint="<0.5"),
        Field("outcome", choices=[outcome.value for outcome in Outcome]),
        Field("flag", choices=FLAGS),
        Field("kind", choices=KINDS),
        Field("tool", hint="calculator"),
        Field("text", hint="words in the transcript"),
    ]
    return Form(
        "filter",
        asked,
        filter_text,
        help=f"{EXAMPLES}\nfields: {' '.join(fields())}",
        check=compile_filter,
    )


def filter_text(values: Mapping[str, str]) -> str:
    """Return the line, and a condition for every other field with a value."""
    asked = [(name, value) for name, value in values.items() if value and name != "filter"]
    rest = [
        f"{name}:{quote(value) if ' ' in value and name != 'step' else value}"
        for name, value in asked
    ]
    return " ".join([values["filter"], *rest]).strip()


class EpisodeList(Vertical):
    """Column titles over an `EpisodeTable`; `read_again` fills it by its `browse` and posts `Listed`."""

    class Listed(Message):
        """The list was read: how many episodes, or the error in the filter."""

        def __init__(self, count: int, error: str) -> None:
            super().__init__()
            self.count, self.error = count, error

    def __init__(self, reader: Reader, browse: Browse, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.reader, self.browse = reader, browse

    def compose(self) -> ComposeResult:
        yield Static(id="columns")
        yield EpisodeTable(id="table")

    def on_resize(self) -> None:
        self.show_columns()

    on_worker_state_changed = report_failure

    @property
    def table(self) -> EpisodeTable:
        return self.query_one(EpisodeTable)

    def show_columns(self) -> None:
        self.query_one("#columns", Static).update(head_text(self.size.width))

    @work(exclusive=True, group="ids", exit_on_error=False)
    async def read_again(self) -> None:
        """Reads ids and first page in one go, so that the first paint shows rows; the cursor stays on its row."""
        table = self.table
        here = table.ids[table.cursor] if table.cursor and table.ids else -1
        try:
            ids, rows = await self.reader.call(_first_page, self.browse, max(self.size.height, 40))
        except AgentRLError as error:
            self.post_message(self.Listed(0, f"{error.message} {error.hint}".strip()))
            return
        table.show_rows(ids, rows, ids.index(here) if here in ids else 0)
        self.post_message(self.Listed(len(ids), ""))

    def ask_filter(self) -> None:
        """Asks for a filter and reads the list by it."""

        def read(text: str | None) -> None:
            self.browse.filter = self.browse.filter if text is None else text
            self.read_again()

        self.app.push_screen(filter_form(self.browse.filter), read)

    def next_sort(self) -> None:
        """Reads the list in the next order."""
        self.browse.next_sort()
        self.read_again()

    @work(exclusive=True, group="rows", exit_on_error=False)
    async def on_episode_table_wanted(self, event: EpisodeTable.Wanted) -> None:
        rows = await self.reader.call(_rows, self.table.ids[event.first : event.last])
        self.table.add_rows(rows)


def _first_page(store: Store, browse: Browse, height: int) -> tuple[list[int], dict[int, Any]]:
    ids = browse.load(store)
    return ids, _rows(store, ids[:height])


def _rows(store: Store, ids: list[int]) -> dict[int, Any]:
    return {row.rowid: row for row in store.episodes.rows(ids)}
