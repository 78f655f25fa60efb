"""The child process of `agentrl chat`: JSON lines on stdin and stdout, the model and its tools behind them.

    python -m agentrl_cli.servers.chat_session.child --model tiny --pack code-task [--task ID] [--project DIR] …

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
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from agentrl_cli.errors import AgentRLError
from agentrl_cli.servers.chat_session.choices import Choices
from agentrl_cli.servers.chat_session.conversation import failed_run
from agentrl_cli.servers.chat_session.session import SETTINGS, Answer, Session
from agentrl_cli.types import Episode, Message, ToolCall, Turn
from agentrl_cli.types.content import content_text
from agentrl_cli.types.plain import parse_json


class Server:
    """Reads requests, runs them in order on the session, writes events."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.session: Session | None = None
        self.db: Path | None = None
        self.choices: Choices | None = None
        """The tasks that `/task` opens."""
        self._answer: asyncio.Future[Answer] | None = None
        self._over = False
        self._job: asyncio.Task[None] | None = None

    # -- events ---------------------------------------------------------------------------------------------------

    def emit(self, event: dict[str, Any]) -> None:
        """Writes one event."""
        if event["ev"] == "turn":
            event = self._turn_event(event)
        elif event["ev"] == "token" and self.session is not None:
            event = {"ev": "token", "text": self.session.chat.tokenizer.token_text(event["id"])}
        self.out.write(json.dumps(event, ensure_ascii=False, default=str) + "\n")
        self.out.flush()

    def _turn_event(self, event: dict[str, Any]) -> dict[str, Any]:
        assert self.session is not None
        turn: Turn = event["turn"]
        tokens, decoder = event["tokens"], self.session.chat.tokenizer
        ids = tokens.ids.tolist()
        return {
            "ev": "turn",
            "index": turn.index,
            "role": turn.role,
            "text": decoder.decode(ids),
            "content": "\n".join(content_text(message.get("content")) for message in turn.messages),
            "ids": ids,
            "origin": tokens.origin.tolist(),
            "logp": [
                None if value != value else round(value, 4) for value in tokens.logp_policy.tolist()
            ],
            "calls": [call_object(call) for call in turn.calls],
            "results": [
                {
                    "text": r.text,
                    "error": r.error,
                    "seconds": r.seconds,
                    "level": r.level,
                    "images": len(r.images),
                }
                for r in turn.results
            ],
            "stop": turn.stop_reason,
            "again": self._again(turn),
            "seconds": turn.seconds,
        }

    def _again(self, turn: Turn) -> int:
        """Return the number of this turn among those in a row whose calls could not be run; 0 for
        the first and others.
        """
        assert self.session is not None
        count = (
            failed_run(self.session.turns[: turn.index + 1])
            if turn.role in ("assistant", "tool")
            else 0
        )
        return count if count > 1 else 0

    async def ask(self, calls: tuple[ToolCall, ...]) -> Answer:
        """Asks the user about the first of a turn's remaining calls and waits for `answer`."""
        if self._over:  # stdin is closed: no answer can come
            return Answer(run=False)
        self._answer = asyncio.get_running_loop().create_future()
        turns = self.session.turns if self.session is not None else []
        of = len(turns[-1].calls) if turns else len(calls)
        place = {"name": calls[0].name if calls else "", "number": of - len(calls) + 1, "of": of}
        self.emit({"ev": "ask", **place, "calls": [call_object(call) for call in calls]})
        try:
            return await self._answer
        finally:
            self._answer = None

    # -- requests -------------------------------------------------------------------------------------------------

    async def serve(self, lines: asyncio.Queue[str | None]) -> None:
        """Handles requests until `quit` or end of input; `answer` and `cancel` act on the running request."""
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
                if self._answer is not None and not self._answer.done():
                    decided = Answer(
                        bool(request.get("run", True)),
                        request.get("text"),
                        bool(request.get("rest")),
                    )
                    self._answer.set_result(decided)
                continue
            if op == "cancel":
                if self._job is not None:
                    self._job.cancel()
                continue
            await self._finished()
            self._job = asyncio.create_task(self._handle(op, request))
        self._over = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Answer(run=False))
        await self._finished()

    async def begin(
        self, prompt: Sequence[Message], past: Episode | None = None, turn: int = 0
    ) -> None:
        """Starts the conversation, or resumes a stored one before its turn `turn`.

        If the prompt ends with a user message, the model answers it while requests are read.
        """

        async def first() -> None:
            assert self.session is not None
            try:
                if past is None:
                    await self.session.begin(prompt)
                else:
                    await self._resume(past, turn)
            except AgentRLError as error:
                self.emit({"ev": "error", "message": error.message, "hint": error.hint})
            finally:
                self.emit({"ev": "idle"})

        self._job = asyncio.create_task(first())

    async def _resume(self, past: Episode, turn: int) -> None:
        assert self.session is not None
        for item in (await self.session.resume(past, turn)).reruns:
            if not item.same:
                self.emit(
                    {
                        "ev": "note",
                        "text": f"{item.diverged}: run again, it returned {item.after.text!r:.200}",
                    }
                )
        if self.session.turns[-1].role != "assistant":
            self.emit(
                {
                    "ev": "note",
                    "text": "it is the model's turn: /retry samples it, /as-model TEXT writes it",
                }
            )

    async def _finished(self) -> None:
        if self._job is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._job
            self._job = None

    async def _handle(self, op: str, request: dict[str, Any]) -> None:
        """Handles one request; a mistake or a failing model becomes an event, and the chat continues."""
        try:
            await self._do(op, request)
        except AgentRLError as error:
            self.emit({"ev": "error", "message": error.message, "hint": error.hint})
        except asyncio.CancelledError:
            self.emit({"ev": "note", "text": "cancelled"})
        finally:
            self.emit({"ev": "idle"})

    async def _do(self, op: str, request: dict[str, Any]) -> None:
        session = self.session
        assert session is not None
        text = str(request.get("text") or "")
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
                result = await session.call(
                    str(request.get("name")), dict(request.get("arguments") or {})
                )
                self.emit(
                    {
                        "ev": "result",
                        "name": request.get("name"),
                        "text": result.text,
                        "error": result.error,
                        "seconds": result.seconds,
                    }
                )
            case "reward":
                value = request.get("value")
                parts = await session.score() if value is None else session.give(float(value))
                total = sum(part.value * part.weight for part in parts)
                shown = [
                    {"name": p.name, "value": p.value, "weight": p.weight, "detail": p.detail}
                    for p in parts
                ]
                self.emit({"ev": "reward", "parts": shown, "total": total})
            case "task":
                await self._task(str(request.get("id") or ""))
            case "save":
                self.emit({"ev": "saved", "episode": self._save(), "db": str(self.db)})
            case "simulate":
                if "on" in request:
                    session.simulate = bool(request["on"])
                else:
                    await session.ask_user()
            case "approve":
                session.approve = self.ask if request.get("on", True) else None
            case "set":
                fields = {k: request[k] for k in SETTINGS if k in request}
                session.sampling = replace(session.sampling, **fields)
            case _:
                self.emit({"ev": "error", "message": f"unknown request {op!r}", "hint": ""})

    async def _task(self, wanted: str) -> None:
        """Opens a task by its id, or its number among those offered last; without one, offers three others."""
        assert self.session is not None and self.choices is not None
        if not wanted:
            self.emit({"ev": "tasks", "tasks": self.choices.offer()})
            return
        task = self.choices.find(wanted)
        await self.session.start(task, partial(self.choices.make, task))

    def _save(self) -> str:
        from agentrl_cli.store import Store

        assert self.session is not None and self.db is not None
        self.db.parent.mkdir(parents=True, exist_ok=True)
        with Store.open(self.db) as store:
            return self.session.save(store)


def call_object(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as JSON."""
    return {"name": call.name, "arguments": call.arguments, "raw": call.raw, "error": call.error}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the child's own arguments; users run `agentrl chat`."""
    parser = argparse.ArgumentParser(
        prog="agentrl_cli.servers.chat_session.child", description=__doc__
    )
    parser.add_argument("--model")
    parser.add_argument("--pack", action="append", default=[])
    parser.add_argument("--task")
    parser.add_argument("--system")
    parser.add_argument("--project", type=Path)
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--approve", action="store_true")
    parser.add_argument("--episode", help="continue a stored episode")
    parser.add_argument("--turn", type=int, default=0, help="from this turn")
    parser.add_argument(
        "--script", type=Path, help="replies of the scripted model, a JSON list of texts"
    )
    return parser.parse_args(argv)


async def run(argv: Sequence[str], lines: asyncio.Queue[str | None], out: TextIO) -> int:
    """Runs the child: opens the model, emits `ready`, serves. Returns the exit status."""
    from agentrl_cli.servers.chat_session.open import open_session

    server = Server(out)
    given = parse_arguments(argv)
    server.db = given.db
    try:
        opened = await open_session(given, server.emit)
    except AgentRLError as error:
        server.emit(
            {"ev": "fatal", "message": error.message, "hint": error.hint, "code": error.exit_code}
        )
        return error.exit_code
    try:
        server.session, server.choices = opened.session, opened.choices
        if given.approve:
            opened.session.approve = server.ask
        server.emit(opened.ready)
        await server.begin(
            opened.prompt, opened.past.episode if opened.past is not None else None, given.turn
        )
        await server.serve(lines)
    finally:
        await opened.close()
    return 0


def main() -> int:
    """Entry point: keeps stdout for the protocol, reads stdin in a thread."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

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
