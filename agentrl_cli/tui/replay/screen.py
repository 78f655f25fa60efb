"""Replay: one episode, token by token, and everything a person does with it. Panes and painting: replay_base.py.

Keys: replay_keys.py; ux.md 6.1 draws the screen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import work
from textual.containers import VerticalScroll
from textual.events import Click

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.common import panels, related
from agentrl_cli.tui.common.dialogs import SECRET, Choose, Confirm, Help, Prompt, leave, picture
from agentrl_cli.tui.common.episode_view import next_flagged, place_of, said_in, whatif_turn
from agentrl_cli.tui.common.layers import PALETTES, palette_name, use_palette
from agentrl_cli.tui.common.token_text import visible
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.replay.base import ReplayBase
from agentrl_cli.tui.replay.keys import HELP
from agentrl_cli.tui.replay.mouse import sibling_at, token_on_map, turn_at
from agentrl_cli.tui.whatif.client import whatif_arguments

if TYPE_CHECKING:
    from agentrl_cli.store import Store


WHATIF = "model: tiny, a folder, a name, RUN@best, RUN@STEP or scripted.  n: how many.  T: temperature."


class ReplayScreen(ReplayBase):
    """One episode. `place` is (turn, token in the turn) to start at."""

    # -- finding --------------------------------------------------------------------------------------------------

    def action_next_flagged(self) -> None:
        if self.view is not None:
            token = next_flagged(self.view, self.tokens.cursor)
            if token is None:
                self.notify("No token stands out.", timeout=2)
            else:
                self.tokens.move_to(token)

    def action_find(self) -> None:
        def done(text: str | None) -> None:
            if text:
                self.needle = text
                self.action_find_again()

        self.app.push_screen(Prompt("find in this episode", self.needle), done)

    def action_find_again(self) -> None:
        count = self.tokens.find(self.needle)
        found = f"{count} matches, . for the next" if count else "nothing found"
        self.notify(f"{self.needle}: {found}" if self.needle else "/ finds text first", timeout=2, markup=False)

    def on_click(self, event: Click) -> None:
        """A click on a sibling, a turn or the map goes there."""
        if self.view is None:
            return
        x, y = event.screen_x, event.screen_y
        inside = {name for name in ("left", "group", "turns", "map") if self._shows(name, x, y)}
        token: int | None = None
        if "map" in inside:
            token = token_on_map(self.view, x - self.query_one("#map").content_region.x, self._inner("middle"))
        elif {"left", "turns"} <= inside:
            line = y - self.query_one("#turns").content_region.y
            token = turn_at(self.view, self.view.block_of(self.tokens.cursor), line)
        elif {"left", "group"} <= inside:
            sibling = sibling_at(self.view, y - self.query_one("#group").content_region.y)
            if sibling is not None:
                self.stop_following()
                self.load(sibling, place_of(self.view, self.tokens.cursor))
        if token is not None:
            self.stop_following()
            self.tokens.move_to(token)

    def _shows(self, name: str, x: int, y: int) -> bool:
        widget = self.query_one(f"#{name}")
        return widget.display and widget.region.contains(x, y)

    # -- the list -------------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        from agentrl_cli.tui.common.episode_table import filter_prompt

        def done(text: str | None) -> None:
            if text is not None:
                self.browse.filter, self.browse.ids = text, None
                self.open_first()

        self.app.push_screen(filter_prompt(self.browse.filter), done)

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def open_first(self) -> None:
        """Opens the first episode that the filter lets through."""
        self.stop_following()
        try:
            ids = await self.reader.call(self.browse.load)
        except AgentRLError as error:
            self.notify(f"{error.message} {error.hint}", severity="error", markup=False)
            return
        if not ids:
            self.notify("No episode matches.", severity="warning")
            return
        rows = await self.reader.call(lambda store: store.episode_rows(ids[:1]))
        self.load(rows[0].id)

    def action_sort(self) -> None:
        from agentrl_cli.tui.common.episode_table import SORTS

        at = SORTS.index(self.browse.sort) if self.browse.sort in SORTS else -1
        self.browse.sort, self.browse.ids = SORTS[(at + 1) % len(SORTS)], None
        if self.view is not None:
            self._load_rest(self.view)

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def action_follow(self) -> None:
        """Shows the newest episode of the run as it comes, until something is moved."""
        if self.following or self.view is None:
            self.stop_following()
            return
        self.following = True
        self._paint_subhead()
        if not await self._follow():
            self.tokens.move_to(len(self.view.tokens) - 1)

    def action_list(self) -> None:
        self.open_screen("episodes", self.browse)

    # -- other episodes -------------------------------------------------------------------------------------------

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def action_step(self, step: int) -> None:
        """The same task at the previous or next step, at the same turn and token."""
        self.stop_following()
        place = place_of(self.view, self.tokens.cursor) if self.view is not None else None
        found = await self.reader.call(related.at_step, self.episode_id, step)
        if found is None:
            where = "a later" if step > 0 else "an earlier"
            self.notify(f"This task was not tried at {where} step of this run.", timeout=3)
        else:
            self.load(found, place)

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def action_versions(self) -> None:
        """Two checkpoints on this task, side by side."""
        rows = await self.reader.call(related.versions, self.episode_id)
        other = related.other_version(rows, self.episode_id)
        if other is None:
            self.notify("Only one checkpoint tried this task: `agentrl eval` makes more.", timeout=4)
            return
        here = next(n for n, row in enumerate(rows) if row.id == self.episode_id)
        self.open_screen("versus", rows, (min(here, other), max(here, other)))

    @work(exclusive=True, group="browse", exit_on_error=False)
    async def action_same_flag(self) -> None:
        """All episodes of this step with the same flag."""
        from agentrl_cli.tui.common.episode_table import Browse
        text, run = await self.reader.call(related.same_flag, self.episode_id)
        if text:
            self.open_screen("episodes", Browse(text, "-time", run))
        else:
            self.notify("This episode has no flag.", timeout=2)

    # -- what if --------------------------------------------------------------------------------------------------

    def action_whatif(self) -> None:
        """Asks what to do from the cursor's turn on; the answer runs in a process of its own."""
        if self.view is None or not self.view.blocks or self.view.running:
            self.notify("There is nothing to go on from yet.", timeout=3)
            return
        turn = whatif_turn(self.view, self.tokens.cursor)
        again = "run its tool calls again and compare" if turn is None else f"re-roll from turn {turn}"
        choices = ["run its tool calls again, compare, score again", again, f"edit turn {turn} and go on", "what-ifs"]
        if turn is None:
            choices = choices[:1]

        def done(choice: int | None) -> None:
            if choice == 0:
                self._whatif("rerun")
            elif choice == 1:
                self._ask_whatif("re-roll", f"turn={turn} n=4 T=1.0 seed=0{self._model()}")
            elif choice == 2 and self.view is not None:
                self._ask_edit(f"turn={turn} n=1 T=1.0 seed=0{self._model()}", said_in(self.view, turn or 0))
            elif choice == 3:
                self._children()

        self.app.push_screen(Choose("what if", choices), done)

    def _model(self) -> str:
        """The run's last checkpoint, where there is a run that trains."""
        return f" model={self.view.run}@last" if self.view is not None and self.view.episode.kind == "train" else ""

    def _ask_whatif(self, label: str, value: str) -> None:
        def done(text: str | None) -> None:
            if text:
                self._whatif(text)

        self.app.push_screen(Prompt(label, value, help=WHATIF, check=whatif_arguments), done)

    def _ask_edit(self, settings: str, text: str) -> None:
        from agentrl_cli.tui.replay.rewrite import Rewrite

        def done(given: tuple[str, str] | None) -> None:
            if given is not None:
                self._whatif(given[0], given[1])

        self.app.push_screen(Rewrite("edit", settings, text, WHATIF, whatif_arguments), done)

    def _whatif(self, text: str, edit: str | None = None) -> None:
        arguments = whatif_arguments(text) + ([] if edit is None else ["--edit", edit])
        self.open_screen("whatif", self.episode_id, arguments)

    def _children(self) -> None:
        from agentrl_cli.tui.common.episode_table import Browse
        self.open_screen("episodes", Browse(f"parent:{self.episode_id}"))

    def action_chat(self) -> None:
        """A chat that starts with everything before the cursor's turn."""
        from agentrl_cli.tui.chat.client import ChatClient
        if self.view is None or not self.view.blocks:
            return
        turn = whatif_turn(self.view, self.tokens.cursor)
        place = len(self.view.episode.turns) if turn is None else turn
        arguments = ["--db", str(self.reader.path), "--episode", self.episode_id, "--turn", str(place)]
        if self.view.episode.kind == "train":
            arguments += ["--model", f"{self.view.run}@last"]
        self.open_screen("chat", ChatClient(arguments))

    # -- marks ----------------------------------------------------------------------------------------------------

    def action_tag(self) -> None:
        def done(text: str | None) -> None:
            if text:
                self._mark(related.change_tags, text.replace(",", " ").split())

        self.app.push_screen(Prompt("tags, with a minus in front to take one away", ""), done)

    def action_note(self) -> None:
        def done(text: str | None) -> None:
            if text is not None:
                self._mark(related.change_note, text)

        self.app.push_screen(Prompt("note", self.view.note if self.view is not None else ""), done)

    def action_bookmark(self) -> None:
        """Sets or takes the tag `mark`; the filter `tag:mark` lists all bookmarks."""
        marked = self.view is not None and related.BOOKMARK in self.view.tags
        self._mark(related.change_tags, [f"-{related.BOOKMARK}" if marked else related.BOOKMARK])

    @work(group="mark", exit_on_error=False)
    async def _mark(self, change: Callable[[Store, str, Any], tuple[tuple[str, ...], str]], value: Any) -> None:
        episode = self.episode_id
        tags, note = await self.reader.write(change, episode, value)
        if self.view is not None and self.episode_id == episode:
            self.view = replace(self.view, tags=tags, note=note)
            self._paint()
            self.notify(
                f"tags {', '.join(tags) or 'none'}" + (f"   note {note}" if note else ""), timeout=2, markup=False
            )

    # -- the rest -------------------------------------------------------------------------------------------------

    def action_fold(self) -> None:
        self.tokens.fold()

    def action_pane(self) -> None:
        """Group, transcript, inspector in turn, where only one of them has room."""
        if not self.has_class("-small"):
            right = self.query_one("#right", VerticalScroll)
            at_end = right.scroll_offset.y >= right.max_scroll_y
            right.scroll_home(animate=False) if at_end else right.scroll_page_down(animate=False)
            return
        order = ["", "-show-right", "-show-left"]
        here = next((name for name in order[1:] if self.has_class(name)), "")
        after = order[(order.index(here) + 1) % 3]
        for name in order[1:]:
            self.set_class(name == after, name)
        self.call_after_refresh(self._paint)

    def action_diff(self) -> None:
        if self.view is None or self.fork is None:
            self.notify("No sibling differs.", timeout=2)
            return
        self.tokens.move_to(min(self.fork.position, len(self.view.tokens) - 1))
        if self._cramped:
            lines = panels.fork_lines(self.fork, self.view, max(self.size.width - 12, 20))
            self.app.push_screen(Help("diff", "\n".join(line.plain for line in lines), what=""))

    def action_export(self) -> None:
        """Asks in which form."""
        many = self.view is not None and len(self.view.siblings) > 1
        choices = ["JSON lines", "one HTML page", "SVG of this screen"]
        choices += ["the whole group as one HTML page", "the whole group as JSON lines"] if many else []

        def done(choice: int | None) -> None:
            if choice == 2:
                self.action_svg()
            elif choice is not None:
                self._export(choice)

        self.app.push_screen(Choose("export", choices), done)

    @work(exclusive=True, group="export", exit_on_error=False)
    async def _export(self, choice: int) -> None:
        from agentrl_cli.analysis.html import export_html
        from agentrl_cli.tui.common.related import token_texts

        group, lines = choice > 2, choice in (0, 4)
        ids = [row.id for row in self.view.siblings] if group and self.view is not None else [self.episode_id]
        path = Path(f"{self.episode_id}{'-group' * group}.{'jsonl' if lines else 'html'}").absolute()
        if lines:
            await self.reader.export(ids, path)
        else:
            await self.reader.call(export_html, ids, path, token_texts, title=f"agentrl {self.episode_id}")
        self.notify(f"wrote {path}", markup=False)

    def action_palette(self) -> None:
        """The next set of colours."""
        names = list(PALETTES)
        use_palette(names[(names.index(palette_name()) + 1) % len(names)])
        for view in self.query(TokenView):
            view.recolor()
        self._paint()
        self.notify(f"colours {palette_name()}", timeout=2)

    @work(exclusive=True, group="export", exit_on_error=False)
    async def action_svg(self) -> None:
        """Writes the screen as a picture; asks first where it may show what looks like a secret."""
        if await self.reader.holds_secret(self.episode_id):
            self.app.push_screen(Confirm(*SECRET), lambda yes: self._draw() if yes else None)
        else:
            self._draw()

    def _draw(self) -> None:
        self.app.clear_notifications()  # the picture is of the screen, not of what was just said
        self.call_after_refresh(self._svg)

    def _svg(self) -> None:
        path = Path(f"replay-{self.episode_id}.svg").absolute()
        try:
            path.write_text(picture(self.app, f"agentrl replay {self.episode_id}"), "utf-8")
        except OSError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.notify(f"wrote {path}", markup=False)

    def action_copy(self) -> None:
        targets = self.copy_targets()

        def done(choice: int | None) -> None:
            if choice is not None:
                self.app.copy_to_clipboard(targets[choice][1])
                self.notify(f"copied {targets[choice][0]}", timeout=2, markup=False)

        self.app.push_screen(Choose("copy", [f"{name:<12} {visible(text)[:60]}" for name, text in targets]), done)

    def copy_targets(self) -> list[tuple[str, str]]:
        """(name, text) of what `y` offers."""
        if self.view is None or not self.view.blocks:
            return [("episode id", self.episode_id)]
        block = self.view.blocks[self.view.block_of(self.tokens.cursor)]
        return [
            ("token", self.view.texts[self.tokens.cursor] if self.view.texts else ""),
            ("turn", "".join(self.view.texts[block.start : block.end])),
            ("transcript", "".join(self.view.texts)),
            ("episode id", self.episode_id),
            ("link", self.link()),
            ("token ids", " ".join(str(i) for i in self.view.tokens.ids[block.start : block.end].tolist())),
        ]

    def action_help(self) -> None:
        self.app.push_screen(Help("replay", HELP))

    def action_back(self) -> None:
        leave(self.app)
