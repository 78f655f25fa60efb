"""Chat line by line: without a terminal, in a pipe, in a script. Imports no textual."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TextIO

from rich.text import Text

from agentrl_cli.errors import AgentRLError, PolicyError
from agentrl_cli.tui.chat_client import HELP, ChatClient, parse_command
from agentrl_cli.tui.chat_view import event_lines
from agentrl_cli.tui.text import TokenTexts

Show = Callable[[Text], None]


class PlainChat:
    """Reads lines, sends requests, prints what comes back, one request at a time."""

    def __init__(self, client: ChatClient, show: Show, width: int = 100) -> None:
        self.client = client
        self.show = show
        self.width = width
        self.mode = ""
        self.saved = ""
        self.decoder = TokenTexts()
        self._turns: list[dict[str, Any]] = []

    async def run(self, lines: TextIO, prompt: Callable[[], None] = lambda: None) -> int:
        """Chats until `/quit` or the end of `lines`. Returns the exit code."""
        await self.client.start()
        events = self.client.events()
        try:
            if not await self._until_idle(events):
                return 1
            while True:
                prompt()
                line = await asyncio.to_thread(lines.readline)
                if not line or not await self._line(line, events, lines, prompt):
                    return 0
        except AgentRLError as error:
            self.show(Text(f"! {error.message} {error.hint}"))
            return error.exit_code
        finally:
            await self.client.stop()

    async def _line(
        self, line: str, events: AsyncIterator[dict[str, Any]], lines: TextIO, prompt: Callable[[], None]
    ) -> bool:
        """Handles one line; False where the chat is over."""
        command = parse_command(line)
        if command.problem:
            self.show(Text(f"! {command.problem}"))
        elif command.local == "quit":
            return False
        elif command.local == "help":
            self.show(Text(HELP))
        elif command.local in ("edit", "context"):
            self.show(Text("/edit and /context are for the screen; /undo and /tokens work here"))
        elif command.local == "replay":
            await self.client.send("save")
            return await self._until_idle(events, lines, prompt)
        elif command.local:
            self.mode = "" if self.mode == command.local else command.local
            for turn in self._turns:
                self._show(turn)
        elif command.op:
            await self.client.send(command.op, **command.values)
            return await self._until_idle(events, lines, prompt)
        return True

    async def _until_idle(
        self,
        events: AsyncIterator[dict[str, Any]],
        lines: TextIO | None = None,
        prompt: Callable[[], None] = lambda: None,
    ) -> bool:
        """Shows events until the child waits again; False where it ended."""
        async for event in events:
            kind = event["ev"]
            if kind == "ready":
                self.decoder = TokenTexts(event["tokenizer"])
            elif kind == "turn":
                self._turns.append(event)
            elif kind == "cut":
                del self._turns[event["turns"] :]
            elif kind == "saved":
                self.saved = event["episode"]
            self._show(event)
            if kind == "ask":
                await self._decide(lines, prompt)
            if kind == "idle":
                return True
            if kind == "fatal":
                raise PolicyError(event["message"], hint=event.get("hint") or "")
        return False

    async def _decide(self, lines: TextIO | None, prompt: Callable[[], None]) -> None:
        """Asks about tool calls; the end of input refuses them."""
        while lines is not None:
            prompt()
            line = await asyncio.to_thread(lines.readline)
            if not line:
                break
            command = parse_command(line, asked=True)
            if command.op == "answer":
                await self.client.send("answer", **command.values)
                return
            self.show(Text("y, n or /as-tool TEXT"))
        await self.client.send("answer", run=False)

    def _show(self, event: dict[str, Any]) -> None:
        if event["ev"] != "fatal":
            for text in event_lines(event, self.decoder, self.mode, self.width):
                self.show(text)
