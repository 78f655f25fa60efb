"""The panes beside the transcript: group and turns on the left, reward and token on the right."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message

from agentrl_cli.tui.common.episode_view import EpisodeView
from agentrl_cli.tui.common.layers import Layer
from agentrl_cli.tui.common.lines import Rows
from agentrl_cli.tui.common.text import join
from agentrl_cli.tui.replay import legend, panels


class Panel(Rows):
    """Lines that are laid out again only if their number or the width changed: a layout costs more than the text."""

    _count = -1

    def show(self, lines: Sequence[Text]) -> None:
        """Replaces the lines."""
        text = join(lines)
        count = text.plain.count("\n")
        self.update(text, layout=count != self._count)
        self._count = count

    def on_resize(self) -> None:
        self._count = -1


class TokenChosen(Message):
    """A click on something that stands for a token: a turn, a place on the map."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token


class SiblingChosen(Message):
    """A click on another episode of the group."""

    def __init__(self, episode_id: str) -> None:
        super().__init__()
        self.episode_id = episode_id


class Pane(VerticalScroll, can_focus=False):
    """A column of panels over one episode."""

    view: EpisodeView | None = None

    @property
    def inner(self) -> int:
        """The width of a line in cells."""
        return max(self.size.width - 1, 20)


class GroupPane(Pane):
    """The group, episodes with the same flag, the turns, the legend of the layer."""

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self.group, self.failure = Panel(id="group"), Panel(id="failure")
        self.turns, self.legend = (
            Panel(id="turns", classes="gap"),
            Panel(id="legend", classes="gap"),
        )
        self._block = -1

    def compose(self) -> ComposeResult:
        yield from (self.group, self.failure, self.turns, self.legend)

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Those that `show` and `show_cursor` paint."""
        return self.group, self.turns, self.legend

    def show(self, view: EpisodeView, layer: Layer) -> None:
        """Shows an episode; `show_cursor` is to follow."""
        self.view, self._block = view, -1
        self._hidden: frozenset[int] = frozenset()
        self.group.show(panels.group_lines(view, self.inner))
        self.show_layer(layer)

    def show_layer(self, layer: Layer) -> None:
        """Explains the glyphs of a layer."""
        self.legend.show(legend.legend_lines(layer, self.inner))

    def show_failure(self, found: tuple[str, int, int] | None, step: int | None) -> None:
        """Shows how many episodes of the step carry the same flag."""
        self.failure.show(panels.failure_lines(found, step, self.inner))
        self.failure.display = found is not None

    def show_cursor(self, token: int) -> None:
        """Marks the turn of the token under the cursor."""
        if self.view is not None and self.view.block_of(token) != self._block:
            self._block = self.view.block_of(token)
            self.turns.show(
                panels.turn_lines(self.view, self._block, self.inner, hidden=self._hidden)
            )

    def show_branch(self, hidden: frozenset[int]) -> None:
        """Marks the turns that are not on the branch that is shown; `show_cursor` is to follow."""
        self._block, self._hidden = -1, hidden

    @on(Panel.Chosen, "#group")
    def choose_sibling(self, event: Panel.Chosen) -> None:
        """Posts the sibling that was clicked."""
        episode = panels.sibling_at(self.view, event.row) if self.view is not None else None
        if episode is not None:
            self.post_message(SiblingChosen(episode))

    @on(Panel.Chosen, "#turns")
    def choose_turn(self, event: Panel.Chosen) -> None:
        """Posts the first token of the turn that was clicked."""
        token = panels.turn_at(self.view, self._block, event.row) if self.view is not None else None
        if token is not None:
            self.post_message(TokenChosen(token))


class InspectorPane(Pane):
    """The reward, every number of the token under the cursor, and the reasons."""

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self.reward, self.token = Panel(id="reward"), Panel(id="token", classes="gap")
        self.reasons = Panel(id="why", classes="gap")

    def compose(self) -> ComposeResult:
        yield from (self.reward, self.token, self.reasons)

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Its parts."""
        return self.reward, self.token, self.reasons

    def show(self, view: EpisodeView) -> None:
        """Shows an episode; `show_cursor` is to follow."""
        self.view = view
        self.reward.show(panels.reward_lines(view, self.inner))
        self.reasons.show(panels.reason_lines(view, self.inner))

    def show_cursor(self, token: int) -> None:
        """Shows the token under the cursor."""
        if self.view is not None:
            self.token.show(panels.token_lines(self.view, token, self.inner))

    def page(self) -> None:
        """Scrolls on by a page, from the end to the start."""
        if self.scroll_offset.y >= self.max_scroll_y:
            self.scroll_home(animate=False)
        else:
            self.scroll_page_down(animate=False)
