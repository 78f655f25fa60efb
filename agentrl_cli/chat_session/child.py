"""The child process of `agentrl chat`: JSON lines on stdin and stdout, the model and its tools behind them.

    python -m agentrl_cli.chat_session.child --model tiny --pack code-task [--task ID] [--project DIR] …

Requests, one JSON object a line: `{"op": "user", "text"}`, `as_model`, `as_tool`, `call` (`name`, `arguments`), `undo`,
`retry`, `reward` (`value`; without it the pack scores), `save`, `approve` (`on`), `answer` (`run`, `text`, `rest`),
`simulate` (`on`; without it, ask the simulated user once), `set` (`temperature`, `max_new_tokens`), `cancel`, `quit`.
Events: `ready`, `token`, `turn`, `cut`, `ask`, `result`, `reward`, `saved`, `note`, `error`, and `idle` after each
request. Only this protocol reaches stdout: prints of libraries go to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from inspect import CORO_CREATED, getcoroutinestate
from pathlib import Path
from typing import Any, TextIO

from agentrl_cli.chat_session.conversation import Answer, failed_run
from agentrl_cli.chat_session.open import open_session
from agentrl_cli.chat_session.session import SETTINGS, Choices, Session, save
from agentrl_cli.envs.tool_env import as_env_error
from agentrl_cli.errors import AgentRLError, UsageError
from agentrl_cli.store import Store
from agentrl_cli.types import Episode, Sampling, Tokens, ToolCall, Turn
from agentrl_cli.types.content import content_text
from agentrl_cli.types.plain import parse_json


class Server:
    """Reads requests, runs them in order on the session, writes events."""

    session: Session
    choices: Choices
    """The tasks that `/task` opens."""

    def __init__(self, out: TextIO, db: Path) -> None:
        self.out, self.db = out, db
        self._answer: asyncio.Future[Answer] | None = None
        self._over = False
        self._job: asyncio.Task[None] | None = None

    # -- events ---------------------------------------------------------------------------------------------------

    def emit(self, event: dict[str, Any]) -> None:
        """Write one event."""
        if event["ev"] == "turn":
            event = turn_event(self.session, event["turn"], event["tokens"])
        elif event["ev"] == "token":
            token_text = self.session.talk.context.chat.tokenizer.token_text
            event = {"ev": "token", "text": token_text(event["id"])}
        write_event(self.out, event)

    async def ask(self, calls: tuple[ToolCall, ...]) -> Answer:
        """Ask the user about the first of a turn's remaining calls and wait for `answer`."""
        if self._over:  # stdin is closed: no answer can come
            return Answer(run=False)
        self._answer = asyncio.get_running_loop().create_future()
        of = len(self.session.turns[-1].calls)
        place = {"name": calls[0].name, "number": of - len(calls) + 1, "of": of}
        self.emit({"ev": "ask", **place, "calls": [call_object(call) for call in calls]})
        try:
            return await self._answer
        finally:
            self._answer = None

    def _decide(self, answer: Answer) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    # -- requests -------------------------------------------------------------------------------------------------

    async def serve(self, lines: asyncio.Queue[str | None]) -> None:
        """Handle requests until `quit` or end of input; `answer` and `cancel` act on the running request."""
        while (line := await lines.get()) is not None:
            try:
                request = parse_json(line)
                op = request["op"]
            except (ValueError, KeyError, TypeError) as error:
                self.emit({"ev": "error", "message": f"not a request: {error}", "hint": ""})
                continue
            if op == "quit":
                break
            if op == "answer":
                run, rest = bool(request.get("run", True)), bool(request.get("rest"))
                self._decide(Answer(run, request.get("text"), rest))
            elif op == "cancel":
                # One that has not begun would end without `idle`: this came while the model was loading.
                if self._job is not None and getcoroutinestate(self._work) != CORO_CREATED:
                    self._job.cancel()
            else:
                await self._await_job()
                self.begin(self._do(op, request))
        self._over = True
        self._decide(Answer(run=False))
        await self._await_job()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a request; a mistake or a failing model becomes an event, and the chat continues."""

        async def handle() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - an environment may raise anything, as when it rolls back
                problem = as_env_error(error)
                self.emit({"ev": "error", "message": problem.message, "hint": problem.hint})
            except asyncio.CancelledError:
                self.emit({"ev": "note", "text": "cancelled"})
            finally:
                self.emit({"ev": "idle"})

        self._work, self._job = work, asyncio.create_task(handle())

    async def resume(self, past: Episode, turn: int) -> None:
        """Continue a stored episode before its turn `turn`."""
        for item in (await self.session.talk.resume(past, turn)).reruns:
            if not item.same:
                text = f"{item.diverged}: run again, it returned {item.after.text!r:.200}"
                self.emit({"ev": "note", "text": text})
        if self.session.turns[-1].role != "assistant":
            text = "it is the model's turn: /retry samples it, /as-model TEXT writes it"
            self.emit({"ev": "note", "text": text})

    async def _await_job(self) -> None:
        if self._job is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._job
            self._job = None

    async def _do(self, op: str, request: dict[str, Any]) -> None:
        session, text = self.session, str(request.get("text") or "")
        match op:
            case "user":
                await session.user(text)
            case "as_model":
                await session.as_model(text)
            case "as_tool":
                await session.as_tool(text)
            case "retry":
                await session.retry()
            case "undo":
                self.emit({"ev": "note", "text": f"{await session.undo()} turns left"})
            case "call":
                name = str(request.get("name"))
                result = await session.call(name, dict(request.get("arguments") or {}))
                self.emit({"ev": "result", "name": name, **fields_of(result, RESULT)})
            case "reward":
                value = request.get("value")
                parts = await session.score() if value is None else session.give(float(value))
                total = sum(part.value * part.weight for part in parts)
                shown = [fields_of(part, PART) for part in parts]
                self.emit({"ev": "reward", "parts": shown, "total": total})
            case "task" if wanted := str(request.get("id") or ""):
                await session.start(self.choices.find(wanted))
            case "task":
                self.emit({"ev": "tasks", "tasks": self.choices.offer()})
            case "save":
                self.db.parent.mkdir(parents=True, exist_ok=True)
                with Store.open(self.db) as store:
                    self.emit({"ev": "saved", "episode": save(session, store), "db": str(self.db)})
            case "simulate" if "on" in request:
                session.options.simulate = bool(request["on"])
            case "simulate":
                await session.ask_user()
            case "approve":
                session.options.approve = self.ask if request.get("on", True) else None
            case "set":
                given = {k: request[k] for k in SETTINGS if k in request}
                if problem := Sampling(**given).problem:
                    raise UsageError(f"{problem.removeprefix('Sampling.')}.")
                if given.get("max_new_tokens", 1) < 1:
                    raise UsageError("max_new_tokens is not 1 or above.")
                session.options.sampling |= given
            case _:
                self.emit({"ev": "error", "message": f"unknown request {op!r}", "hint": ""})


RESULT = ("text", "error", "seconds")
PART = ("name", "value", "weight", "detail")


def fields_of(item: object, names: Sequence[str]) -> dict[str, Any]:
    """Return some attributes by name."""
    return {name: getattr(item, name) for name in names}


def write_event(out: TextIO, event: dict[str, Any]) -> None:
    """Write one line of the protocol."""
    out.write(json.dumps(event, ensure_ascii=False, default=str) + "\n")
    out.flush()


def turn_event(session: Session, turn: Turn, tokens: Tokens) -> dict[str, Any]:
    """Return a turn as JSON: its text and tokens, its calls and their results."""
    ids = tokens.ids.tolist()
    logp = tokens.logp_policy.tolist()
    run = failed_run(session.turns[: turn.index + 1]) if turn.role in ("assistant", "tool") else 0
    return {
        "ev": "turn",
        "index": turn.index,
        "role": turn.role,
        "text": session.talk.context.chat.decode(ids),
        "content": "\n".join(content_text(message.get("content")) for message in turn.messages),
        "ids": ids,
        "origin": tokens.origin.tolist(),
        "logp": [None if value != value else round(value, 4) for value in logp],
        "calls": [call_object(call) for call in turn.calls],
        "results": [
            fields_of(result, (*RESULT, "level")) | {"images": len(result.images)}
            for result in turn.results
        ],
        "stop": turn.stop_reason,
        # Number of this turn among those in a row whose calls could not be run; 0 for the first and others.
        "again": run if run > 1 else 0,
        "seconds": turn.seconds,
    }


def call_object(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as JSON."""
    return fields_of(call, ("name", "arguments", "raw", "error"))


SHARED: dict[str, dict[str, Any]] = {
    "--db": {"type": Path, "required": True},
    "--model": {},
    "--project": {"type": Path},
    "--temperature": {"type": float},
    "--seed": {"type": int, "default": 0},
    "--turn": {"type": int, "default": 0, "help": "continue the episode from this turn"},
    "--script": {"type": Path, "help": "replies of the scripted model, a JSON list of texts"},
}
"""Arguments of both children."""
ARGUMENTS: dict[str, dict[str, Any]] = SHARED | {
    "--pack": {"action": "append", "default": []},
    "--task": {},
    "--system": {},
    "--config": {"type": Path, "action": "append", "default": []},
    "--set": {"action": "append", "default": [], "dest": "sets"},
    "--approve": {"action": "store_true"},
    "--episode": {"help": "continue a stored episode"},
}


def parse(
    name: str, arguments: Mapping[str, Mapping[str, Any]], argv: Sequence[str]
) -> argparse.Namespace:
    """Return a child's own arguments; users run `agentrl chat` and `agentrl replay EP --whatif`."""
    parser = argparse.ArgumentParser(prog=f"agentrl_cli.chat_session.{name}")
    for flag, options in arguments.items():
        parser.add_argument(flag, **options)
    return parser.parse_args(argv)


async def run(argv: Sequence[str], lines: asyncio.Queue[str | None], out: TextIO) -> int:
    """Run the child: open the model, emit `ready`, serve. Returns the exit status."""
    given = parse("child", ARGUMENTS, argv)
    server = Server(out, given.db)
    try:
        async with open_session(given, server.emit) as opened:
            server.session, server.choices = opened.session, opened.choices
            if given.approve:
                opened.session.options.approve = server.ask
            server.emit(opened.ready)
            past = opened.past
            again = None if past is None else server.resume(past.episode, given.turn)
            server.begin(again or opened.session.begin())
            await server.serve(lines)
    except AgentRLError as error:
        return fatal(out, error)
    return 0


def fatal(out: TextIO, error: AgentRLError) -> int:
    """Write the error that ends a child. Returns the exit status."""
    event = {"message": error.message, "hint": error.hint, "code": error.exit_code}
    write_event(out, {"ev": "fatal", **event})
    return error.exit_code


def protocol_stdout() -> TextIO:
    """Return stdout for the protocol alone; prints of libraries go to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return out


def main() -> int:
    """Run the child on this process's stdin, read in a thread, and stdout."""
    out = protocol_stdout()

    async def serve() -> int:
        lines: asyncio.Queue[str | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, None)

        threading.Thread(target=read, daemon=True, name="requests").start()
        return await run(sys.argv[1:], lines, out)

    return asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main())
