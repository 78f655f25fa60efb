"""Environments of verifiers and evals of Inspect as agents: they run in their own interpreter and bring their own loop.

    solve = Foreign("verifiers", "wordle").solve
    solve = Foreign("inspect", "inspect_evals", task="gsm8k", python="/envs/inspect/bin/python").solve

`agentrl init --from verifiers:PACKAGE` writes this into a project's agent.py. One program of `workers/` is started for
each configuration and makes all its episodes; its model is the episode's address.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from agentrl_cli.errors import EnvError, MissingDependency
from agentrl_cli.registry.threads import in_thread
from agentrl_cli.types import Task

WORKERS = {"verifiers": "verifiers_worker.py", "inspect": "inspect_worker.py"}
"""What is run of `workers/`. Another name is the path of such a program."""
PACKAGES = {"verifiers": "verifiers uv", "inspect": "inspect_ai openai"}
"""What has to be installed where it runs."""
TAIL = 4000
"""Characters of a program's stderr that are kept."""
STARTING = 3600.0
"""Seconds that a program has to load what it runs. One that ends is noticed at once."""
ENDING = 5.0
"""Seconds that a program has to end once its stdin is closed."""


class Foreign:
    """An environment of another project: its rows, and an agent that plays them."""

    start_seconds = STARTING
    """An agent's time counts from its first call: all of a step start at once, and what they run is large."""

    def __init__(
        self,
        kind: str,
        package: str | Path,
        *,
        task: str = "",
        python: str | Path = "",
        options: Mapping[str, Any] | None = None,
        score: str = "",
    ) -> None:
        """`options` are verifiers' environment config (`taskset`, its roles …) or the arguments of an Inspect task;
        `score` names the scorer of Inspect that is the reward, `NAME` or `NAME/KEY`; the first without it."""
        self.kind = kind
        config = {
            "package": _written(package),
            "task": task,
            "options": dict(options or {}),
            "score": score,
        }
        self._started = (kind, _written(python) or sys.executable, json.dumps(config))

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """Return the first rows: `id`, `prompt` and `sample`, their place. Raises MissingDependency, EnvError."""
        answer = _program(*self._started).ask(do="rows", limit=limit).result()
        return [dict(row) for row in answer["rows"]]

    async def solve(self, task: Task, base_url: str, api_key: str, model: str) -> float:
        """Play a row with the model at that address: an agent. Raises MissingDependency, EnvError."""
        if "sample" not in task.data:
            raise EnvError(
                f"The row {task.id} has no `sample`: its place in the tasks of {self.kind}."
            )
        program = await in_thread(_program, *self._started)
        given = {
            "sample": task.data["sample"],
            "base_url": base_url,
            "api_key": api_key,
            "model": model,
        }
        asked = program.ask(do="run", **given)
        try:
            answer = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            program.cancel(asked)
            raise
        return float(answer["reward"])


def _written(place: str | Path) -> str:
    """Return a path without `..`; a link stays one, as an interpreter's is what makes its environment."""
    return os.path.normpath(place) if isinstance(place, Path) else place


class _Program:
    """A worker process: requests by number, answers as futures."""

    def __init__(self, kind: str, python: str, config: str) -> None:
        script = (
            Path(__file__).with_name("workers") / WORKERS[kind] if kind in WORKERS else Path(kind)
        )
        self.kind, self.python = kind, python
        around = {
            **os.environ,
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        around["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).with_name("workers")), around.get("PYTHONPATH", "")]
        )
        try:
            self._process = subprocess.Popen(
                [python, str(script), config],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=around,
                start_new_session=True,  # a Ctrl-C is for this process; theirs ends with its stdin
            )
        except OSError as error:
            raise EnvError(f"{python} could not be started: {error.strerror}.") from error
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._over = False
        """True once no one reads answers."""
        self._tail = ""
        self._threads: list[threading.Thread] = []
        self._first = Future[dict[str, Any]]()
        self._start(self._read_errors)
        self._start(self._read)
        self._check()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, **fields: Any) -> Future[dict[str, Any]]:
        """Send a request."""
        number, future = next(self._numbers), Future[dict[str, Any]]()
        future.set_running_or_notify_cancel()
        with self._lock:
            over = self._over
            if not over:
                self._asked[number] = future
        if over:
            future.set_exception(self._ending())
        else:
            self._send({"id": number, **fields})
        return future

    def cancel(self, asked: Future[dict[str, Any]]) -> None:
        """Stop what a request began."""
        with self._lock:
            found = [number for number, future in self._asked.items() if future is asked]
            for number in found:
                del self._asked[number]
        for number in found:
            self._send({"id": number, "do": "cancel"})

    def close(self) -> None:
        """End the program, and with it every run of it."""
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        with contextlib.suppress(OSError):
            stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with what it started
        self._process.wait()
        for thread in self._threads:
            thread.join(ENDING)
        stdout.close()
        stderr.close()

    def _send(self, fields: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with (
            self._writing,
            contextlib.suppress(OSError, ValueError),
        ):  # it has ended: the request fails
            stdin.write(json.dumps(fields) + "\n")
            stdin.flush()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {}

    def _check(self) -> None:
        """Raise MissingDependency or EnvError unless the program reports in time that it is ready."""
        try:
            first = self._first.result(STARTING)
        except EnvError:
            self.close()
            raise
        except TimeoutError:
            first = {"error": f"its program was not ready after {STARTING:g} s."}
        if first.get("ready"):
            return
        self.close()
        if missing := first.get("missing"):
            raise MissingDependency(
                f"{self.python} has no module {missing}, which {self.kind} needs.",
                hint=f"{self.python} -m pip install {PACKAGES.get(self.kind, missing)}, and the package that you name; "
                "or name the interpreter that has them: --python PATH, or python= in agent.py.",
            )
        raise EnvError(
            f"{self.kind}: {first.get('error') or 'its program ended at once.'}",
            hint=self._tail[-600:],
        )

    def _read(self) -> None:
        try:
            self._first.set_result(self._line())
        except ValueError as error:
            self._first.set_exception(
                EnvError(f"{self.kind}: the first answer of its program is not JSON: {error}")
            )
            return
        while answer := self._line():
            with self._lock:
                future = self._asked.pop(answer["id"], None)
            if future is None:  # cancelled
                continue
            if "error" in answer:
                future.set_exception(EnvError(f"{self.kind}: {answer['error']}"))
            else:
                future.set_result(answer)
        self._process.wait()
        self._threads[0].join(ENDING)
        self._fail()

    def _start(self, target: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=target, daemon=True))
        self._threads[-1].start()

    def _fail(self) -> None:
        with self._lock:
            self._over = True
            asked, self._asked = self._asked, {}
        for future in asked.values():
            future.set_exception(self._ending())

    def _ending(self) -> EnvError:
        return EnvError(
            f"The program that runs {self.kind} has ended.\n{self._tail[-600:]}".strip()
        )

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._tail = (self._tail + line)[-TAIL:]


_STARTING: defaultdict[tuple[str, str, str], threading.Lock] = defaultdict(threading.Lock)
"""A lock for each configuration, so that one that loads slowly, or hangs, delays no other."""
_RUNNING: dict[tuple[str, str, str], _Program] = {}


def _program(kind: str, python: str, config: str) -> _Program:
    """Return the running program of a configuration, started if there is none."""
    configuration = kind, python, config
    with _STARTING[configuration]:
        program = _RUNNING.get(configuration)
        if program is None or program.ended:
            if program is not None:
                program.close()
            program = _RUNNING[configuration] = _Program(*configuration)
        return program


def _close() -> None:
    while _RUNNING:
        _RUNNING.popitem()[1].close()


atexit.register(_close)
