"""Environments of other projects as agents: they run in their own interpreter and bring their own loop.

A plugin names the worker: a file that imports nothing of this package, with a class `WORKER` and a flag `FORKED`, which
`program_loop.py` runs in that interpreter. One process is started for each configuration and plays all its episodes;
its model is the episode's address. `agentrl init --from NAME:PACKAGE` writes a project's agent.py for one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from agentrl_cli.errors import EnvError, MissingDependency
from agentrl_cli.registry import resolve
from agentrl_cli.registry.old_modules import keep_old_names
from agentrl_cli.types import Task

TAIL = 4000
"""Characters of a program's stderr that are kept."""
STARTING = 3600.0
"""Seconds that a program has to load what it runs. One that ends is noticed at once."""
LARGEST = 1 << 30
"""Bytes of an answer."""
ENDING = 5.0
"""Seconds that a program has to end once its stdin is closed."""


class ForeignAgent:
    """An environment of another project: its rows, and an agent that plays them."""

    name: str
    worker: Path
    needs: str
    """The packages to install where it runs."""
    shown: str
    """How a user names one to `agentrl init --from`."""
    options_under = ""
    """Key of the options that the options of `--from NAME:PACKAGE?key=value` belong to."""
    start_seconds = STARTING
    """An agent's time counts from its first call: all of a step start at once, and what they run is large."""

    def __init__(
        self,
        package: str | Path,
        *,
        task: str = "",
        python: str | Path = "",
        options: Mapping[str, Any] | None = None,
        score: str = "",
    ) -> None:
        """Name the environment; `python` is the interpreter that has the package; this one without it."""
        config: dict[str, Any] = {"package": _path_text(package), "task": task, "score": score}
        config["options"] = dict(options or {})
        self._started = type(self), _path_text(python) or sys.executable, json.dumps(config)

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """Return the first rows: `id`, `prompt` and `sample`, their place. Raises MissingDependency, EnvError."""
        return list(self._submit(do="rows", limit=limit).result()["rows"])

    async def solve(self, task: Task, base_url: str, api_key: str, model: str) -> float:
        """Play a row with the model at that address: an agent. Raises MissingDependency, EnvError."""
        if "sample" not in task.data:
            raise EnvError(
                f"The row {task.id} has no `sample`: its place in the tasks of {self.name}."
            )
        given = {"base_url": base_url, "api_key": api_key, "model": model}
        asked = self._submit(do="run", sample=task.data["sample"], **given)
        return float((await asyncio.wrap_future(asked))["reward"])

    def _submit(self, **fields: Any) -> Future[dict[str, Any]]:
        return asyncio.run_coroutine_threadsafe(_ask(self._started, fields), _loop())


def open_program(kind: str, package: str | Path, **options: Any) -> ForeignAgent:
    """Return an environment by the name of the plugin that runs it. Raises NotFound."""
    made: ForeignAgent = resolve("programs", {}, kind)(package, **options)
    return made


def _path_text(place: str | Path) -> str:
    """Return a path without `..`; a link stays one, as an interpreter's is what makes its environment."""
    return os.path.normpath(place) if isinstance(place, Path) else place


class _Program:
    """A worker process: requests by number, answers as futures. All of it happens in `_loop()`."""

    def __init__(self, kind: type[ForeignAgent], process: asyncio.subprocess.Process) -> None:
        self.kind, self._process = kind, process
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tail = b""
        self._first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._errors = asyncio.create_task(self._read_errors())
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, kind: type[ForeignAgent], python: str, config: str) -> _Program:
        """Start one; return it when it is ready. Raises MissingDependency, EnvError."""
        path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        loop = Path(__file__).with_name("program_loop.py")
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, str(loop), str(kind.worker), config),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                limit=LARGEST,
                env={**os.environ, "PATH": path},
                start_new_session=True,  # a Ctrl-C is for this process; theirs ends with its stdin
            )
        except OSError as error:
            raise EnvError(f"{python} could not be started: {error.strerror}.") from error
        made = cls(kind, process)
        try:
            first = await asyncio.wait_for(made._first, STARTING)
        except TimeoutError:
            first = {"error": f"its program was not ready after {STARTING:g} s."}
        except asyncio.CancelledError:
            made._kill()
            raise
        if first.get("ready"):
            return made
        await made.close()
        if missing := first.get("missing"):
            raise MissingDependency(
                f"{python} has no module {missing}, which {kind.name} needs.",
                hint=f"{python} -m pip install {kind.needs}, and the package that you name; "
                "or name the interpreter that has them: --python PATH, or python= in agent.py.",
            )
        problem = first.get("error") or "its program ended at once."
        raise EnvError(f"{kind.name}: {problem}", hint=made._last_words())

    @property
    def is_over(self) -> bool:
        return self._reading.done()

    async def ask(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; if this is cancelled, so is the run. Raises EnvError."""
        if self.is_over:
            raise self._ending()
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send({"id": number, **fields})
        try:
            answer: dict[str, Any] = await future
        except asyncio.CancelledError:
            self._send({"id": number, "do": "cancel"})
            raise
        finally:
            del self._asked[number]
        if "error" in answer:
            raise EnvError(f"{self.kind.name}: {answer['error']}")
        return answer

    async def close(self) -> None:
        """End the program, and with it every run of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait([self._reading], timeout=ENDING)
        self._kill()
        await asyncio.wait([self._reading], timeout=ENDING)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with what it started

    def _send(self, fields: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields).encode() + b"\n")

    async def _read(self) -> None:
        """Hand out the answers; after the last, every request that waits fails."""
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                answer = json.loads(line)
                future = self._asked.get(answer["id"]) if self._first.done() else self._first
                if future is not None and not future.done():  # else it was cancelled
                    future.set_result(answer)
        except ValueError as error:
            if not self._first.done():
                text = f"the first answer of its program is not JSON: {error}"
                self._first.set_result({"error": text})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), ENDING)
        self._kill()
        await self._process.wait()
        await asyncio.wait([self._errors], timeout=ENDING)
        if not self._first.done():
            self._first.set_result({})
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self._ending())

    def _ending(self) -> EnvError:
        text = f"The program that runs {self.kind.name} has ended.\n{self._last_words()}"
        return EnvError(text.strip())

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while read := await self._process.stderr.read(TAIL):
            self._tail = (self._tail + read)[-TAIL:]

    def _last_words(self) -> str:
        return self._tail.decode(errors="replace")[-600:]


_Started = tuple[type[ForeignAgent], str, str]
_RUNNING: dict[_Started, asyncio.Task[_Program]] = {}
"""By configuration: one that loads slowly, or hangs, delays no other."""
_LOOPS: list[asyncio.AbstractEventLoop] = []
_LOCK = threading.Lock()


async def _ask(started: _Started, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the running program of a configuration, started if there is none."""
    task = _RUNNING.get(started)
    if task is None or (
        task.done() and (task.cancelled() or task.exception() or task.result().is_over)
    ):
        task = _RUNNING[started] = asyncio.create_task(_Program.start(*started))
    program = await asyncio.shield(task)
    return await program.ask(fields)


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all programs, which has a thread of its own."""
    with _LOCK:
        if not _LOOPS:
            _LOOPS.append(asyncio.new_event_loop())
            thread = threading.Thread(target=_LOOPS[0].run_forever, daemon=True)
            thread.start()
            atexit.register(_close, _LOOPS[0], thread)
        return _LOOPS[0]


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End every program, and the loop."""

    async def end() -> None:
        for task in _RUNNING.values():
            task.cancel()  # one that still loads
        made = await asyncio.gather(*_RUNNING.values(), return_exceptions=True)
        await asyncio.gather(*(one.close() for one in made if isinstance(one, _Program)))

    asyncio.run_coroutine_threadsafe(end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


keep_old_names(__name__)
