"""The processes that run the model's code: one for a script, and one that stays for a session's cells and calls.

Everything here shares its interpreter with hostile code, so nothing here is trusted: its answers are claims, which
choose only among the results that are the model's fault.
"""

from __future__ import annotations

import _socket as socket
import ast
import atexit
import builtins
import errno
import gc
import io
import json
import linecache
import os
import select
import sys
import threading
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

from sandbox import exit_status
from sandbox.isolation import forks
from sandbox.protocol import framing, values

_NOTE_FD = 3
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def main_module() -> types.ModuleType:
    """Return a fresh `__main__`, as a script sees it."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


def remember(name: str, source: str) -> None:
    """Lets tracebacks and `inspect.getsource` show lines of code that has no file."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)


def classify(error: BaseException) -> tuple[str, str]:
    """Status and detail of an uncaught exception."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            break
        found = _limit_of(seen)
        if found is not None:
            return found
        seen = seen.__cause__ or seen.__context__
    return "exception", type(error).__name__


_BY_ERRNO = {
    errno.EFBIG: ("disk_limit", exit_status.LARGE),
    errno.EMFILE: ("open_files_limit", ""),
    errno.EAGAIN: ("process_limit", "processes"),
    errno.ENOMEM: ("memory", "ENOMEM"),
    errno.EROFS: ("blocked", "fs"),
    errno.EPERM: ("blocked", "syscall"),
}


def _limit_of(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, MemoryError):
        return "memory", "MemoryError"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "process_limit", "threads"
    if not isinstance(error, OSError):
        return None
    number = error.errno
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "disk_limit", exit_status.full_detail()
    if type(error).__name__ == "gaierror" or (number == errno.EACCES and _from_socket(error)):
        return "blocked", "net"
    if number == errno.EACCES and error.filename is not None:
        return "blocked", "fs"
    if number == errno.EAGAIN and not isinstance(error, BlockingIOError):
        return None
    return _BY_ERRNO.get(number or 0)


def _from_socket(error: BaseException) -> bool:
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename.endswith("socket.py"):
            return True
        step = step.tb_next
    return error.__traceback__ is not None and getattr(error, "filename", None) is None


def show(error: BaseException) -> None:
    """Prints the traceback without the frames of this file and without the host's path of Python."""
    step = error.__traceback__
    own = (
        {__file__, ast.parse.__code__.co_filename} if isinstance(error, SyntaxError) else {__file__}
    )
    while step is not None and step.tb_frame.f_code.co_filename in own:
        step = step.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, step))
        text = text.replace(f'File "{sys.base_prefix}/', 'File "/usr/')
    except Exception as failure:  # noqa: BLE001 - an exception whose own __str__ raises
        text = f"{type(error).__name__} (and printing it raised {type(failure).__name__})\n"
    sys.stderr.write(text)


def exit_code(error: SystemExit) -> int:
    """Return the exit code of sys.exit(value), as Python itself computes it."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def run_script(source: bytes | bytearray, name: str) -> NoReturn:
    """Runs a program as `python name` does and ends the process; writes an error to descriptor 3 as a note."""
    gc.freeze()  # from here on the collector sees the program's objects alone
    code, note = script(source, name)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter at its end
        atexit._run_exitfuncs()
        _flush()
        _release_objects()
    except BaseException as error:  # noqa: BLE001 - as below
        code, note = code or 1, note or " ".join(classify(error))
    if note:
        with suppress(OSError):  # the program may have closed it
            os.write(_NOTE_FD, note.encode("utf-8", "replace")[:200])
    os._exit(code)


def _release_objects() -> None:
    """Does as the interpreter at its end: flushes files that a program left open and calls finalizers."""
    with suppress(MemoryError):  # from the list of all objects; the program itself has finished
        for (
            one
        ) in gc.get_objects():  # first, since in a cycle a file may be closed before its own buffer
            if issubclass(type(one), _BUFFERED):
                with suppress(Exception):
                    one.flush()
    sys.modules.pop("__main__", None)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    gc.collect()
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def script(source: bytes | bytearray, name: str) -> tuple[int, str]:
    """Runs a program up to its last line; returns its exit code and the note of an error."""
    note, code = "", 0
    try:
        text = source.decode("utf-8", "replace")
        remember(name, text)
        sys.argv = [name]
        exec(compile(text, name, "exec", dont_inherit=True), main_module().__dict__)
    except SystemExit as error:
        code = exit_code(error)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything; it is reported, not handled
        code, note = 1, " ".join(classify(error))
        _report(error)
    return code, note


def _has_ended(pid: int) -> bool:
    """Whether a child has ended and was reaped."""
    try:
        return os.waitpid(pid, os.WNOHANG | forks.ANY_KIND)[0] == pid
    except ChildProcessError:
        return True


def _report(error: BaseException) -> None:
    if sys.excepthook is not sys.__excepthook__:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
            return
        except BaseException as failure:  # noqa: BLE001 - the program's own hook
            error = failure
    try:
        show(error)
    except BaseException:  # noqa: BLE001 - stderr may be closed or replaced; the note still names what happened
        return


class Interpreter:
    """A session's cells and calls against one namespace, each preceded by a fork that keeps the state."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.module = main_module()
        self.pid = os.getpid()
        self.nonce = ""
        self.left: list[int] = []
        """Checkpoints, to be reaped once they have ended."""
        self.wake_fd = -1
        """The socket on which the last checkpoint sleeps. It stays open until the next one comes, so that code which
        opens as many files as it may leaves room for it."""

    def serve(self) -> NoReturn:
        """Answers requests until the box closes the socket."""
        while True:
            framing.wait(self.control, select.POLLIN, None)
            with suppress(OSError):
                os.close(self.wake_fd)
            frame = framing.receive(self.control, max_fds=1)
            if frame is None:
                os._exit(0)
            self.nonce = frame.header["nonce"]
            if frame.header["op"] == "ping":
                self._say({"nonce": self.nonce})
                continue
            (self.wake_fd,) = frame.fds
            kept = self._checkpoint()
            if kept is None:
                continue  # this process is the checkpoint, and was woken
            answer: dict[str, Any] = {"done": True}
            if frame.header["op"] == "cell":
                status, detail = (
                    self.cell(frame.header["name"], frame.body)
                    if kept
                    else ("process_limit", "processes")
                )
                answer = {"status": status, "detail": detail}
            else:
                self.calls(frame)
            self._end()
            self._say({**answer, "checkpoint": kept, "nonce": self.nonce})

    def _checkpoint(self) -> int | None:
        """Forks the current state into a sleeping child. Returns its pid; 0 if it cannot, None in the child."""
        os.set_inheritable(self.wake_fd, False)
        self.left = [pid for pid in self.left if not _has_ended(pid)]
        try:
            pid = forks.sleeping_fork(self.wake_fd)
        except OSError:
            return 0
        if pid:
            self.left.append(pid)
            return pid
        os.dup2(self.wake_fd, self.control.fileno(), inheritable=False)
        self.pid = os.getpid()
        self._say({"hello": True})
        return None

    def _end(self) -> None:
        if os.getpid() != self.pid:
            os._exit(0)  # a child that the cell forked returned up to here
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__

    def _say(self, header: dict[str, Any], body: bytes = b"") -> None:
        try:
            framing.send(self.control, header, body)
        except OSError:
            os._exit(1)

    def cell(self, name: str, source: bytes) -> tuple[str, str]:
        """Executes one cell; the value of an expression at its end is printed, as in a notebook."""
        try:
            text = source.decode("utf-8", "replace")
            remember(name, text)
            for code in compile_cell(text, name):
                exec(code, self.module.__dict__)
        except SystemExit as error:
            number = exit_code(error)
            return ("exit", str(number)) if number else ("ok", "")
        except BaseException as error:  # noqa: BLE001 - a cell may raise anything; it is reported, not handled
            _report(error)
            return classify(error)
        return "ok", ""

    def calls(self, frame: framing.Frame) -> None:
        """Answers the calls `[[name, args, kwargs], ...]` one by one, as tagged plain values."""
        for number, (name, args, kwargs) in enumerate(json.loads(frame.body)):
            header = {"i": number, "status": "ok", "detail": "", "nonce": self.nonce}
            body = b""
            try:
                function = _find(self.module, name)
                value = function(*values.decode(args), **values.decode(kwargs))
                body = json.dumps(values.encode(value), separators=(",", ":")).encode(
                    "utf-8", "replace"
                )
                if len(body) > framing.MAX_ANSWER:
                    raise values.NotPlain("the answer is too large")
            except BaseException as error:  # noqa: BLE001 - the code under test may raise anything
                header["status"], header["detail"] = classify(error)
                header["error"] = _short(error)
                body = b""
            if os.getpid() != self.pid:
                os._exit(0)
            self._say(header, body)


def serve_session() -> NoReturn:
    """Runs a session's cells and calls, which come by descriptor 3."""
    Interpreter(socket.socket(fileno=3)).serve()


def compile_cell(text: str, name: str) -> list[types.CodeType]:
    """Return the code of a cell; an expression at its end is compiled separately, to print its value."""
    tree = ast.parse(text, name)
    parts: list[tuple[ast.Module | ast.Interactive, str]] = [(tree, "exec")]
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        parts.append((ast.Interactive([tree.body.pop()]), "single"))
    return [compile(part, name, mode, dont_inherit=True) for part, mode in parts]


def _find(module: types.ModuleType, name: str) -> Any:
    """Return a function by its name, or a method as `Class.method` (the class is made without arguments)."""
    first, *rest = name.split(".")
    try:
        found = module.__dict__[first]
    except KeyError:
        raise NameError(f"name {first!r} is not defined") from None
    for part in rest:
        found = getattr(found() if isinstance(found, type) else found, part)
    return found


def _short(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:300].encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - an exception whose own __str__ raises
        return type(error).__name__[:300]
