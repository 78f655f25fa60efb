"""Replay: one episode, token by token. The keys of the screen; panes.py shows the episode, menus.py asks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec

from rich.text import Text
from textual import work
from textual.binding import Binding, BindingType
from textual.events import Resize

from agentrl_cli.reports.spans import of_episode
from agentrl_cli.store import Store
from agentrl_cli.tui.common.dialogs import Help, Prompt
from agentrl_cli.tui.common.episode_list import Browse, filter_form
from agentrl_cli.tui.common.episode_view import place_of
from agentrl_cli.tui.common.keys import CLOSING, with_ids
from agentrl_cli.tui.common.layers import LAYERS, PALETTES, layer_key, palette_name, use_palette
from agentrl_cli.tui.common.reader import Reader, holds_secret
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.replay import menus, panels, related
from agentrl_cli.tui.replay.panes import EpisodeScreen, Place

KEYS = (
    "j/k turn  J/K ←/→ token  ↑/↓ line  h/l sibling  n/N episode  g/G ends  0-9 layer  / find  . again  ' flagged\n"
    "? all  W words  q back  M read  f filter  R what if  c chat  e export  [ ] step  V checkpoints  t tag  m note"
)
KEYS_SMALL = "j/k turn ←/→ token h/l sibling 0-9 layer tab pane / find ? keys q back"

HELP = """\
j k  next, previous turn          J K ← →  next, previous token
↑ ↓  a line down, up              pgup pgdn  a page
g G  first, last token            '  next token that stands out
h l  previous, next sibling of the group, at the same place
n N  next, previous episode of the list
i    the list itself              f  filter     o  sort
L    follow the newest episode of the run, until something moves
[ ]  the same task at the previous, next step
V    two checkpoints side by side on this task
v    where this parts from a sibling
/    find text                    .  the next match
R    what if: its calls again, re-roll from this turn, edit it
c    chat from here               x  episodes with the same flag
t m b  tags, note, bookmark (tag:mark lists them)
e    export: JSON lines, HTML page (episode or group), SVG
s    this screen as SVG           y  copy token, turn, link
P    other colours                space  fold the turn
B    the next branch alone, after the last all of them
M    read: messages, Markdown rendered, long JSON folded
I    the images, large; o there opens the file
W    the words of this screen, explained
T    where its time goes
w    who taught the model this token
tab  the rest of the right pane, or the next pane where one fits
q    back        mouse: a token, a sibling, a turn, the map

1 push     2 advantage     3 log-probability     4 entropy
5 ratio and clipping     6 mask     7 origin     8 plain
9 KL to the reference     0 gradient weight
Glyphs under the text are the layer. Push: 1 to 7 up, a to g down,
each twice the last; 7 and g: the run's strongest 5 %; 0: hardly moved
Filter: reward:<0.5 step:100..120 task:calc/* tool:calculator
flag:LOOP text:"4,5" outcome:failed -tag:seen
"""

BINDINGS: list[BindingType] = [
    Binding("j", "turn(1)", "next turn", show=False),
    Binding("k", "turn(-1)", "previous turn", show=False),
    Binding("J,right", "token(1)", "next token", show=False),
    Binding("K,left", "token(-1)", "previous token", show=False),
    Binding("down", "line(1)", "a line down", show=False),
    Binding("up", "line(-1)", "a line up", show=False),
    Binding("pagedown", "page(1)", "a page down", show=False),
    Binding("pageup", "page(-1)", "a page up", show=False),
    Binding("g,home", "end(0)", "first token", show=False),
    Binding("G,end", "end(1)", "last token", show=False),
    Binding("h", "sibling(-1)", "previous sibling", show=False),
    Binding("l", "sibling(1)", "next sibling", show=False),
    Binding("n", "episode(1)", "next episode", show=False),
    Binding("N", "episode(-1)", "previous episode", show=False),
    *(
        Binding(layer_key(i), f"layer('{name}')", layer.title, show=False)
        for i, (name, layer) in enumerate(LAYERS.items())
    ),
    Binding("slash", "find", "find"),
    Binding("full_stop", "find_again", "find again", show=False),
    Binding("apostrophe", "next_flagged", "next flagged token", show=False),
    Binding("f", "filter", "filter"),
    Binding("o", "sort", "sort"),
    Binding("i", "list", "episodes"),
    Binding("v", "diff", "diff"),
    Binding("space", "fold", "fold"),
    Binding("e", "export", "export"),
    Binding("y", "copy", "copy"),
    Binding("s", "svg", "svg"),
    Binding("left_square_bracket", "step(-1)", "previous step", show=False),
    Binding("right_square_bracket", "step(1)", "next step", show=False),
    Binding("V", "versions", "checkpoints side by side"),
    Binding("R", "whatif", "what if"),
    Binding("c", "chat", "chat from here"),
    Binding("x", "same_flag", "episodes with the same flag"),
    Binding("t", "tag", "tag"),
    Binding("m", "note", "note"),
    Binding("b", "bookmark", "bookmark"),
    Binding("L", "follow", "follow the newest episode"),
    Binding("B", "branch", "next branch"),
    Binding("M", "read", "read as messages"),
    Binding("I", "images", "images"),
    Binding("P", "palette", "colours"),
    Binding("T", "time", "where its time goes"),
    Binding("w", "taught", "who taught this token"),
    Binding("tab", "pane", "next pane", show=False),
    *CLOSING,
]


P = ParamSpec("P")
WIDE = 160
"""Least width for a sibling beside the transcript."""


class ReplayScreen(EpisodeScreen):
    """One episode; `place` is where to start."""

    BINDINGS = with_ids("replay", BINDINGS)
    HELP_TITLE, HELP_TEXT = "replay", HELP

    def __init__(
        self,
        reader: Reader,
        episode_id: str,
        browse: Browse | None = None,
        place: Place | None = None,
    ) -> None:
        super().__init__(reader, episode_id, browse, place)
        tokens = self.tokens
        self.take_actions(
            turn=tokens.action_turn,
            token=tokens.action_token,
            end=tokens.move_to_end,
            fold=tokens.fold,
            find=self.action_find_text,
            next_flagged=tokens.move_to_flagged,
            branch=tokens.next_branch,
            list=lambda: self.open_screen("episodes", self.browse),
            images=lambda: menus.show_images(self, self.view, tokens.cursor),
            copy=lambda: menus.ask_copy(self, self.episode_id, self.view, tokens.cursor),
            export=lambda: menus.ask_export(self, self.episode_id, self.view, self.action_svg),
        )

    def on_resize(self, event: Resize) -> None:
        width, height = event.size
        tiny = width < 60 or height < 16
        small = not tiny and (width < 96 or height < 28)
        mid = not tiny and not small and (width < 116 or height < 36)
        wide = width >= WIDE and not small
        for name, on in (("tiny", tiny), ("small", small), ("mid", mid), ("wide", wide)):
            self.set_class(on, f"-{name}")
        self.put("keys", Text(KEYS_SMALL if small or tiny else KEYS, no_wrap=True))
        self.tokens.compact = self.small
        if self.view is not None and wide:
            self._load_rest(self.view)

    def find_next(self, needle: str) -> str:
        count = self.tokens.find(needle)
        return f"{count} matches, . for the next" if count else ""

    def action_diff(self) -> None:
        """Moves to where a sibling differs; without a pane for the difference, a window shows it."""
        if self.view is None or self.fork is None:
            self.notify("No sibling differs.", timeout=2)
            return
        self.tokens.move_to(self.fork.position)
        if self.small or self.has_class("-mid"):
            lines = panels.fork_lines(self.fork, self.view, max(self.size.width - 12, 20))
            self.app.push_screen(Help("diff", "\n".join(line.plain for line in lines), what=""))

    def action_read(self) -> None:
        """Shows the episode as messages."""
        if self.view is not None:
            self.open_screen("reading", self.view.episode)

    def action_palette(self) -> None:
        """Takes the next set of colours."""
        names = list(PALETTES)
        use_palette(names[(names.index(palette_name()) + 1) % len(names)])
        for view in self.query(TokenView):
            view.recolor()
        self.paint()
        self.notify(f"colours {palette_name()}", timeout=2)

    # -- other episodes -------------------------------------------------------------------------------------------

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def _go(
        self,
        find: Callable[Concatenate[Store, P], str | None],
        missing: str,
        place: Place | None,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Loads the episode that `find(store, …)` returns; reports `missing` if it returns None."""
        self.stop_following()
        found = await self.reader.call(find, *args, **kwargs)
        if found is None:
            self.notify(missing, timeout=3)
        else:
            self.load(found, place)

    @property
    def place(self) -> Place | None:
        """Where the cursor is; None before anything was read."""
        return None if self.view is None else place_of(self.view, self.tokens.cursor)

    def action_sibling(self, step: int) -> None:
        self.stop_following()
        ids = [row.id for row in self.view.siblings] if self.view is not None else []
        if len(ids) < 2:
            self.notify("This episode has no siblings.", timeout=2)
            return
        at = ids.index(self.episode_id) if self.episode_id in ids else 0
        self.load(ids[(at + step) % len(ids)], self.place)

    def action_episode(self, step: int) -> None:
        """Shows the next or previous episode of the list (its filter, its order)."""
        self._go(
            self.browse.neighbour, "No further episode in the list.", None, self.episode_id, step
        )

    def action_step(self, step: int) -> None:
        """Shows the same task at the previous or next step, at the same turn and token."""
        missing = f"This task was not tried at {'a later' if step > 0 else 'an earlier'} step of this run."
        self._go(related.at_step, missing, self.place, self.episode_id, step)

    def action_filter(self) -> None:
        def read(text: str) -> None:
            self.browse.filter, self.browse.ids = text, None
            self._go(self.browse.first, "No episode matches.", None)

        self.ask(filter_form(self.browse.filter), read)

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def action_versions(self) -> None:
        """Shows two checkpoints on this task, side by side."""
        rows = await self.reader.call(related.versions, self.episode_id)
        if (other := related.other_version(rows, self.episode_id)) is None:
            return self.notify(
                "Only one checkpoint tried this task: `agentrl eval` makes more.", timeout=4
            )
        here = next(n for n, row in enumerate(rows) if row.id == self.episode_id)
        self.open_screen("versus", rows, (min(here, other), max(here, other)))

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def action_same_flag(self) -> None:
        """Lists all episodes of this step with the same flag."""
        text, run = await self.reader.call(related.same_flag, self.episode_id)
        if not text:
            return self.notify("This episode has no flag.", timeout=2)
        self.open_screen("episodes", Browse(text, "-time", run))

    # -- menus ----------------------------------------------------------------------------------------------------

    def action_whatif(self) -> None:
        if self.view is None or not self.view.blocks or self.view.running:
            self.notify("There is nothing to continue from yet.", timeout=3)
        else:
            menus.ask_whatif(self, self.view, self.tokens.cursor)

    def action_chat(self) -> None:
        if self.view is not None and self.view.blocks:
            menus.open_chat(self, self.view, self.tokens.cursor)

    def action_time(self) -> None:
        if self.view is not None:
            self.show_time(partial(of_episode, episode=self.view.episode))

    @work(exclusive=True, group="taught", exit_on_error=False)
    async def action_taught(self) -> None:
        """Shows who taught the token at the cursor; another process loads the model."""
        if self.place is None:
            return
        link = f"{self.episode_id}@t{self.place[0]}.{self.place[1]}"
        self.notify("asking every checkpoint; this may take a minute", timeout=8)
        words = ["-m", "agentrl_cli", "why", link, "--db", str(self.reader.path)]
        child = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=-1, stderr=-1)
        try:
            found, problem = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
        text = (problem if child.returncode else found).decode("utf-8", "replace")
        self.app.push_screen(Help("who taught this token", text.strip(), what=""))

    @work(exclusive=True, group="export", exit_on_error=False)
    async def action_svg(self) -> None:
        """Writes the screen as a picture; asks first if it may show a secret."""
        secret = await self.reader.call(holds_secret, self.episode_id)
        path = Path(f"replay-{self.episode_id}.svg").absolute()
        self.save_picture(path, f"agentrl replay {self.episode_id}", secret=secret)

    def action_tag(self) -> None:
        label = "tags, with a minus in front to take one away"
        self.ask(Prompt(label), lambda text: text and self._mark(text))

    def action_note(self) -> None:
        note = self.view.note if self.view is not None else ""
        self.ask(Prompt("note", note), lambda text: self._mark(text, note=True))

    def action_bookmark(self) -> None:
        """Sets or removes the tag `mark`; the filter `tag:mark` lists all bookmarks."""
        marked = self.view is not None and related.BOOKMARK in self.view.tags
        self._mark("-" * marked + related.BOOKMARK)

    @work(group="mark", exit_on_error=False)
    async def _mark(self, text: str, *, note: bool = False) -> None:
        episode = self.episode_id
        tags, remark = await self.reader.write(related.mark, episode, text, note=note)
        if self.episode_id == episode and self.view is not None:
            self.view = replace(self.view, tags=tags, note=remark)
            self.paint()
            shown = f"   note {remark}" if remark else ""
            self.notify(f"tags {', '.join(tags) or 'none'}{shown}", timeout=2, markup=False)
