"""Chat: talk to a checkpoint with its tools, see the exact tokens, act as model, tool or user.

The model lives in a child process (client.py); transcript.py draws its events, commands.py reads lines. `/help` lists
the commands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.commands import HELP, MODES, Command, carry_out, complete, parse_command
from agentrl_cli.tui.chat.transcript import ChatLine, ChatTranscript, ContextPane, History
from agentrl_cli.tui.chat.view import taken_back
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.keys import with_ids
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.token_text import TokenTexts

KEYS = (
    "enter send  ctrl+j new line  ↑/↓ past  tab complete  F2 tokens F3 mask F4 logp F5 ids"
    " F6 words  ctrl+x stop  /help /quit"
)


class ChatScreen(AgentScreen):
    """One conversation."""

    HELP_TITLE, HELP_TEXT = "chat", HELP
    BINDINGS: ClassVar[list[BindingType]] = with_ids(
        "chat",
        [
            *(
                Binding(keys, action, words, show=False, priority=True)
                for keys, action, words in (
                    ("pageup", "scroll(-1)", "previous page"),
                    ("pagedown", "scroll(1)", "next page"),
                    ("shift+pageup,ctrl+pageup", "side_scroll(-1)", "previous page of the ids"),
                    ("shift+pagedown,ctrl+pagedown", "side_scroll(1)", "next page of the ids"),
                )
            ),
            Binding("f2", "mode('tokens')", "tokens"),
            Binding("f3", "mode('mask')", "mask"),
            Binding("f4", "mode('logprobs')", "logprobs"),
            Binding("f5", "side", "exact ids and template"),
            Binding("ctrl+x", "cancel", "stop answering", priority=True),
            Binding("f1", "help", "help"),
            Binding("f6", "words", "words"),
            Binding("escape", "cancel", "stop answering", show=False),
        ],
    )
    busy = True
    over = False
    """Whether the model's process has ended."""
    asked = False
    """Whether a tool call waits for a decision."""
    model = template = ""
    tools: Sequence[str] = ()
    _replay_when_saved = False
    _editing = False
    """Whether the turn that is taken back next goes into the line."""

    def __init__(self, reader: Reader, client: ChatClient) -> None:
        super().__init__(reader)
        self.client = client
        self.transcript = ChatTranscript(id="talk")
        self.context = ContextPane(id="side", can_focus=False)
        self.history = History(Path(reader.path).parent / "chat-history.jsonl")
        self.waiting: deque[Command] = deque()
        """Requests typed while the model was loading or busy."""
        self.take_actions(scroll=self.transcript.page, side_scroll=self.context.page)
        self.local: Mapping[str, Callable[[], Awaitable[None] | None]] = {
            **dict.fromkeys(("/quit", "/exit"), self.action_back),
            **{f"/{mode}": partial(self.action_mode, mode) for mode in MODES},
            "/help": self.action_help,
            "/words": self.action_words,
            "/context": self.action_side,
            "/edit": self._edit_last,
            "/replay": self._save_and_replay,
        }

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Horizontal(self.transcript, self.context, id="both")
        yield ChatLine(placeholder="loading the model …", id="line")
        yield Static(Text(KEYS, no_wrap=True), id="keys")

    def on_mount(self) -> None:
        self._head()
        self.line.typed = self.history
        self.line.focus()
        self.listen()

    def paint(self) -> None:
        """Draws every turn for the width as it is now."""
        self.transcript.redraw()

    async def on_unmount(self) -> None:
        if self in self.app.screen_stack:  # the application ends
            await self.client.stop()
        else:  # a model that loads or answers takes its time, in which the other screens wait for no key
            self.app.run_worker(self.client.stop(), exit_on_error=False)

    @property
    def line(self) -> ChatLine:
        return self.query_one(ChatLine)

    def _head(self) -> None:
        state = "waits for y or n" if self.asked else "…" if self.busy else "your turn"
        mode = f"   showing {self.transcript.mode}" if self.transcript.mode else ""
        self.put_head(f"agentrl chat   {self.model or 'loading the model'}   {state}{mode}")

    # -- events ---------------------------------------------------------------------------------------------------

    @work(group="listen", exit_on_error=False)
    async def listen(self) -> None:
        """Draws the child's events as long as it lives."""
        await self.client.listen(self.take, "error")
        self.busy = self.over = True
        self.model = f"{self.model} (ended)".strip()
        self.line.placeholder = "it has ended: /quit goes back"
        self._head()

    def take(self, event: dict[str, Any]) -> None:
        """Shows one event."""
        kind, transcript = event["ev"], self.transcript
        if kind == "token":
            transcript.add_token(event["text"])
            return
        transcript.clear_stream()
        if kind == "ready":
            transcript.decoder = TokenTexts(event["tokenizer"])
            self.model = f"{event['model']}  {event['pack']}"
            self.tools, self.template = list(event["tools"]), str(event.get("template") or "")
            self.line.placeholder = "say something, or /help"
        elif kind == "idle":
            self.busy = self.asked = self._editing = False
            if self.waiting:  # while the model was loading or busy
                sending = self._send(self.waiting.popleft())
                self.run_worker(sending, group="waiting", exit_on_error=False)
        elif kind == "ask":
            self.asked = True
        elif kind == "saved" and self._replay_when_saved:
            self._replay_when_saved = False
            self.open_screen("replay", event["episode"])
        elif kind == "cut" and self._editing:
            self.line.put(taken_back(transcript.turns, event["turns"], transcript.decoder))
        if kind == "cut":
            transcript.drop(event["turns"])
        else:
            transcript.add(event)
        if kind in ("turn", "cut", "ready"):
            self._paint_context()
        self._head()

    # -- lines ----------------------------------------------------------------------------------------------------

    async def on_chat_line_submitted(self, event: ChatLine.Submitted) -> None:
        self.line.put("")
        if event.text.strip():
            self.history.add(event.text)
            await carry_out(parse_command(event.text, asked=self.asked), self)

    def on_chat_line_completion(self) -> None:
        """Completes as far as commands, tools and settings agree, and shows several choices."""
        text, choices = complete(self.line.text, self.tools)
        self.line.put(text)
        if len(choices) > 1:
            self.notify("  ".join(choices), timeout=4, markup=False)

    async def request(self, command: Command) -> None:
        """Sends a request, or keeps it until the model is done."""
        if self.over:
            self.show_problem("The model's process has ended: /quit goes back.")
        elif self.busy and command.op != "answer":
            self.waiting.append(command)
            text = "waiting; it is sent when the model is done. ctrl+x stops it."
            self.notify(f"{len(self.waiting)} {text}", timeout=3)
        else:
            await self._send(command)

    async def _send(self, command: Command) -> None:
        if command.op == "answer":
            self.asked = False
        self.busy = True
        self._head()
        try:
            await self.client.send(command.op, **command.values)
        except AgentRLError as error:
            self.take({"ev": "error", "message": error.message, "hint": error.hint})

    def show_problem(self, text: str) -> None:
        """Shows a mistake in a line; the answer that is being generated stays."""
        self.transcript.add({"ev": "error", "message": text, "hint": ""})

    async def _edit_last(self) -> None:
        """Takes the last exchange back; its first message goes into the line once the child has done so."""
        if self.busy or not self.transcript.turns:
            self.notify("There is nothing to edit yet.", timeout=3)
            return
        self._editing = True
        await self._send(Command("undo"))

    async def _save_and_replay(self) -> None:
        self._replay_when_saved = True
        await self.request(Command("save"))

    # -- keys -----------------------------------------------------------------------------------------------------

    def action_mode(self, name: str) -> None:
        self.transcript.mode = "" if self.transcript.mode == name else name
        self.transcript.redraw()
        self._head()

    def action_side(self) -> None:
        """Shows or hides the exact ids and the template."""
        self.toggle_class("-side")
        self.call_after_refresh(self.paint)
        self._paint_context()

    def _paint_context(self) -> None:
        if self.has_class("-side"):
            self.context.show(self.transcript.turns, self.transcript.decoder, self.template)

    async def action_cancel(self) -> None:
        if self.busy:
            await self._send(Command("cancel"))
