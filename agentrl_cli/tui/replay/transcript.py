"""The middle of replay: the tokens, a sibling beside them, where the two differ, the map, the task by step."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from agentrl_cli.tui.common.episode_view import (
    EpisodeView,
    Fork,
    next_flagged,
    off_branch,
    own_token,
)
from agentrl_cli.tui.common.layers import LAYERS, Layer
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.replay import legend, panels
from agentrl_cli.tui.replay.panes import Panel, TokenChosen


class Transcript(Vertical):
    """One episode's tokens under a layer; the cursor is a token."""

    view: EpisodeView | None = None
    fork: Fork | None = None
    """Where a sibling differs; None until it was read, and if it is identical."""
    beside = ""
    """The episode beside which a sibling is shown."""
    branch: int | None = None
    """The branch that is shown alone; None: all."""
    steps: Sequence[Text] = ()
    needle = ""
    """The text that was looked for last."""
    compact = False
    """Without room for what lies under the map."""

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self.tokens, self.other = TokenView(id="tokens"), TokenView(id="other")
        self.diff, self.map, self.by_step = Panel(id="diff"), Panel(id="map"), Panel(id="steps")

    def compose(self) -> ComposeResult:
        with Horizontal(id="texts"):
            with Vertical(id="mine"):
                yield Static(id="mine-title")
                yield self.tokens
            with Vertical(id="beside"):
                yield Static(id="beside-title")
                yield self.other
        yield from (self.diff, self.map, self.by_step)

    @property
    def lens(self) -> Layer:
        """The layer under which the tokens are shown (`layer` means something else to Textual)."""
        return LAYERS[self.tokens.lens]

    @property
    def inner(self) -> int:
        """The width of a line in cells."""
        return max(self.size.width - 1, 20)

    # -- showing --------------------------------------------------------------------------------------------------

    def show(self, view: EpisodeView, token: int, *, keep_scroll: bool = False) -> None:
        """Shows an episode with the cursor on a token; `paint` is to follow."""
        if self.view is None and view.signals is None:
            self.tokens.lens = "logp"  # nothing was trained here: the push would be blank
        if self.view is None or self.view.episode.id != view.episode.id:
            self.fork = None
        self.view, self.branch = view, None
        self.tokens.show(view, token, keep_scroll=keep_scroll)

    def show_beside(self, sibling: EpisodeView) -> None:
        """Shows a sibling beside the transcript."""
        if self.view is None:
            return
        self.other.lens = self.tokens.lens
        self.other.show(sibling, self.fork.position if self.fork is not None else 0)
        self.call_after_refresh(
            self.other.move_to, self.other.cursor
        )  # a pane that was hidden has its size by then
        self.query_one("#beside-title", Static).update(panels.side_title("BESIDE", sibling))
        self.beside = self.view.episode.id

    def show_steps(self, lines: Sequence[Text]) -> None:
        """Shows the task's mean reward by step."""
        self.steps = lines
        self.by_step.show(lines)
        self.by_step.display = bool(lines) and not self.compact

    def show_cursor(self, token: int) -> None:
        """Shows on the map where the cursor is."""
        if self.view is None:
            return
        lines = legend.map_lines(self.view, self.lens, self.tokens.levels, token, self.inner)
        short = self.screen.has_class("-small") and len(lines) > 3
        self.map.show([lines[1], lines[3]] if short else lines)

    def paint(self) -> None:
        """Paints the title and what lies under the tokens; the tokens paint themselves."""
        if self.view is not None:
            self.query_one("#mine-title", Static).update(panels.side_title("HERE", self.view))
            self.paint_fork()

    def paint_fork(self) -> None:
        """Paints where a sibling differs, if there is room."""
        if self.view is None:
            return
        self.diff.display = len(self.view.siblings) > 1 and not self.compact
        self.diff.show(panels.fork_lines(self.fork, self.view, self.inner))
        self.by_step.display = bool(self.steps) and not self.compact

    # -- moving ---------------------------------------------------------------------------------------------------

    def use_layer(self, name: str) -> None:
        """Shows both sides under another layer."""
        self.tokens.lens = self.other.lens = name

    def next_branch(self) -> frozenset[int] | None:
        """Folds the turns outside the next branch, after the last branch none; moves to what is the branch's own.

        Returns the folded blocks; None if the episode has one branch.
        """
        if self.view is None or self.view.episode.linear:
            return None
        number = 0 if self.branch is None else self.branch + 1
        self.branch = number if number < len(self.view.episode.branches) else None
        hidden = frozenset[int]() if self.branch is None else off_branch(self.view, self.branch)
        self.tokens.unfold_but(hidden)
        self.tokens.move_to(
            self.tokens.cursor if self.branch is None else own_token(self.view, self.branch)
        )
        return hidden

    def to_fork(self) -> bool:
        """Moves to where a sibling differs; False if none does."""
        if self.view is None or self.fork is None:
            return False
        self.tokens.move_to(min(self.fork.position, len(self.view.tokens) - 1))
        return True

    def to_flagged(self) -> bool:
        """Moves to the next token that stands out; False if none does."""
        token = next_flagged(self.view, self.tokens.cursor) if self.view is not None else None
        if token is not None:
            self.tokens.move_to(token)
        return token is not None

    def find(self) -> str:
        """Moves to the next match of `needle`; returns what to report."""
        if not self.needle:
            return "/ finds text first"
        count = self.tokens.find(self.needle)
        return f"{self.needle}: {f'{count} matches, . for the next' if count else 'nothing found'}"

    @on(Panel.Chosen, "#map")
    def choose_place(self, event: Panel.Chosen) -> None:
        """Posts the token under a click on the map."""
        token = (
            legend.token_on_map(self.view, event.column, self.inner)
            if self.view is not None
            else None
        )
        if token is not None:
            self.post_message(TokenChosen(token))
