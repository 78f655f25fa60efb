"""Chat: talk to a checkpoint with its tools, see the exact tokens, act as model, tool or user.

The model lives in a child process (chat_client.py); this draws events and reads lines. `/help` lists the commands.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.chat.client import HELP, ChatClient, complete, parse_command
from agentrl_cli.tui.chat.line_input import ChatLine, add_history, read_history
from agentrl_cli.tui.chat.view import context_lines, event_lines, taken_back
from agentrl_cli.tui.common.dialogs import AgentScreen, Help, leave, named
from agentrl_cli.tui.common.panels import join
from agentrl_cli.tui.common.token_text import TokenTexts

if TYPE_CHECKING:
    from agentrl_cli.tui.common.reader import Reader

KEYS = (
    "enter send  ctrl+j new line  ↑/↓ history  tab complete  F2 tokens F3 mask F4 logp F5 ids  ctrl+x stop  /help /quit"
)


class ChatScreen(AgentScreen):
    """One conversation."""

    BINDINGS: ClassVar[list[BindingType]] = named(
        "chat",
        [
            Binding("pageup", "scroll(-1)", "page", show=False, priority=True),
            Binding("pagedown", "scroll(1)", "page", show=False, priority=True),
            Binding("shift+pageup,ctrl+pageup", "side_scroll(-1)", "page of the ids", show=False, priority=True),
            Binding("shift+pagedown,ctrl+pagedown", "side_scroll(1)", "page of the ids", show=False, priority=True),
            Binding("f2", "mode('tokens')", "tokens"),
            Binding("f3", "mode('mask')", "mask"),
            Binding("f4", "mode('logprobs')", "logprobs"),
            Binding("f5", "side", "exact ids and template"),
            Binding("ctrl+x", "cancel", "stop answering", priority=True),
            Binding("f1", "help", "help"),
            Binding("escape", "cancel", show=False),
        ],
    )

    def __init__(self, reader: Reader, client: ChatClient) -> None:
        super().__init__()
        self.reader = reader
        self.client = client
        self.mode = ""
        self.decoder = TokenTexts()
        self.busy = True
        self.asked = False
        self.model = ""
        self._events: list[tuple[dict[str, Any], Static]] = []
        self._stream = ""
        self._history_file = Path(reader.path).parent / "chat-history.jsonl"
        self._history = read_history(self._history_file)
        self._at = len(self._history)
        self._replay_when_saved = False
        self._editing = False
        """Whether what is taken back next goes into the line."""
        self.tools: list[str] = []
        self.template = ""
        self.waiting: deque[str] = deque()
        """Lines typed while the model was loading or busy."""

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with Horizontal(id="both"):
            with VerticalScroll(id="talk", can_focus=False):
                yield Static(id="stream")
            with VerticalScroll(id="side", can_focus=False):
                yield Static(id="exact")
        yield ChatLine(placeholder="loading the model …", id="line")
        yield Static(Text(KEYS, no_wrap=True), id="keys")

    def on_mount(self) -> None:
        self._head()
        self.line.focus()
        self.listen()

    def on_resize(self) -> None:
        self.call_after_refresh(self._redraw)

    async def on_unmount(self) -> None:
        await self.client.stop()

    def _head(self) -> None:
        state = "waits for y or n" if self.asked else "…" if self.busy else "your turn"
        mode = f"   showing {self.mode}" if self.mode else ""
        text = Text(f"agentrl chat   {self.model or 'loading the model'}   {state}{mode}", "bold", no_wrap=True)
        self.query_one("#head", Static).update(text)

    @property
    def _width(self) -> int:
        return max((self.size.width * 3 // 5 if self.has_class("-side") else self.size.width) - 4, 20)

    # -- events ---------------------------------------------------------------------------------------------------

    @work(group="listen", exit_on_error=False)
    async def listen(self) -> None:
        """Draws the child's events as long as it lives."""
        try:
            await self.client.start()
            async for event in self.client.events():
                self.take(event)
        except (AgentRLError, OSError) as error:
            self.take({"ev": "error", "message": str(error), "hint": ""})
        self.busy = True
        self.model = f"{self.model} (ended)"
        self._head()

    def take(self, event: dict[str, Any]) -> None:
        """One event onto the screen."""
        kind = event["ev"]
        if kind == "token":
            self._stream += event["text"]
            self.query_one("#stream", Static).update(Text(self._stream, "italic #c8c8c8"))
            self._to_end()
            return
        if kind == "ready":
            self.decoder = TokenTexts(event["tokenizer"])
            self.model = f"{event['model']}  {event['pack']}"
            self.tools, self.template = list(event["tools"]), str(event.get("template") or "")
            self.line.placeholder = "say something, or /help"
        self._clear_stream()
        if kind == "idle":
            self.busy = self.asked = self._editing = False
            if self.waiting:
                self._send_waiting()
        elif kind == "ask":
            self.asked = True
        elif kind == "cut":
            if self._editing:
                self.line.put(taken_back([e for e, _ in self._events if e["ev"] == "turn"], event["turns"]))
            self._drop(event["turns"])
        elif kind == "saved" and self._replay_when_saved:
            self._open_replay(event["episode"])
        lines = event_lines(event, self.decoder, self.mode, self._width)
        if lines and kind != "cut":
            self._add(event, lines)
        if kind in ("turn", "cut", "ready"):
            self._paint_side()
        self._head()

    def _add(self, event: dict[str, Any], lines: list[Text]) -> None:
        widget = Static(join(lines), classes=f"event {event['ev']}")
        self._events.append((event, widget))
        self.query_one("#talk").mount(widget, before=self.query_one("#stream"))
        self._to_end()

    def _to_end(self) -> None:
        talk = self.query_one("#talk", VerticalScroll)
        talk.scroll_end(animate=False)
        self.call_after_refresh(talk.scroll_end, animate=False)  # what was mounted just now has its height only then

    def _clear_stream(self) -> None:
        self._stream = ""
        self.query_one("#stream", Static).update("")

    def _drop(self, keep: int) -> None:
        """Takes turns from `keep` on off the screen, with what was said about them."""
        first = next((n for n, (e, _) in enumerate(self._events) if e["ev"] == "turn" and e["index"] >= keep), None)
        if first is not None:
            for _, widget in self._events[first:]:
                widget.remove()
            del self._events[first:]

    def _redraw(self) -> None:
        for event, widget in self._events:
            widget.update(join(event_lines(event, self.decoder, self.mode, self._width)))
        self._to_end()

    # -- lines ----------------------------------------------------------------------------------------------------

    @property
    def line(self) -> ChatLine:
        return self.query_one(ChatLine)

    async def on_chat_line_submitted(self, event: ChatLine.Submitted) -> None:
        line = event.text
        self.line.put("")
        if not line.strip():
            return
        self._history.append(line)
        add_history(self._history_file, line)
        self._at = len(self._history)
        command = parse_command(line, asked=self.asked)
        if command.problem:
            self.take({"ev": "error", "message": command.problem, "hint": ""})
        elif command.local == "quit":
            leave(self.app)
        elif command.local == "help":
            self.action_help()
        elif command.local == "edit":
            await self._edit()
        elif command.local == "context":
            self.action_side()
        elif command.local == "replay":
            self._replay_when_saved = True
            await self._send("save", {})
        elif command.local:
            self.action_mode(command.local)
        elif self.busy and command.op != "answer":
            self.waiting.append(line)
            self.notify(f"{len(self.waiting)} waiting; it is sent when the model is done. ctrl+x stops it.", timeout=3)
        elif command.op:
            await self._send(command.op, command.values)

    async def _send(self, op: str, values: dict[str, Any]) -> None:
        if op == "answer":
            self.asked = False
        self.busy = True
        self._head()
        try:
            await self.client.send(op, **values)
        except AgentRLError as error:
            self.take({"ev": "error", "message": error.message, "hint": error.hint})

    @work(group="waiting", exit_on_error=False)
    async def _send_waiting(self) -> None:
        """The first line that was typed while the model was loading or busy."""
        command = parse_command(self.waiting.popleft())
        if command.op:
            await self._send(command.op, command.values)

    def _open_replay(self, episode: str) -> None:
        self._replay_when_saved = False
        self.open_screen("replay", episode)

    # -- keys -----------------------------------------------------------------------------------------------------

    def action_mode(self, name: str) -> None:
        self.mode = "" if self.mode == name else name
        self._redraw()
        self._head()

    def on_chat_line_history(self, event: ChatLine.History) -> None:
        if self._history:
            self._at = max(0, min(self._at + event.step, len(self._history)))
            self.line.put(self._history[self._at] if self._at < len(self._history) else "")

    def on_chat_line_completion(self) -> None:
        """Tab: as far as commands, tools and settings agree; several are told."""
        text, choices = complete(self.line.text, self.tools)
        self.line.put(text)
        if len(choices) > 1:
            self.notify("  ".join(choices), timeout=4, markup=False)

    async def _edit(self) -> None:
        """Takes the last exchange back; what was said in it goes into the line once the child has done so."""
        if self.busy or not any(event["ev"] == "turn" for event, _ in self._events):
            self.notify("There is nothing to edit yet.", timeout=3)
            return
        self._editing = True
        await self._send("undo", {})

    def action_side(self) -> None:
        """Shows or hides the exact ids and the template's rendering."""
        self.toggle_class("-side")
        self.call_after_refresh(self._redraw)
        self._paint_side()

    def _paint_side(self) -> None:
        if self.has_class("-side"):
            turns = [event for event, _ in self._events if event["ev"] == "turn"]
            self.query_one("#exact", Static).update(join(context_lines(turns, self.decoder, self.template)))

    def action_scroll(self, sign: int) -> None:
        talk = self.query_one("#talk", VerticalScroll)
        talk.scroll_relative(y=sign * max(talk.size.height - 2, 1), animate=False)

    def action_side_scroll(self, sign: int) -> None:
        side = self.query_one("#side", VerticalScroll)
        side.scroll_relative(y=sign * max(side.size.height - 2, 1), animate=False)

    async def action_cancel(self) -> None:
        if self.busy:
            await self._send("cancel", {})

    def action_help(self) -> None:
        self.app.push_screen(Help("chat", HELP))
