"""Chat line by line: without a terminal, in a pipe, in a script; as text or as JSON lines. Imports no textual."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rich.text import Text

from agentrl_cli.errors import AgentRLError, PolicyError
from agentrl_cli.hooks.waits import interruptible
from agentrl_cli.reports.legend import LEGEND, legend_lines
from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.commands import HELP, MODES, Command, carry_out, parse_command
from agentrl_cli.tui.chat.view import event_lines
from agentrl_cli.tui.common.token_text import TokenTexts

Event = dict[str, Any]
ON_SCREEN = "/edit and /context are for the screen; /undo and /tokens work here"


class PlainChat:
    """Reads lines, sends requests, prints the events, one request at a time."""

    def __init__(
        self,
        client: ChatClient,
        show: Callable[[Text], None],
        width: int = 100,
        emit: Callable[[Event], None] | None = None,
    ) -> None:
        """`show` gets lines of text; `emit`, if given, gets every event instead."""
        self.client, self.show, self.width, self.emit = client, show, width, emit
        self.errors = 0
        """Mistakes and failures so far."""
        self.mode = ""
        self.decoder = TokenTexts()
        self._turns: list[Event] = []
        self._fatal = self._over = False
        self.local: Mapping[str, Callable[[], Awaitable[None] | None]] = {
            **dict.fromkeys(("/quit", "/exit"), self._leave),
            **dict.fromkeys(("/edit", "/context"), partial(self._note, ON_SCREEN)),
            **{f"/{mode}": partial(self._show_mode, mode) for mode in MODES},
            "/help": partial(self._note, HELP),
            "/words": partial(self._note, "\n".join(legend_lines(LEGEND, width))),
            "/replay": partial(self.request, Command("save")),
        }

    async def run(self, lines: Iterator[str], prompt: Callable[[], None]) -> int:
        """Chats until `/quit` or the end of `lines`; `prompt` is called before each. Returns the exit status."""

        def read() -> str | None:
            prompt()
            with interruptible():  # the child is idle, and a thread would outlive Ctrl-C
                return next(lines, None)

        self._read = read
        await self.client.start()
        self._events = self.client.events()
        try:
            await self._until_idle()
            if self._over:
                return 1
            while not self._over and (line := read()) is not None:
                await carry_out(parse_command(line), self)
            return 0
        except AgentRLError as error:
            if self.emit is None or not self._fatal:
                self._show({"ev": "error", "message": error.message, "hint": error.hint})
            return error.exit_code
        except asyncio.CancelledError:  # Ctrl-C: a model that loads answers nothing
            await self.client.kill()
            raise
        finally:
            await self.client.stop()

    # -- commands -------------------------------------------------------------------------------------------------

    async def request(self, command: Command) -> None:
        """Sends a request and shows its events."""
        await self.client.send(command.op, **command.values)
        await self._until_idle()

    def show_problem(self, text: str) -> None:
        """Shows a mistake in a line."""
        self._show({"ev": "error", "message": text, "hint": ""})

    def _note(self, text: str) -> None:
        self._show({"ev": "note", "text": text})

    def _leave(self) -> None:
        self._over = True

    def _show_mode(self, mode: str) -> None:
        self.mode = "" if self.mode == mode else mode
        if self.emit is not None:
            self._note("every turn has its ids, origins and logp already")
            return
        for turn in self._turns:
            self._show(turn)

    # -- events ---------------------------------------------------------------------------------------------------

    _events: AsyncIterator[Event]

    async def _until_idle(self) -> None:
        """Shows events until the child waits again; the chat is over if it ended."""
        async for event in self._events:
            kind = event["ev"]
            if kind == "ready":
                self.decoder = TokenTexts(event["tokenizer"])
            elif kind == "turn":
                self._turns.append(event)
            elif kind == "cut":
                del self._turns[event["turns"] :]
            self._show(event)
            if kind == "ask":
                await self._decide()
            elif kind == "idle":
                return
            elif kind == "fatal":
                self._fatal = True
                error = PolicyError(event["message"], hint=event.get("hint") or "")
                error.exit_code = event.get("code") or error.exit_code
                raise error
        self._over = True

    async def _decide(self) -> None:
        """Asks about tool calls; the end of input refuses them, and so does leaving."""
        while (line := self._read()) is not None:
            command = parse_command(line, asked=True)
            if command.op == "answer":
                await self.client.send("answer", **command.values)
                return
            if command.local in ("/quit", "/exit"):
                self._leave()
                break
            self._note("y, n or /as-tool TEXT")
        await self.client.send("answer", run=False)

    def _show(self, event: Event) -> None:
        self.errors += event["ev"] in ("error", "fatal")
        if self.emit is not None:
            left_out = ("tokenizer", "template")
            self.emit({name: value for name, value in event.items() if name not in left_out})
        elif event["ev"] != "fatal":
            for text in event_lines(event, self.decoder, self.mode, self.width):
                self.show(text)
