"""Runs a worker of another project, in that project's interpreter: `programs.py` starts it and imports nothing of it.

    python program_loop.py WORKER.py CONFIG

The worker's file has `FORKED`, and a class `WORKER` that is made with the configuration: `rows(limit)`,
`async run(request)` and perhaps `serving()` and `rehearse()`. A request is a line of stdin, an answer a line of what
was stdout; the first answer is {"ready": true} or {"error": …}. Requests: {"id", "do": "rows", "limit"},
{"id", "do": "run", "sample", "base_url", "api_key", "model"} and {"id", "do": "cancel"}. Prints go to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

MOST = 900
"""Characters of an error, so that an answer is written at once, whichever process writes it."""
LOOK = 0.5
"""Seconds until a process that died without an answer is noticed."""
REHEARSAL = 120
"""Seconds that a rehearsal may take."""
_ANSWERS = 1
"""The former stdout."""


def answer(**fields: Any) -> None:
    """Write one line."""
    data = json.dumps(fields).encode() + b"\n"
    while data:
        data = data[os.write(_ANSWERS, data) :]


def text_of(error: BaseException) -> str:
    """Return an error in a line; of a group, its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:MOST]


def main(place: str, config: str) -> None:
    """Answer requests until stdin ends.

    With `FORKED`, each run has a process of its own, whose memory begins as this one's; the imports of a run are then
    made here, once, if the worker has a `rehearse()` that makes one.
    """
    global _ANSWERS
    _ANSWERS = os.dup(1)
    os.dup2(2, 1)
    del sys.path[0]  # this file's folder
    try:
        spec = spec_from_file_location("worker", place)
        assert spec is not None and spec.loader is not None
        module: Any = module_from_spec(spec)
        spec.loader.exec_module(module)
        worker, forked = module.WORKER(json.loads(config)), module.FORKED
        if forked and hasattr(worker, "rehearse"):
            _import_as(worker.rehearse)
    except Exception as error:
        missing = error.name if isinstance(error, ImportError) else None
        answer(error=text_of(error), missing=missing)
        raise SystemExit(1) from error
    answer(ready=True)
    if forked:
        _serve_forked(worker)
    else:
        asyncio.run(_serve(worker))


def _import_as(rehearse: Callable[[], None]) -> None:
    """Import the modules that a rehearsal imports, which runs in another process: it leaves no thread in this one."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        signal.alarm(REHEARSAL)  # which ends it: then the runs import for themselves
        try:
            rehearse()
        finally:
            os.write(write, "\n".join([*sys.modules]).encode())
            os.killpg(0, signal.SIGKILL)
    os.close(write)
    with open(read, encoding="utf-8") as names:
        wanted = names.read().split("\n")
    os.waitpid(child, 0)
    for name in wanted:
        if name and name not in sys.modules:
            with contextlib.suppress(Exception):  # a module that only a run has
                importlib.import_module(name)


async def _answer_to(request: dict[str, Any], worker: Any) -> None:
    try:
        if request["do"] == "rows":
            answer(id=request["id"], rows=worker.rows(request["limit"]))
        else:
            answer(id=request["id"], **await worker.run(request))
    except Exception as error:  # noqa: BLE001 - an answer, too
        answer(id=request["id"], error=text_of(error))


async def _serve(worker: Any) -> None:
    tasks: dict[int, asyncio.Task[None]] = {}
    async with worker.serving() if hasattr(worker, "serving") else contextlib.nullcontext():
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            number = request["id"]
            if request["do"] == "cancel":
                if task := tasks.pop(number, None):
                    task.cancel()
            else:
                tasks[number] = asyncio.create_task(_answer_to(request, worker))
                tasks[number].add_done_callback(partial(tasks.pop, number))
        for task in tasks.values():
            task.cancel()


def _serve_forked(worker: Any) -> None:
    children: dict[int, int] = {}
    for line in _lines():
        for number, child in [*children.items()]:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                del children[number]
                answer(id=number, error="its process died")  # ignored if it had answered
        if not line:
            continue
        request = json.loads(line)
        if request["do"] == "cancel":
            if request["id"] in children:
                _kill(children[request["id"]])
        elif request["do"] == "rows":
            asyncio.run(_answer_to(request, worker))
        elif child := os.fork():
            with contextlib.suppress(OSError):
                os.setpgid(child, child)  # as the child does: whichever comes first
            children[request["id"]] = child
        else:
            _child(worker, request)
    for child in children.values():
        _kill(child)


def _lines() -> Iterator[bytes]:
    """Yield the lines of stdin until its end; an empty one when none has come for a while."""
    rest = b""
    while True:
        if not select.select([0], [], [], LOOK)[0]:
            yield b""
            continue
        read = os.read(0, 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from filter(None, lines)


def _child(worker: Any, request: dict[str, Any]) -> None:
    """Make one run, and end with everything that it started."""
    os.setpgid(0, 0)
    try:
        asyncio.run(_answer_to(request, worker))
    finally:
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
