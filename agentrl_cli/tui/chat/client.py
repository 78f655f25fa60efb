"""The client of a chat's child process: starts it, sends requests, yields its events. No textual, no torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from agentrl_cli.errors import AgentRLError, PolicyError

LINE_LIMIT = 64 * 1024 * 1024
"""Bytes of one event; `ready` carries a tokenizer of several megabytes."""


class ChatClient:
    """A child process that chats, or another `module` with the same protocol. `events` ends with the process."""

    def __init__(
        self, arguments: Sequence[str], module: str = "agentrl_cli.chat_session.child"
    ) -> None:
        """Prepare a child that runs `module` with `arguments`."""
        self.arguments = list(arguments)
        self.module = module
        self.stderr: deque[str] = deque(maxlen=40)
        self._process: asyncio.subprocess.Process | None = None
        self._stderr_task: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._over = False

    async def start(self) -> None:
        """Starts the child; it reports `ready` once the model is loaded. Raises PolicyError after `stop` or `kill`."""
        if self._over:
            raise PolicyError("This chat is over.")
        spawning = asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self.module, *self.arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
        )
        self._starting = asyncio.create_task(spawning)
        # A screen that closes now cancels this task, and `kill` must still find the child.
        self._process = await asyncio.shield(self._starting)
        self._stderr_task = asyncio.create_task(self._keep_stderr())

    async def _keep_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        async for line in self._process.stderr:
            self.stderr.append(line.decode("utf-8", "replace").rstrip())

    async def send(self, op: str, **values: Any) -> None:
        """Sends one request. Raises PolicyError if the child has not started, or has ended."""
        if self._process is None or self._process.stdin is None:
            raise PolicyError("The model's process has not started.")
        try:
            self._process.stdin.write((json.dumps({"op": op, **values}) + "\n").encode())
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PolicyError("The model's process has ended.", hint=self.last_words()) from error

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yields events until the child ends; after a crash a last `fatal` event with the end of its stderr."""
        assert self._process is not None and self._process.stdout is not None
        fatal = False
        async for line in self._process.stdout:
            event: dict[str, Any] = json.loads(line)
            fatal = fatal or event["ev"] == "fatal"
            yield event
        code = await self._process.wait()
        if self._stderr_task is not None:
            await self._stderr_task
        if code and not fatal:
            yield {
                "ev": "fatal",
                "message": f"The model's process ended with {code}.",
                "hint": self.last_words(),
                "code": 1,
            }

    async def listen(self, take: Callable[[dict[str, Any]], object], failure: str) -> None:
        """Starts the child and gives its events to `take`; an error is one of the kind `failure`."""
        try:
            await self.start()
            async for event in self.events():
                take(event)
        except (AgentRLError, OSError) as error:
            take({"ev": failure, "message": str(error), "hint": ""})

    def last_words(self) -> str:
        """Return the last lines of the child's stderr."""
        return "\n".join(list(self.stderr)[-4:])

    async def kill(self) -> None:
        """Ends the child at once, even while it is starting."""
        self._over = True
        if self._starting is not None:
            self._process = await self._starting
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._stderr_task is not None:
            self._stderr_task.cancel()
        # The pipes are not read any more, and asyncio closes them only at their end.
        getattr(self._process, "_transport").close()  # noqa: B009 - private, but the only handle

    async def stop(self) -> None:
        """Asks the child to end, and kills it after three seconds."""
        try:
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(PolicyError, TimeoutError):
                    await self.send("quit")
                    await asyncio.wait_for(self._process.wait(), 3)
        finally:
            await self.kill()
