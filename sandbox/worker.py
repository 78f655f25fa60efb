"""The processes that run the model's code: one for a script, and one that stays for a session's cells and calls.

Everything here shares its interpreter with hostile code, so nothing here is trusted: what it reports only chooses
among the results that are the model's fault, and its box takes every answer for a claim.
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
import re
import sys
import threading
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

import confine
import ends
import plain
import wire

_NOTE_FD = 3
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def main_module() -> types.ModuleType:
    """A fresh `__main__`, as a script sees it."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


def remember(name: str, source: str) -> None:
    """Lets tracebacks and `inspect.getsource` show lines of code that has no file."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)


def classify(error: BaseException) -> tuple[str, str]:
    """Status and detail of an exception that nobody caught."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            break
        found = _limit_of(seen)
        if found is not None:
            return found
        seen = seen.__cause__ or seen.__context__
    return "exception", type(error).__name__


def _limit_of(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, MemoryError):
        return "memory", "MemoryError"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "process_limit", "threads"
    if not isinstance(error, OSError):
        return None
    number = error.errno
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "disk_limit", ends.full_detail()
    if number == errno.EFBIG:
        return "disk_limit", ends.LARGE
    if number == errno.EMFILE:
        return "open_files_limit", ""
    if number == errno.EAGAIN and isinstance(error, BlockingIOError):
        return "process_limit", "processes"
    if number == errno.ENOMEM:
        return "memory", "ENOMEM"
    if type(error).__name__ == "gaierror" or (number == errno.EACCES and _from_socket(error)):
        return "blocked", "net"
    if number == errno.EROFS or (number == errno.EACCES and error.filename is not None):
        return "blocked", "fs"
    if number == errno.EPERM:
        return "blocked", "syscall"
    return None


def _from_socket(error: BaseException) -> bool:
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename.endswith("socket.py"):
            return True
        step = step.tb_next
    return error.__traceback__ is not None and getattr(error, "filename", None) is None


def show(error: BaseException) -> None:
    """Prints the traceback without the frames of this file, and without the place where Python is on this host."""
    step = error.__traceback__
    ours = {__file__, ast.parse.__code__.co_filename} if isinstance(error, SyntaxError) else {__file__}
    while step is not None and step.tb_frame.f_code.co_filename in ours:
        step = step.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, step))
        text = text.replace(f'File "{sys.base_prefix}/', 'File "/usr/')
    except Exception as failure:  # noqa: BLE001 - an exception whose own __str__ raises
        text = f"{type(error).__name__} (and printing it raised {type(failure).__name__})\n"
    sys.stderr.write(text)


def exit_code(error: SystemExit) -> int:
    """The exit code of sys.exit(value), as Python itself computes it."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def run_script(source: bytes | bytearray, name: str) -> NoReturn:
    """Runs a program as `python name` does and ends the process; what went wrong goes to descriptor 3 as a note."""
    gc.freeze()  # what the collector knows from here on is the program's
    code, note = script(source, name)
    try:
        if is_awaited():
            threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter itself calls at its end
            atexit._run_exitfuncs()
        _flush()
        _let_go()
    except BaseException as error:  # noqa: BLE001 - as below
        code, note = code or 1, note or " ".join(classify(error))
    if note:
        with suppress(OSError):  # a program may close what it does not know
            os.write(_NOTE_FD, note.encode("utf-8", "replace")[:200])
    os._exit(code)


def _let_go() -> None:
    """What the interpreter does at its end: files that a program left open are written, finalizers are called."""
    with suppress(MemoryError):  # of the list of all objects: the program itself had enough
        for one in gc.get_objects():  # beforehand, since in a cycle a file may be closed before its own buffer
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
    """Runs a program up to its last line; its exit code, and what went wrong."""
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


def is_awaited() -> bool:
    """Whether the end of a program has to wait for threads, or anything of the program is called at it.

    What the interpreter does beforehand is seen by nothing else, and takes as long as a short program.
    """
    known = threading.__dict__
    # One is the main thread's.
    threads = len(known.get("_shutdown_locks", "??")) > 1 or len(known.get("_active", "??")) > 1
    called = known.get("_threading_atexits", True) or atexit._ncallbacks()
    return bool(threads or called) or sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__


def _reaped(pid: int, options: int = os.WNOHANG) -> bool:
    """Whether a process is no child of this one any more."""
    try:
        return os.waitpid(pid, options | confine.ANY_KIND)[0] == pid
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
    except BaseException:  # noqa: BLE001 - stderr may be closed or replaced; the note still says what happened
        return


class Session:
    """A Python session: cells and calls against one namespace, each preceded by a fork that keeps the state."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.module = main_module()
        self.pid = os.getpid()
        self.nonce = ""
        self.left: list[int] = []
        """Checkpoints that the box keeps, to be reaped when they have ended."""
        self.last = 0
        """The last one that it did not keep: it ends it before it asks again."""
        self.line, self.inode = -1, 0
        """What the next one sleeps on."""

    def serve(self) -> NoReturn:
        """Answers requests until the box closes the socket."""
        while True:
            received = wire.receive_one(self.control, max_fds=1)
            if received is None:
                os._exit(0)
            frame, fds = received
            self.nonce = frame.header["nonce"]
            if not self._has_line(fds):
                self._say({"line": "", "nonce": self.nonce})
                continue
            kept = self._checkpoint("keep" in frame.header)
            if kept is None:
                continue  # this process is the checkpoint, and was called upon
            answer = {"done": ""}
            if frame.header["op"] == "cell":
                status, detail = self.cell(frame.header["name"], frame.body) if kept else ("process_limit", "processes")
                answer = {"status": status, "detail": detail}
            else:
                self.calls(frame)
            self._end()
            self._say({**answer, "checkpoint": str(kept), "nonce": self.nonce})

    def _has_line(self, fds: list[int]) -> bool:
        """Whether the next checkpoint has something to sleep on: a new line, or one that no cell has closed."""
        try:
            if fds:
                self.line = fds[0]
                os.set_inheritable(self.line, False)
                self.inode = os.fstat(self.line).st_ino
            return os.fstat(self.line).st_ino == self.inode
        except OSError:
            return False

    def _checkpoint(self, keep: bool) -> int | None:
        """Forks the state as it is. The child sleeps on the line; returns its pid, 0 without one, None when it wakes.

        `keep`: it may be woken later, so it takes the line with it.
        """
        if self.left:
            self.left = [pid for pid in self.left if not _reaped(pid)]
        if self.last:
            _reaped(self.last, 0)
            self.last = 0
        try:
            pid = confine.sleeping_fork(self.line)
        except OSError:
            pid = -1
        if pid and keep:
            os.close(self.line)
            self.line = -1
        if pid > 0 and keep:
            self.left.append(pid)
        elif pid > 0:
            self.last = pid
        if pid:
            return max(pid, 0)
        os.dup2(self.line, self.control.fileno(), inheritable=False)
        os.close(self.line)
        self.line = -1
        self.pid = os.getpid()
        self._say({"hello": ""})
        return None

    def _end(self) -> None:
        if os.getpid() != self.pid:
            os._exit(0)  # a child that the cell forked came all the way here
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__

    def _say(self, header: dict[str, str], body: bytes = b"") -> None:
        try:
            wire.say(self.control, header, body)
        except OSError:
            os._exit(1)

    def cell(self, name: str, source: bytes) -> tuple[str, str]:
        """Executes one cell; an expression at its end is printed, as a notebook does."""
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

    def calls(self, frame: wire.Frame) -> None:
        """Answers the calls `[[name, args, kwargs], ...]` one by one, as tagged plain values."""
        for number, (name, args, kwargs) in enumerate(json.loads(frame.body)):
            header = {"i": str(number), "status": "ok", "detail": "", "nonce": self.nonce}
            body = b""
            try:
                function = _find(self.module, name)
                value = function(*plain.decode(args), **plain.decode(kwargs))
                body = json.dumps(plain.encode(value), separators=(",", ":")).encode("utf-8", "replace")
                if len(body) > wire.MAX_ANSWER:
                    raise plain.NotPlain("the answer is too large")
            except BaseException as error:  # noqa: BLE001 - the code under test may raise anything
                header["status"], header["detail"] = classify(error)
                header["error"] = _short(error)
                body = b""
            if os.getpid() != self.pid:
                os._exit(0)
            self._say(header, body)


_STATEMENT = re.compile(
    r"print\((?:[^()]|\([^()]*\))*\)\s*$"
    r"|(?:import|from|def|class|for|while|if|elif|else|with|try|except|finally|assert|del|return|raise|pass|global|async"
    r"|match)\b"
    r"|@|[A-Za-z_][\w.\[\]'\"]*\s*(?:[-+*/%&|^@]|//|\*\*|<<|>>)?=(?!=)"
)


def compile_cell(text: str, name: str) -> list[types.CodeType]:
    """The code of a cell; an expression at its end comes apart and prints its value.

    Only where the last line may be such an expression is a tree made, which costs more than the rest together.
    """
    last = text.rstrip().rpartition("\n")[2]
    if ";" not in last and _STATEMENT.match(last):
        return [compile(text, name, "exec", dont_inherit=True)]
    tree = ast.parse(text, name)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return [compile(tree, name, "exec", dont_inherit=True)]
    shown = ast.Interactive([tree.body.pop()])
    return [
        compile(tree, name, "exec", dont_inherit=True),
        compile(shown, name, "single", dont_inherit=True),
    ]


def _find(module: types.ModuleType, name: str) -> Any:
    """A function by its name, or a method as `Class.method` (the class is made without arguments)."""
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
