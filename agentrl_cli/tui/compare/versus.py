"""Two checkpoints side by side on one task, from stored episodes; also any two episodes."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.store import EpisodeRow
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.episode_view import EpisodeView, Fork, place_of, token_at
from agentrl_cli.tui.common.keys import CLOSING, with_ids
from agentrl_cli.tui.common.layers import LAYERS, layer_key
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import ALARM, BAD, FAINT, GOOD, HERE, TITLE, join, num
from agentrl_cli.tui.common.token_text import visible
from agentrl_cli.tui.common.token_view import TokenView

KEYS = "tab side  j/k turn  ←/→ token  h/l other checkpoint  v fork  0-9 layer  enter open  ? keys  q back"
HELP = """\
tab          the other side            h l    another checkpoint on this side
j k          next, previous turn       ← →    next, previous token      ↑ ↓ pgup pgdn  lines
v            both to the first differing token
0 … 9        layer, on both sides      enter  open this side in replay
q            back
"""


class VersusScreen(AgentScreen):
    """Two episodes of one task; `rows` are the choices, `sides` two indices into them."""

    BINDINGS: ClassVar[list[BindingType]] = with_ids(
        "versus",
        [
            Binding("tab", "side", "side"),
            Binding("j", "turn(1)", "turn", show=False),
            Binding("k", "turn(-1)", "turn", show=False),
            Binding("right,J", "token(1)", "token", show=False),
            Binding("left,K", "token(-1)", "token", show=False),
            Binding("down", "line(1)", show=False),
            Binding("up", "line(-1)", show=False),
            Binding("pagedown", "line(15)", show=False),
            Binding("pageup", "line(-15)", show=False),
            Binding("h", "version(-1)", "checkpoint", show=False),
            Binding("l", "version(1)", "checkpoint", show=False),
            Binding("v", "fork", "fork"),
            *(
                Binding(layer_key(i), f"layer('{name}')", name, show=False)
                for i, name in enumerate(LAYERS)
            ),
            Binding("enter", "open", "open"),
            *CLOSING,
        ],
    )

    HELP_TITLE, HELP_TEXT = "side by side", HELP

    def __init__(self, reader: Reader, rows: list[EpisodeRow], sides: tuple[int, int]) -> None:
        super().__init__(reader)
        self.rows = rows
        self.sides = list(sides)
        self.views: list[EpisodeView | None] = [None, None]
        self.fork: Fork | None = None
        self.side = 0

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with Horizontal(id="both"):
            for side in (0, 1):
                with Vertical(classes="pane", id=f"pane{side}"):
                    yield Static(id=f"title{side}", classes="title")
                    yield TokenView(id=f"side{side}")
        yield Static(id="diff")
        yield Static(Text(KEYS, no_wrap=True), id="keys")

    def on_mount(self) -> None:
        self.tokens(0).focus()
        self.put("head", Text("reading …"))
        self.load()

    def on_resize(self, event: Resize) -> None:
        for side in (0, 1):
            self.tokens(side).compact = event.size.height < 30
        self.call_after_refresh(self.paint)

    def tokens(self, side: int) -> TokenView:
        return self.query_one(f"#side{side}", TokenView)

    @work(exclusive=True, group="load", exit_on_error=False)
    async def load(self) -> None:
        """Reads both episodes; the other side goes to where this one parts from it."""
        for side in (0, 1):
            row, view = self.rows[self.sides[side]], self.views[side]
            if view is not None and view.episode.id == row.id:
                continue
            try:
                view = await self.reader.view(row.id)
            except AgentRLError as error:
                self.put("head", Text(error.message, ALARM))
                return
            self.views[side] = view
            if view.signals is None and self.tokens(side).lens == "push":
                self.tokens(side).lens = "logp"
            self.tokens(side).show(view, token_at(view, None))
        left, right = self.views
        assert left is not None and right is not None
        self.fork = await self.reader.fork(left, right.episode.id)
        self.paint()
        self.action_fork()

    def paint(self) -> None:
        """Paints the titles and the difference."""
        left = self.views[0]
        if left is None or None in self.views:
            return
        count = f"{len(self.rows)} checkpoints tried this task"
        self.put_head(f"agentrl replay   {self.rows[0].task_id}   {count}")
        for side, at in enumerate(self.sides):
            row, mark = self.rows[at], "▶ " if side == self.side else "  "
            where = f"{row.kind} step {row.step}" if row.step is not None else row.kind
            text = Text(mark, HERE, no_wrap=True, overflow="ellipsis")
            text.append(row.weights_version or "?", TITLE)
            color = GOOD if str(row.outcome) == "solved" else BAD
            text.append(f"  {num(row.reward, '.2f')} {row.outcome}", color)
            self.put(f"title{side}", text.append(f"  {where}  #{row.sample}  {row.n_tokens} tok"))
        self.put("diff", join(parting_lines(self.fork, left, max(self.size.width - 4, 20))))

    def action_side(self) -> None:
        self.side = 1 - self.side
        self.tokens(self.side).focus()
        self.paint()

    def on_descendant_focus(self) -> None:
        side = int(self.tokens(1).has_focus)
        if side != self.side:
            self.side = side
            self.paint()

    def action_turn(self, step: int) -> None:
        self.tokens(self.side).move_turn(step)

    def action_token(self, step: int) -> None:
        self.tokens(self.side).move(step)

    def action_line(self, step: int) -> None:
        self.tokens(self.side).move_lines(step)

    def action_version(self, step: int) -> None:
        """Shows another checkpoint on this side; the place in the episode stays."""
        here, other = self.sides[self.side], self.sides[1 - self.side]
        here = (here + step) % len(self.rows)
        if here == other and len(self.rows) > 2:  # the same episode twice shows nothing
            here = (here + step) % len(self.rows)
        self.sides[self.side] = here
        self.load()

    def action_layer(self, name: str) -> None:
        for side in (0, 1):
            self.tokens(side).lens = name

    def action_fork(self) -> None:
        if self.fork is not None:
            self.tokens(0).move_to(self.fork.position)
            self.tokens(1).move_to(self.fork.other_position)

    def action_open(self) -> None:
        view = self.views[self.side]
        if view is not None:
            place = place_of(view, self.tokens(self.side).cursor)
            self.open_screen("replay", view.episode.id, place=place)


def parting_lines(fork: Fork | None, left: EpisodeView, width: int) -> list[Text]:
    """Return the first differing token of the two sides, the text that follows on each, and how likely the
    left one held either.
    """
    if fork is None:
        return [Text("DIFF  both sides are the same tokens", FAINT)]
    turn = left.block_of(min(fork.position, max(len(left.tokens) - 1, 0)))
    there = f"p {num(fork.p_there, '.3f')}" if fork.p_there is not None else "below its top five"
    own = (
        f"  the left policy gave its own token p {num(fork.p_here, '.3f')}, the right one's {there}"
    )
    known = fork.p_here is not None or fork.p_there is not None
    rows = [
        (f"DIFF  they part at token {fork.position}, turn {turn}", TITLE),
        (f"  left  {visible(fork.here) or '(ends here)'}", ""),
        (f"  right {visible(fork.there) or '(ends here)'}", ""),
        *[(own, FAINT)] * known,
    ]
    return [Text(text[:width], style, no_wrap=True) for text, style in rows]
