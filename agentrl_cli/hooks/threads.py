"""Runs a project's code in threads, contains its exceptions, and limits its time.

A synchronous grader, tool or hook runs in a daemon thread, so it never blocks the event loop, and the deadline of its
episode cuts it off. A function cannot be stopped from outside: after its deadline it is abandoned. Its thread keeps
running, is counted, and is not joined when the process exits.

asyncio's own pool has only a few more threads than cores, so sixty waiting graders would queue in it, and Python joins
its threads at exit. Here no call waits for another: it gets an idle thread, or a new one. Idle threads are kept, since
`Thread.start` blocks until the thread runs, which costs the event loop milliseconds while the model's thread has the
GIL. So a call may find in `threading.local` what an earlier one left there; an event loop that it set is removed.

`OwnTime` counts only the seconds that the machine gave: a slow machine decides nothing about an episode. A limit on
wall-clock time falls on whatever is slow while other programs have the processors, and in a training those are the
long, failing episodes. Here a second counts as its share: with eight programs that want to run on two processors, as a
quarter. Nor does time count in which this process itself was kept from running.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import lru_cache, partial
from queue import SimpleQueue
from types import CodeType, TracebackType
from typing import Any, ParamSpec, TypeVar

from agentrl_cli.errors import EnvError, describe_error
from agentrl_cli.registry.files import CALL, code_of, from_outside
from agentrl_cli.registry.plugins import processors

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("agentrl.threads")


class Quit(EnvError):
    """SystemExit, KeyboardInterrupt or CancelledError that a project's code raised."""

    def __init__(self, message: str, cause: BaseException) -> None:
        super().__init__(message)
        self.__cause__ = cause


def _result(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """(return value, exception). Has no reference to the call: an exception keeps its frames alive."""
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001 - passed to the caller
        return None, RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
    except BaseException as error:  # noqa: BLE001 - a thread gets no Ctrl-C, so the code itself raised it
        return None, Quit(describe_error(error), error)


class _Kept:
    """A daemon thread that is kept for further calls, and its calls.

    An exception that another thread sets for project code (`PyThreadState_SetAsyncExc`, as time limits do) may arrive
    after that has ended, at any place here: then a fresh thread continues.
    """

    def __init__(self) -> None:
        self.wake: SimpleQueue[None] = SimpleQueue()
        self.calls: deque[_Call] = deque()  # `wake` would lose what it hands out meanwhile
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._serve, name="agentrl-code", daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                if self.calls:
                    self.calls[0].work(self)
                    done = self.calls.popleft()
                    del done.answer, done.outcome  # an exception's frames hold the call
                else:
                    self.wake.get()
        except BaseException:  # noqa: BLE001 - it was raised for code that had ended
            self._start()


class _Call:
    """A call in a thread; `work` may be continued where it was left."""

    def __init__(self, function: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        self.function, self.answer, self.ended = function, answer, threading.Event()
        self.begun = self.freed = False
        self.outcome: tuple[Any, BaseException | None] | None = None

    def work(self, kept: _Kept) -> None:
        if not self.begun:
            self.begun = True
            self.outcome = _result(self.function)
        if self.outcome is None:
            self.outcome = None, EnvError("Another thread set an exception in this one.")
        asyncio.set_event_loop(None)
        self.ended.set()
        if not self.freed:
            self.freed = True
            _idle.append(kept)  # before the answer: the next call may follow at once
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
            self.answer.get_loop().call_soon_threadsafe(_tell, self.answer, *self.outcome)


_idle: list[_Kept] = []


def _tell(answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if answer.done():  # its deadline has passed
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)


_abandoned: list[threading.Event] = []
"""The ends of calls that were cancelled: their deadline has passed."""
if hasattr(os, "register_at_fork"):  # a forked child has none of these threads
    os.register_at_fork(after_in_child=_idle.clear)
    os.register_at_fork(after_in_child=_abandoned.clear)


def thread_metrics() -> dict[str, float]:
    """Return the number of abandoned threads that still run as `threads/abandoned`, if there are any."""
    _abandoned[:] = [ended for ended in _abandoned if not ended.is_set()]
    return {"threads/abandoned": float(len(_abandoned))} if _abandoned else {}


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a synchronous function in a daemon thread with the caller's context variables and return its result.

    If cancelled, it abandons the thread. Raises Quit if it raises SystemExit, KeyboardInterrupt or CancelledError.
    """
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    run = partial(contextvars.copy_context().run, function, *args, **kwargs)
    made = _Call(run, answer)
    ended = made.ended
    try:
        kept = _idle.pop()
    except IndexError:
        kept = _Kept()
    kept.calls.append(made)
    del made  # as `answer` below
    kept.wake.put(None)
    try:
        return await answer
    except asyncio.CancelledError:
        if not thread_metrics() and not ended.is_set():
            log.warning(
                "The function %s outlived its episode and still runs in its thread (metric threads/abandoned);"
                " the process will not wait for it",
                name_of(function),
            )
        _abandoned.append(ended)
        raise
    finally:
        del answer  # it holds the exception, whose traceback holds this frame


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a project's function, a coroutine function in the loop and any other in a thread, and return its result.

    A function that needs the main thread or the loop (`signal.alarm`, an own task) fails with Python's message for
    that; it is called again there, where no deadline cuts it off. Raises Quit like `in_thread`.
    """
    if is_async(function):
        return await function(*args, **kwargs)
    if code_of(function) in _IN_LOOP:
        answer = function(*args, **kwargs)
    else:
        try:
            answer = await in_thread(function, *args, **kwargs)
        except Exception as error:
            if not _needs_loop(error):
                raise
            stay_in_loop(function)
            log.warning(
                "%s needs the main thread (%s) and runs there from now on: no deadline cuts it off, and all episodes"
                " wait for it",
                name_of(function), error,
            )  # fmt: skip
            answer = function(*args, **kwargs)
    return await answer if inspect.isawaitable(answer) else answer


def stay_in_loop(function: Callable[..., Any]) -> None:
    """Let `call` run this function in the event loop's thread, which is the main thread of a run."""
    if code := code_of(function):
        _IN_LOOP.add(code)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine; also for objects with an asynchronous `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), CALL, None)
    )


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


@contextlib.contextmanager
def contain(what: str) -> Iterator[None]:
    """Contain a project's code: SystemExit and the like, raised by the code itself, become an EnvError.

    That is every BaseException that is not an Exception: a test framework's `fail()` raises one, too. A Ctrl-C of
    the user and a cancellation from outside pass through. A task that the code starts is contained, too: its
    exception ends the task alone, where asyncio would end the event loop.
    """
    token = _CONTAINED.set(True)
    with contextlib.suppress(RuntimeError):  # no event loop, no tasks
        _guard_tasks(asyncio.get_running_loop())
    try:
        yield
    except Quit as error:
        raise EnvError(f"{what} raised {error.message}") from error.__cause__
    except BaseException as error:
        if isinstance(error, Exception) or from_outside(error):
            raise
        raise EnvError(f"{what} raised {describe_error(error)}") from error
    finally:
        _CONTAINED.reset(token)


_CONTAINED: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "agentrl_contained", default=False
)
"""Whether code of a project runs; the tasks that it starts inherit it."""


class _Guarded(Coroutine[Any, Any, Any]):
    """A task's coroutine whose SystemExit or KeyboardInterrupt is Quit, which asyncio keeps for who awaits the task."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self.inner = inner

    def send(self, value: Any) -> Any:
        return self._step(self.inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self.inner.throw, *error)

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.inner.__await__()

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except (SystemExit, KeyboardInterrupt) as error:
            if from_outside(error):
                raise
            raise Quit(describe_error(error), error) from error


class _TaskFactory:
    """The loop's task factory, with the tasks of a project's code guarded."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        coro = _Guarded(coro) if _CONTAINED.get() else coro
        if self.inner is None:
            return asyncio.Task(coro, loop=loop, **options)
        return self.inner(loop, coro, **options)


def _guard_tasks(loop: asyncio.AbstractEventLoop) -> None:
    factory = loop.get_task_factory()
    if not isinstance(factory, _TaskFactory):
        loop.set_task_factory(_TaskFactory(factory))


_IN_LOOP: set[CodeType] = set()
"""Code of functions that `call` does not run in a thread."""


def _needs_loop(error: BaseException | None) -> bool:
    """Whether the exception, or its cause, reports that the code must run in the main thread, or in its loop."""
    said = ("signal only works in main thread", "no running event loop", "no current event loop")
    while error is not None:
        if isinstance(error, (ValueError, RuntimeError)) and any(t in str(error) for t in said):
            return True
        error = error.__cause__ or error.__context__
    return False


TICK = 0.25
"""Seconds after which a limit looks at the clock again."""
READ = 0.05
"""Seconds for which the slowness that was read counts: every tool call and grade of an episode asks for it."""
MOST = 100.0
"""A limit lasts at most so many times its seconds, however busy the machine is: what hangs ends."""


def slowness() -> float:
    """Return how many times as long as alone a program takes now: those that want to run, by processors; at least 1."""
    return _read_slowness(int(time.monotonic() / READ))


@lru_cache(maxsize=1)
def _read_slowness(_: int) -> float:
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            wanting = float(file.read().split()[3].partition("/")[0])
    except OSError:  # no Linux: the average of the last minute
        wanting = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1.0, wanting / processors())


class OwnTime:
    """`async with OwnTime(5.0) as limit:` ends its body as `asyncio.timeout` does, by the seconds it was given.

    `slowness`: how many times as long as alone everything takes at the moment. Without `seconds` there is no limit.
    """

    def __init__(self, seconds: float | None, slowness: Callable[[], float] = slowness) -> None:
        self.seconds = seconds
        self.had = 0.0
        """Seconds that the body had so far."""
        self._slowness = slowness
        self._timeout = asyncio.timeout(None)
        self._paused = 0
        self._looked = self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None
        """Its next look; cancelled while it is paused, None outside the body and once it has expired."""

    async def __aenter__(self) -> OwnTime:
        await self._timeout.__aenter__()
        if self.seconds is not None:
            self._looked = asyncio.get_running_loop().time()
            self._wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        await self._timeout.__aexit__(kind, error, trace)  # raises TimeoutError

    def expired(self) -> bool:
        """Whether the body was ended by this limit."""
        return self._timeout.expired()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Stop counting inside the block, where something else limits the waiting. Nests."""
        self._count()
        self._paused += 1
        if self._handle is not None:
            self._handle.cancel()
        try:
            yield
        finally:
            self._count()
            self._paused -= 1
            if self._handle is not None and not self._paused:
                self._wait()

    def _count(self) -> None:
        """Add the time since the last look, without its excess over the plan: then this process could not run."""
        now = asyncio.get_running_loop().time()
        if not self._paused:
            self.had += max(0.0, min(now, self._due) - self._looked) / min(self._slowness(), MOST)
        self._looked = now

    def _wait(self) -> None:
        assert self.seconds is not None
        self._due = self._looked + max(0.001, min(TICK, self.seconds - self.had))
        self._handle = asyncio.get_running_loop().call_at(self._due, self._look)

    def _look(self) -> None:
        self._count()
        if self.seconds is not None and self.had >= self.seconds:
            self._handle = None
            self._timeout.reschedule(self._looked)
        else:
            self._wait()
