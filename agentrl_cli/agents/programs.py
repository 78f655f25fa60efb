"""Environments of other projects as agents: they run in their own interpreter and bring their own loop.

A plugin names the worker: a file that imports nothing of this package, with a class `WORKER` and a flag `FORKED`, which
`program_loop.py` runs in that interpreter. One process is started for each configuration and plays all its episodes;
its model is the episode's address. `agentrl init --from NAME:PACKAGE` writes a project's agent.py for one.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from agentrl_cli.agents.runners.base import WorldFault
from agentrl_cli.agents.runners.command import TAIL, Tail, end_supervised, start_supervised
from agentrl_cli.config.models import ModelConfig
from agentrl_cli.errors import (
    AgentRLError,
    EnvError,
    MissingDependency,
    ModelError,
    NotFound,
    nearest,
)
from agentrl_cli.paths import is_bundled, list_places
from agentrl_cli.registry import resolve
from agentrl_cli.registry.old_modules import keep_old_names
from agentrl_cli.registry.plugins import offers
from agentrl_cli.types import Task

_LOG = logging.getLogger(__name__)

ENDING = 5.0
"""Seconds that a program has to end once its stdin is closed."""
SHOWN = 600
"""Characters of a program's stderr that a message repeats."""


class ForeignAgent:
    """An environment of another project: its rows, and an agent that plays them."""

    name: str
    worker: Path
    """By default `worker.py` beside the file of the class."""
    needs: str
    """The packages to install where it runs."""
    shown: str
    """How a user names one to `agentrl init --from`."""
    options_under = ""
    """Key of the options that the options of `--from NAME:PACKAGE?key=value` belong to."""
    tested: ClassVar[Mapping[str, str]] = {}
    """Packages and the versions that were tested; another one is reported once."""
    limits: ClassVar[Mapping[str, int]] = {
        "max_turns": 12,
        "max_new_tokens": 192,
        "max_tokens": 8192,
    }
    """Settings of `rollout` for a new project. Most have the schemas of many tools in their prompts."""
    imports_here: ClassVar[bool] = False
    """Whether `package` may be a module of the folder in which `agentrl init` is called."""
    others: ClassVar[Sequence[str]] = ()
    """Words that stand in the place of a model's name."""
    title = ""
    """The environment's own name, if `package` is only where it is; set by `rows`."""
    start_seconds = 3600.0
    """An agent's time counts from its first call: all of a step start at once, and what they run is large."""
    fault: ClassVar[type[EnvError]] = EnvError
    """The error that a failure of the program is, or of the environment in it."""

    def __init_subclass__(cls) -> None:
        """Take the worker beside the class, unless it or its base names one; a notebook's class has no file."""
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if file and not hasattr(cls, "worker") and cls.__module__ != __name__:
            cls.worker = Path(file).with_name("worker.py")

    def __init__(
        self,
        package: str | Path,
        *,
        task: str = "",
        python: str | Path = "",
        options: Mapping[str, Any] | None = None,
        score: str = "",
        folder: str | Path = "",
    ) -> None:
        """Name the environment; `python` is the interpreter that has the package; this one without it.

        `folder` has the modules that are not installed; the working folder without it.
        """
        self.options = dict(options or {})
        config = {"task": task, "score": score, "options": self.options}
        config |= {"folder": _path_text(folder)}
        config |= {"package": _path_text(package), "tested": dict(self.tested)}
        self._started = type(self), _path_text(python) or sys.executable, json.dumps(config)

    @property
    def models(self) -> Sequence[str]:
        """The models that it calls besides the trained one: folders, RUN@best, or `base`."""
        return ()

    def require(self, base: Path) -> None:
        """Raise NotFound for an option or a model that does not exist, and what else ends the program at its start."""
        self.require_models(base)
        self.rows(1)

    def require_models(self, base: Path) -> None:
        """Raise NotFound for a model that has the name of none; of a checkpoint or a path, its loading finds that."""
        for name in self.models:
            if not ("@" in name or "/" in name or name == "base" or _is_model(name, base)):
                known = sorted([*self.others, "base", "tiny", "tiny-tools"])
                hint = "Any other is a model: RUN@best, a folder, or org/name."
                raise NotFound.of(f"opponent or model of {self.name}", name, known, hint=hint)

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """Return the first rows: `id`, `prompt` and `sample`, their place. Raises MissingDependency, EnvError."""
        found = self._submit(do="rows", limit=limit).result()
        self.title = str(found.get("title", ""))
        return list(found["rows"])

    def find_name(self, source: str) -> str:
        """Return a source, `PACKAGE?options`, by the name that it has wherever it runs; after `rows`."""
        package, mark, options = source.partition("?")
        return f"{self.title or package}{mark}{options}"

    async def solve(
        self, task: Task, base_url: str, api_key: str, model: str, attempt: int = 0
    ) -> float | dict[str, float] | None:
        """Play a row with the model at that address: an agent. Returns its reward, that of each player, or None.

        Raises MissingDependency, EnvError.
        """
        if "sample" not in task.data:
            raise self.fault(
                f"The row {task.id} has no `sample`: its place in the tasks of {self.name}."
            )
        given = {"base_url": base_url, "api_key": api_key, "model": model}
        which = {"sample": task.data["sample"], "split": task.split, "attempt": attempt}
        asked = self._submit(do="run", **which, **given)
        reward: float | dict[str, float] | None = (await asyncio.wrap_future(asked))["reward"]
        return reward

    def _submit(self, **fields: Any) -> Future[dict[str, Any]]:
        """Ask the running program of this configuration, started if there is none."""
        with _LOCK:
            program = _RUNNING.get(self._started)
            if program is None or program.ended is not None:
                program = _RUNNING[self._started] = _Program(*self._started)
        return program.ask(fields)


def _is_model(name: str, base: Path) -> bool:
    """Whether a model has this name: a folder, a bundled one, or one that a plugin has or can fetch."""
    if any(place.is_dir() for place in list_places(name, base)) or is_bundled(name):
        return True
    try:
        here = ModelConfig(offline=True)
        return any(resolve("models", {}, one)(name, here, base) for one in offers("models"))
    except ModelError:  # it is to be fetched
        return True


class ForeignWorld(ForeignAgent):
    """Worlds that `program_loop` plays: what fails in one is the environment's fault, never the model's."""

    fault = WorldFault


def open_program(kind: str, package: str | Path, **options: Any) -> ForeignAgent:
    """Return an environment by the name of the plugin that runs it. Raises NotFound."""
    made: ForeignAgent = resolve("programs", {}, kind)(package, **options)
    return made


def _path_text(place: str | Path) -> str:
    """Return a path without `..`; a link stays one, as an interpreter's is what makes its environment."""
    return os.path.normpath(place) if isinstance(place, Path) else place


class _Program:
    """A worker process: requests by number, answers as futures, which a thread hands out."""

    def __init__(self, kind: type[ForeignAgent], python: str, config: str) -> None:
        """Start it. Requests wait until it is ready."""
        self.ended: AgentRLError | None = None
        """Why it answers no more requests."""
        self._kind, self._python = kind, python
        self._numbers = itertools.count()
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._ready = False
        self._unsent: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._tail = Tail()
        loop = Path(__file__).with_name("program_loop.py")
        path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._process = start_supervised(
            [python, str(loop), str(kind.worker), config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PATH": path},
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def ask(self, fields: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Return the answer to a request, or its EnvError; if the future is cancelled, so is the run."""
        future: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        with self._lock:
            self._asked[number] = future
            if self.ended is not None:
                future.set_exception(self.ended)
        self._send({"id": number, **fields})
        future.add_done_callback(partial(self._forget, number))
        return future

    def close(self) -> None:
        """End the program, and with it every run of it."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._reading.join(ENDING)
        end_supervised(self._process)

    def _forget(self, number: int, future: Future[dict[str, Any]]) -> None:
        self._asked.pop(number, None)
        if future.cancelled():
            self._send({"id": number, "do": "cancel"})

    def _send(self, *requests: Mapping[str, Any]) -> None:
        """Write requests, and those that came before the program was ready."""
        assert self._process.stdin is not None
        with self._lock, suppress(OSError, ValueError):  # it has ended: `_read` sees that
            self._unsent += map(dict, requests)
            while self._ready and self._unsent:
                self._process.stdin.write(json.dumps(self._unsent.pop(0)).encode() + b"\n")
                self._process.stdin.flush()

    def _read(self) -> None:
        """Hand out the answers; after the last, every request that waits fails."""
        assert self._process.stdout is not None
        reading = threading.Thread(target=self._read_errors, daemon=True)
        reading.start()
        first: dict[str, Any] = {"error": "its program ended at once."}
        with self._process:
            with suppress(ValueError):
                for line in self._process.stdout:
                    answer = json.loads(line)
                    if not self._ready:
                        first = answer
                        self._ready = bool(answer.get("ready"))
                        for note in answer.get("notes", ()):
                            _LOG.warning("%s", note)
                        self._send()
                    elif (future := self._asked.get(answer["id"])) is not None:
                        self._resolve(future, answer)
            end_supervised(self._process)
            reading.join(ENDING)
        with self._lock:
            self.ended = self._problem(first)
            waiting = [*self._asked.values()]
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(self.ended)

    def _resolve(self, future: Future[dict[str, Any]], answer: dict[str, Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if "error" in answer:
            future.set_exception(self._kind.fault(f"{self._kind.name}: {answer['error']}"))
        else:
            future.set_result(answer)

    def _problem(self, first: Mapping[str, Any]) -> AgentRLError:
        """Return why the program ended; `first` is its first answer."""
        said = self._tail.text[-SHOWN:]
        if self._ready:
            return self._kind.fault(
                f"The program that runs {self._kind.name} has ended.\n{said}".strip()
            )
        if missing := first.get("missing"):
            return MissingDependency(
                f"{self._python} has no module {missing}, which {self._kind.name} needs.",
                # a module within a package: an older release is there
                hint=f"{self._python} -m pip install {'-U ' * ('.' in missing)}{self._kind.needs}, and the package"
                " that you name; or name the interpreter that has them: --python PATH, or python= in agent.py.",
            )
        if unknown := first.get("unknown"):
            kind, name, known = unknown
            near = " or ".join(nearest(name, known))
            hint = f"Did you mean {near}? " * bool(near) + f"There are: {', '.join(known)}."
            return NotFound(f"No {kind} named {name!r}.", hint=hint)
        return self._kind.fault(f"{self._kind.name}: {first['error']}", hint=said)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while data := os.read(self._process.stderr.fileno(), TAIL):
            self._tail.add(data)


_RUNNING: dict[tuple[type[ForeignAgent], str, str], _Program] = {}
"""By configuration: one that loads slowly, or hangs, delays no other."""
_LOCK = threading.Lock()


@atexit.register
def _close() -> None:
    """End every program, before the interpreter does."""
    for program in _RUNNING.values():
        program.close()


keep_old_names(__name__)
