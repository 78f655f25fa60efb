"""The screen's side of a chat: starts the child process, sends requests, yields its events. No textual, no torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.errors import PolicyError
from agentrl_cli.types.plain import parse_json

LINE_LIMIT = 64 * 1024 * 1024
"""Bytes of one event; `ready` carries a tokenizer of several megabytes."""


class ChatClient:
    """A child process that chats (or whatever `module` does in the same protocol). `events` ends when it does."""

    def __init__(self, arguments: Sequence[str], module: str = "agentrl_cli.servers.chat_session.child") -> None:
        """`arguments` of `module`."""
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
        self._starting = asyncio.create_task(self._spawn())
        # A screen that closes now cancels us, and the child must still be known to whoever ends it.
        self._process = await asyncio.shield(self._starting)
        self._stderr_task = asyncio.create_task(self._keep_stderr())

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.module,
            *self.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
        )

    async def _keep_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        async for line in self._process.stderr:
            self.stderr.append(line.decode("utf-8", "replace").rstrip())

    async def send(self, op: str, **values: Any) -> None:
        """Sends one request. Raises PolicyError where the child is gone."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps({"op": op, **values}) + "\n").encode())
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PolicyError("The model's process is gone.", hint=self.last_words()) from error

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Events in order; ends with the child. One that crashed yields a last `fatal` event with what it said."""
        assert self._process is not None and self._process.stdout is not None
        told = False
        async for line in self._process.stdout:
            event: dict[str, Any] = json.loads(line)
            told = told or event["ev"] == "fatal"
            yield event
        code = await self._process.wait()
        if self._stderr_task is not None:
            await self._stderr_task
        if code and not told:
            yield {
                "ev": "fatal",
                "message": f"The model's process ended with {code}.",
                "hint": self.last_words(),
                "code": 1,
            }

    def last_words(self) -> str:
        """The end of what the child wrote to stderr."""
        return "\n".join(list(self.stderr)[-4:])

    async def kill(self) -> None:
        """Ends the child at once, one that is only just starting too."""
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
        # Nobody reads the pipes any more, and asyncio closes them only at their end.
        getattr(self._process, "_transport").close()  # noqa: B009 - a private name, the only handle there is

    async def stop(self) -> None:
        """Asks the child to end, and makes it."""
        try:
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(PolicyError, TimeoutError):
                    await self.send("quit")
                    await asyncio.wait_for(self._process.wait(), 3)
        finally:
            await self.kill()


@dataclass
class Command:
    """What a line means: a request for the child, a local action, or words about a mistake."""

    op: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    local: str = ""
    """quit | help | tokens | mask | logprobs | replay | edit | context"""
    problem: str = ""


HELP = """\
text                  say it as the user (/as-user TEXT too)
/as-model TEXT        answer in the model's place
/as-tool TEXT         answer in the tool's place
/call NAME {"a": 1}   call a tool by hand
/retry                let the model answer again
/undo                 take the last exchange back
/edit                 change what was said last
/tokens /mask /logprobs   tokens; which may train; how likely
/context              the exact ids, and the template (F5;
                      shift+pgup, shift+pgdn scroll them)
/reward [X]           score by the pack, or give X
/save /replay         keep as an episode; and open it in replay
/approve [off]        ask before tools run
/simulate [on|off]    the simulated user: once, always, never
/set KEY VALUE        temperature, max_new_tokens, top_p …
/help  /quit
While a call waits: y runs it, n refuses, all or none decides the
rest too, /as-tool TEXT answers it."""

_TEXTS = {"/as-model": "as_model", "/as-tool": "as_tool", "/as-user": "user"}
_PLAIN = {"/undo": "undo", "/retry": "retry", "/save": "save"}
_LOCAL = {
    "/quit": "quit",
    "/exit": "quit",
    "/help": "help",
    "/tokens": "tokens",
    "/mask": "mask",
    "/logprobs": "logprobs",
    "/replay": "replay",
    "/edit": "edit",
    "/context": "context",
}


def parse_command(line: str, *, asked: bool = False) -> Command:
    """Reads a line. `asked`: tool calls wait for a decision."""
    word, _, rest = line.strip().partition(" ")
    rest = rest.strip().replace("\\n", "\n") if word in _TEXTS else rest.strip()
    if asked and word in ("y", "yes", "n", "no"):
        return Command("answer", {"run": word[0] == "y"})
    if asked and word in ("all", "none"):
        return Command("answer", {"run": word == "all", "rest": True})
    if asked and word == "/as-tool":
        return Command("answer", {"run": False, "text": rest})
    if word in _TEXTS:
        return Command(_TEXTS[word], {"text": rest}) if rest else Command(problem=f"{word} needs a text")
    if word in _PLAIN:
        return Command(_PLAIN[word])
    if word in _LOCAL:
        return Command(local=_LOCAL[word])
    if word == "/approve":
        return Command("approve", {"on": rest not in ("off", "no", "0")})
    if word == "/simulate":
        if rest not in ("", "on", "off"):
            return Command(problem="/simulate, /simulate on or /simulate off")
        return Command("simulate", {"on": rest == "on"} if rest else {})
    if word == "/reward":
        return _number("reward", "value", rest) if rest else Command("reward")
    if word == "/set":
        key, _, value = rest.partition(" ")
        if key not in SETTINGS:
            return Command(problem=f"/set {', '.join(SETTINGS[:-1])} or {SETTINGS[-1]}")
        return _number("set", key, value)
    if word == "/call":
        return _call(rest)
    if word.startswith("/") and word[1:].replace("-", "").isalpha():
        from agentrl_cli.errors import nearest

        near = nearest(word, COMMANDS)
        return Command(problem=f"no command {word}" + (f"; did you mean {near[0]}?" if near else "; /help lists them"))
    return Command("user", {"text": line.strip()}) if line.strip() else Command()


COMMANDS = sorted([*_TEXTS, *_PLAIN, *_LOCAL, "/approve", "/reward", "/set", "/simulate", "/call"])
SETTINGS = ("max_new_tokens", "min_p", "repetition_penalty", "temperature", "top_k", "top_p")


def complete(line: str, tools: Sequence[str]) -> tuple[str, list[str]]:
    """(the line completed as far as all choices agree, the choices): commands, then tools of /call, keys of /set."""
    head, space, rest = line.rpartition(" ")
    pool: Sequence[str] = ()
    if not space and line.startswith("/"):
        pool = COMMANDS
    elif head in ("/call", "/set"):
        pool = tools if head == "/call" else SETTINGS
    found = [word for word in pool if word.startswith(rest)]
    if not found:
        return line, []
    first, last = min(found), max(found)
    agree = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    common = first[:agree]
    return f"{head}{space}{common}{' ' if len(found) == 1 else ''}", found


def _number(op: str, key: str, text: str) -> Command:
    try:
        value: float = float(text)
    except ValueError:
        return Command(problem=f"{text!r} is no number")
    return Command(op, {key: int(value) if key in ("max_new_tokens", "top_k") else value})


def _call(rest: str) -> Command:
    name, _, text = rest.partition(" ")
    if not name:
        return Command(problem='/call NAME {"argument": value}')
    try:
        arguments = parse_json(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        return Command(problem=f"the arguments are no JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return Command(problem=f"the arguments cannot be used: {error}")
    if not isinstance(arguments, dict):
        return Command(problem="the arguments must be a JSON object")
    return Command("call", {"name": name, "arguments": arguments})
