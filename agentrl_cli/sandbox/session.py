"""`Session`: the box of one episode. A Python session whose variables persist, programs, commands, files.

If a box is lost through an infrastructure fault, the session is rebuilt on a fresh one by running its recorded requests
again, and the request is tried once more. A second loss is a SandboxFault, and the episode is masked.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from agentrl_cli.config.models import LimitsConfig
from agentrl_cli.errors import SandboxFault, SandboxUnavailable, UsageError
from agentrl_cli.sandbox.channel import GRACE, BoxLost, Channel
from agentrl_cli.sandbox.pool import RunnerPool
from agentrl_cli.sandbox.results import USED, Entry, ExecResult, Listing, Status, limit_of
from agentrl_cli.sandbox.runner_process import AT_ONCE, Runner

_LONGEST_PATH = 4096
_MOST_CALLS = 15_000
"""Calls in one request: their errors and values have to fit into one answer of the box."""


class Request(NamedTuple):
    """One recorded request and its answer, to repeat it and compare."""

    header: dict[str, Any]
    body: bytes
    seconds: float
    answer: tuple[str, bytes]
    """Status and output."""


class Answer(NamedTuple):
    """The answer of a function call; `size` bytes of the data are its value."""

    status: str
    detail: str
    error: str
    """`ValueError: text` if it raised."""
    size: int


class Diverged(NamedTuple):
    """A recorded call that gave another result when it was repeated."""

    call: int
    """Number of the call, from 1."""
    recorded: str
    now: str


class SessionHost(ABC):
    """The part of a sandbox that its sessions share."""

    def __init__(self, level: str, limits: LimitsConfig, workers: int, kind: type[Runner]) -> None:
        self.level, self.limits, self.workers = level, limits, workers
        self.pool = RunnerPool(level, limits, workers, kind)
        self.slots = asyncio.Semaphore(workers * AT_ONCE)
        """Executions at once; the waiting time counts against no limit."""
        self.sessions: set[Session] = set()
        """Those that are not closed."""
        self.counts: Counter[str] = Counter()
        """Number of executions by status, the sandbox's own faults included."""
        self.limits_hit: Counter[str] = Counter()
        """Number of executions that met each limit, by its name in the configuration."""

    def count(self, status: str, detail: str = "") -> None:
        """Counts the status of an execution, and the limit that ended it."""
        self.counts[status] += 1
        if limit := limit_of(status, detail):
            self.limits_hit[limit] += 1

    @abstractmethod
    async def session(
        self,
        *,
        seed: int | None = None,
        imports: Iterable[str] = (),
        grading: bool = False,
        **limits: Any,
    ) -> Session:
        """Return another session."""


class Session:
    """Runs one episode's code. Methods run one at a time; `close` ends everything that was started."""

    def __init__(
        self,
        sandbox: SessionHost,
        limits: LimitsConfig,
        *,
        keep: int,
        seed: int | None,
        imports: tuple[str, ...],
    ) -> None:
        self.sandbox, self.limits, self.keep = sandbox, limits, keep
        self.seed, self.imports = seed, imports
        self.history: list[Request] = []
        self._box: tuple[Runner, Channel] | None = None
        self._busy = asyncio.Lock()
        self._closed = False

    @property
    def level(self) -> str:
        return self.sandbox.level

    async def cell(self, code: str, *, wall: float | None = None) -> ExecResult:
        """Runs code in the session: variables and imports stay for the next cell, a last expression is printed.

        After a crash, a timeout or memory exhaustion variables and files are as they were before this cell.
        """
        return await self._execute({"op": "cell"}, _bytes(code), wall)

    async def run(
        self, code: str, stdin: str = "", *, wall: float | None = None, reset: bool = False
    ) -> ExecResult:
        """Runs a Python program in a process of its own, with the session's files and without its variables.

        `reset`: restores the files afterwards.
        """
        source = _bytes(code)
        header: dict[str, Any] = {"op": "run", "split": len(source)}
        if reset:
            header["reset"] = True
        result = await self._execute(header, source + _bytes(stdin), wall)
        if result.files == "left":
            self._drop()  # the folder could not be restored: the next request gets a fresh box
        return result

    async def bash(self, command: str, stdin: str = "", *, wall: float | None = None) -> ExecResult:
        """Runs a shell command in the session's work folder."""
        source = _bytes(command)
        header = {"op": "bash", "split": len(source)}
        return await self._execute(header, source + _bytes(stdin), wall)

    async def read(self, path: str) -> bytes:
        """Return a regular file of the work folder, at most 16 MiB. Raises UsageError if it is absent or a link."""
        _, body = await self._files({"op": "read", "path": path}, b"", record=False)
        return body

    async def write(self, path: str, data: str | bytes) -> None:
        """Writes a file into the work folder. Raises UsageError if the path leaves it or the folder is full."""
        body = _bytes(data) if isinstance(data, str) else data
        await self._files({"op": "write", "path": path}, body, record=True)

    async def list(self) -> Listing:
        """Return the entries of the work folder, sorted by path; links are listed and not followed."""
        header, body = await self._files({"op": "list"}, b"", record=False)
        found = Listing(Entry(path, kind, size) for path, kind, size in json.loads(body))
        found.more = header.get("cut", False)
        return found

    async def back(self, call: int) -> tuple[Diverged, ...]:
        """Restores variables and files as they were before call number `call` (from 1).

        Calls are cells, programs, commands and writes; `len(history)` of them were made. Immediate if the state was
        kept (`keep`). Otherwise the session is rebuilt by running its recorded calls again in a fresh box; returns
        those whose result differs now.
        """
        if not 1 <= call <= len(self.history):
            raise UsageError(
                f"Call {call} does not exist: the session has made {len(self.history)}."
            )
        async with self._busy:
            del self.history[call - 1 :]
            if self._box:
                try:
                    frame = await self._ask({"op": "back", "call": call}, b"", 5.0)
                    if frame.header["status"] == "ok":
                        return ()
                except BoxLost as lost:
                    self.sandbox.count(lost.status)
            self._drop()
            try:
                async with self.sandbox.slots:
                    return await self._open()
            except (BoxLost, SandboxUnavailable) as problem:
                self._drop()
                raise _fault("The session could not be rebuilt", problem) from None

    async def close(self) -> None:
        """Ends everything the session started. May be called while it runs, and more than once."""
        self._closed = True
        self._drop()
        self.sandbox.sessions.discard(self)

    async def calls(
        self,
        calls: Sequence[Sequence[Any]],
        *,
        wall: float | None = None,
        budget: float | None = None,
    ) -> tuple[tuple[Answer, ...], bytes]:
        """Calls functions of the session: `[[name, args, kwargs], ...]` with values as in sandbox/protocol/values.py.

        `wall` and `budget`: seconds of one and of all. Returns an Answer for each (`timeout` with the detail `budget`
        if the others left it no time) and the bytes of the values one after the other.
        """
        if len(calls) > _MOST_CALLS:
            raise UsageError(
                f"{len(calls)} calls are more than a session takes at once: {_MOST_CALLS}."
            )
        if not calls:
            return (), b""
        one = wall or self.limits.wall
        budget = budget or 3 * one
        header: dict[str, Any] = {"op": "calls", "budget": budget, "limits": {"wall": one}}
        async with self._busy, self.sandbox.slots:
            frame = await self._with_retry(header, json.dumps(calls).encode(), budget + one)
        size = frame.header["answers"]
        answers = tuple(Answer(*fields) for fields in json.loads(frame.body[:size]))
        for answer in answers:
            self.sandbox.count(answer.status, answer.detail)
        return answers, frame.body[size:]

    async def _execute(self, header: dict[str, Any], body: bytes, wall: float | None) -> ExecResult:
        seconds = wall or self.limits.wall
        if wall:
            header["limits"] = {"wall": wall}
        async with self._busy, self.sandbox.slots:
            frame = await self._with_retry(self._with_keep(header), body, seconds)
            result = _read_result(frame, self.limits.replace(wall=seconds), self.level)
            if "reset" not in header:
                self.history.append(Request(header, body, seconds, _answer(frame)))
        self.sandbox.count(result.status, result.detail)
        return result

    def _with_keep(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return the request, changed in place so that the state before it is kept if the session keeps any."""
        if self.keep:
            header.update(keep=self.keep, call=len(self.history) + 1)
        return header

    async def _files(
        self, header: dict[str, Any], body: bytes, record: bool
    ) -> tuple[dict[str, Any], bytes]:
        if len(header.get("path", "")) > _LONGEST_PATH:
            raise UsageError(f"{header['path'][:40]}…: a path may have {_LONGEST_PATH} characters.")
        async with self._busy:
            frame = await self._with_retry(self._with_keep(header) if record else header, body, 5.0)
            if frame.header["status"] != "ok":
                path = str(header.get("path", ".")).encode("utf-8", "backslashreplace").decode()
                raise UsageError(f"{path}: {frame.header['detail']}.")
            if record:
                self.history.append(Request(header, body, 5.0, _answer(frame)))
        return frame.header, frame.body

    async def _with_retry(self, header: dict[str, Any], body: bytes, seconds: float) -> Any:
        """Return the answer to a request; a lost box is rebuilt once. Raises SandboxFault."""
        if (used := USED.get()) is not None:
            used.add(self.level)
        if self._closed:
            raise SandboxFault("The session is closed.")
        for attempt in (1, 2):
            try:
                if self._box is None and (found := await self._open()):
                    self._drop()
                    raise SandboxFault(
                        "The session was lost, and its calls gave other results when they were repeated: "
                        f"call {found[0].call} gave {found[0].recorded!r:.200}, now {found[0].now!r:.200}."
                    )
                return await self._ask(header, body, seconds)
            except (BoxLost, SandboxUnavailable) as problem:  # it started when the run began
                self._drop()
                if self._closed:
                    raise SandboxFault("The session was closed while it ran.") from None
                what, status = "No sandbox could be started", str(Status.SANDBOX_UNAVAILABLE)
                if isinstance(problem, BoxLost):
                    what, status = "The sandbox failed twice", problem.status
                self.sandbox.count(status)
                if attempt == 2:
                    raise _fault(what, problem) from None
        raise AssertionError("unreachable")

    async def _open(self) -> tuple[Diverged, ...]:
        """Opens a fresh box and repeats the recorded requests in it. Raises BoxLost, SandboxUnavailable."""
        try:
            self._box = await self.sandbox.pool.box(self.limits, self.seed, self.imports)
        except OSError as error:  # this process has no descriptors or memory left
            raise BoxLost("host_resources", f"no box could be opened: {error}") from None
        if self._closed:
            raise BoxLost("sandbox_restarted", "the session was closed")
        found: list[Diverged] = []
        for number, request in enumerate(self.history, 1):
            now = _answer(await self._ask(request.header, request.body, request.seconds))
            if now != request.answer:
                found.append(Diverged(number, _describe(request.answer), _describe(now)))
        return tuple(found)

    async def _ask(self, header: dict[str, Any], body: bytes, seconds: float) -> Any:
        """Makes one round trip. Raises BoxLost, also for a status that is an infrastructure fault."""
        assert self._box is not None
        channel = self._box[1]
        try:
            channel.ask(header, body)
            frame = await channel.answer(seconds + GRACE)
        except asyncio.CancelledError:
            self._drop()  # its answer would be taken for the next request's
            raise
        try:
            status = frame.header["status"]
            if status != "missing" and status != "refused" and Status(status).infrastructure:
                raise BoxLost(status, str(frame.header.get("detail", "")))
        except (KeyError, ValueError):
            detail = f"an answer without a known status: {frame.header}"
            raise BoxLost("protocol_error", detail) from None
        return frame

    def _drop(self) -> None:
        if self._box is not None:
            runner, channel = self._box
            self._box = None
            runner.drop(channel)


def _read_result(frame: Any, limits: LimitsConfig, level: str) -> ExecResult:
    head, size = frame.header, frame.header["out"]
    return ExecResult(
        status=Status(head["status"]),
        stdout=frame.body[:size].decode("utf-8", "replace"),
        stderr=frame.body[size:].decode("utf-8", "replace"),
        seconds=head["seconds"],
        level=level,
        exit_code=head.get("exit"),
        signal=head.get("signal"),
        state_kept=head.get("kept", True),
        rolled_back=head.get("rolled_back", False),
        files=head.get("files", ""),
        detail=head.get("detail", ""),
        stopped=head.get("stopped", 0),
        truncated=head["cut"],
        limits=limits,
    )


def _fault(what: str, problem: BoxLost | SandboxUnavailable) -> SandboxFault:
    if isinstance(problem, BoxLost):
        return SandboxFault(f"{what} ({problem.status}): {problem.detail}.")
    return SandboxFault(f"{what}: {problem.message}", hint=problem.hint)


def _answer(frame: Any) -> tuple[str, bytes]:
    return frame.header["status"], frame.body


def _describe(answer: tuple[str, bytes]) -> str:
    return f"{answer[0]}: {answer[1].decode('utf-8', 'replace')}"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
