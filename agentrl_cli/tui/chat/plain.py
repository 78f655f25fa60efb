"""Chat line by line: without a terminal, in a pipe, in a script; as text or as JSON lines. Imports no textual."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

from rich.text import Text

from agentrl_cli.errors import AgentRLError, PolicyError
from agentrl_cli.tui.chat.client import HELP, ChatClient, parse_command
from agentrl_cli.tui.chat.view import event_lines
from agentrl_cli.tui.common.token_text import TokenTexts

Show = Callable[[Text], None]
Tell = Callable[[dict[str, Any]], None]


class Lines(Protocol):
    """Where lines come from: a file, or anything that can be read by lines. An empty one is the end."""

    def readline(self) -> str: ...


class Said:
    """Texts as such lines; a text of several lines is one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)

    def readline(self) -> str:
        """The next text, with the newline that says it is not the end."""
        return next((text + "\n" for text in self._texts), "")


class PlainChat:
    """Reads lines, sends requests, prints what comes back, one request at a time."""

    def __init__(self, client: ChatClient, show: Show, width: int = 100, tell: Tell | None = None) -> None:
        """`tell` gets every event as it is, in place of the lines that `show` gets."""
        self.client = client
        self.show = show
        self.tell = tell
        self.errors = 0
        """Mistakes and failures so far."""
        self.width = width
        self.mode = ""
        self.saved = ""
        self._fatal = False
        self.decoder = TokenTexts()
        self._turns: list[dict[str, Any]] = []

    async def run(self, lines: Lines, prompt: Callable[[], None] = lambda: None) -> int:
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
            if self.tell is None or not self._fatal:
                self._show({"ev": "error", "message": error.message, "hint": error.hint})
            return error.exit_code
        finally:
            await self.client.stop()

    async def _line(
        self, line: str, events: AsyncIterator[dict[str, Any]], lines: Lines, prompt: Callable[[], None]
    ) -> bool:
        """Handles one line; False where the chat is over."""
        command = parse_command(line)
        if command.problem:
            self._show({"ev": "error", "message": command.problem, "hint": ""})
        elif command.local == "quit":
            return False
        elif command.local == "help":
            self._show({"ev": "note", "text": HELP})
        elif command.local in ("edit", "context"):
            self._show({"ev": "note", "text": "/edit and /context are for the screen; /undo and /tokens work here"})
        elif command.local == "replay":
            await self.client.send("save")
            return await self._until_idle(events, lines, prompt)
        elif command.local:
            self.mode = "" if self.mode == command.local else command.local
            if self.tell is not None:
                self._show({"ev": "note", "text": "every turn has its ids, origins and logp already"})
                return True
            for turn in self._turns:
                self._show(turn)
        elif command.op:
            await self.client.send(command.op, **command.values)
            return await self._until_idle(events, lines, prompt)
        return True

    async def _until_idle(
        self,
        events: AsyncIterator[dict[str, Any]],
        lines: Lines | None = None,
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
                self._fatal = True
                error = PolicyError(event["message"], hint=event.get("hint") or "")
                error.exit_code = event.get("code") or error.exit_code
                raise error
        return False

    async def _decide(self, lines: Lines | None, prompt: Callable[[], None]) -> None:
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
            self._show({"ev": "note", "text": "y, n or /as-tool TEXT"})
        await self.client.send("answer", run=False)

    def _show(self, event: dict[str, Any]) -> None:
        self.errors += event["ev"] in ("error", "fatal")
        if self.tell is not None:
            self.tell({name: value for name, value in event.items() if name not in ("tokenizer", "template")})
        elif event["ev"] != "fatal":
            for text in event_lines(event, self.decoder, self.mode, self.width):
                self.show(text)
