"""Names of all that this process waits for: after a silence, the one that has not come back is reported.

`waiting` stands around every call of something that may not come back: a tool, a grader, an agent, a server, a worker,
a lock, a disk, an update. `Watchman` looks from a thread of its own, because what hangs may hold the event loop: after
`QUIET` seconds in which nothing began, ended or advanced it reports each thing that has not come back, and since when.
"""

from __future__ import annotations

import contextvars
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

QUIET = 30.0
"""Seconds without progress after which the thing waited for is named."""
LOOK = 1.0
"""Seconds between two looks."""
LONGEST = 200
"""Characters of a call that are shown."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Something that has not come back yet."""

    number: int
    text: str
    """What it is: "tool run_python(code='…')"."""
    episode: str
    """Id of the episode that it belongs to; empty outside of one."""
    since: float
    """Seconds since the epoch."""
    inside: int
    """Number of the wait that it is a part of, 0 if it is none."""

    def describe(self, now: float) -> str:
        """Return it as a line, with its age at a time."""
        whose = f" of episode {self.episode}" * bool(self.episode)
        began = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"{self.text}{whose}, since {began} ({duration(now - self.since)})"


_numbers = itertools.count(1)
_open: dict[int, Wait] = {}  # changed by single operations, which are atomic
_innermost: contextvars.ContextVar[Wait | None] = contextvars.ContextVar("wait", default=None)
_moved = [time.monotonic()]
_sampled = [0]


def advance(tokens: int = 0) -> None:
    """Note progress: so many tokens were sampled, or a batch was computed."""
    _moved[0] = time.monotonic()
    _sampled[0] += tokens


def sampled() -> int:
    """Return the tokens that models of this process have sampled so far."""
    return _sampled[0]


@contextmanager
def waiting(text: str, episode: str = "", *, moves: bool = True) -> Iterator[None]:
    """Name the thing the block waits for; an inner one names it more closely. The episode is the outer one's if absent.

    `moves`: whether its beginning and end are progress.
    """
    outer = _innermost.get()
    whose = episode or (outer.episode if outer else "")
    found = Wait(next(_numbers), text[:LONGEST], whose, time.time(), outer.number if outer else 0)
    _open[found.number] = found
    token = _innermost.set(found)
    if moves:
        advance()
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that is closed elsewhere
            _innermost.reset(token)
        _open.pop(found.number, None)
        if moves:
            advance()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end a block that awaits nothing at once: asyncio's own handler would wait for the next await.

    A script's own handler stays as it is.
    """
    handler = signal.getsignal(signal.SIGINT)
    runner = getattr(getattr(handler, "func", None), "__module__", "") == "asyncio.runners"
    if not runner or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:  # a callback of an import dropped it
        raise KeyboardInterrupt


def waits() -> list[Wait]:
    """Return everything that is waited for, the oldest first: the innermost of each chain.

    An agent's call of the model is answered in another task: it is the newest of its episode.
    """
    found = list(_open.values())
    outer = {one.inside for one in found}
    inner = [one for one in found if one.number not in outer]
    last = {one.episode: one.inside for one in inner}  # of the newest: numbers rise
    shown = (one for one in inner if not one.episode or one.inside == last[one.episode])
    return sorted(shown, key=lambda one: one.number)


def duration(seconds: float) -> str:
    """Return a time for people, in two units at most: `37 s`, `12 min`, `2 h 53 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


Report = Callable[[Sequence[str]], None]
"""Gets one line for each wait, the oldest first; none once it goes on."""


class Watchman:
    """Reports a silence after QUIET seconds, again whenever it has doubled, and that it is over.

    `with Watchman(report):` also prints all waits to `report` at SIGUSR1, where the system has it.
    """

    def __init__(self, report: Report, quiet: float = QUIET) -> None:
        self._report, self._quiet = report, quiet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="agentrl-waits", daemon=True)
        self._before: object = None

    def __enter__(self) -> Watchman:
        advance()
        with suppress(AttributeError, ValueError):  # no such signal, or not the main thread
            self._before = signal.signal(signal.SIGUSR1, lambda *_: self._report(lines()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._before is not None:
            signal.signal(signal.SIGUSR1, self._before)  # type: ignore[arg-type]

    def _watch(self) -> None:
        due = self._quiet
        while not self._over.wait(min(LOOK, self._quiet / 4)):
            silent = time.monotonic() - _moved[0]
            if silent < self._quiet and due > self._quiet:
                due = self._quiet
                self._report([])
            elif silent >= due and (found := lines()):
                due = 2 * silent
                self._report(found)


def lines() -> list[str]:
    """Return a line for each wait, the oldest first."""
    now = time.time()
    return [one.describe(now) for one in waits()]
