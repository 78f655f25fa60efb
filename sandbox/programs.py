"""Programs: each runs in a process of its own, forked by the box, or by its template.

A template is a process that has done beforehand what every program's process does: rights taken away, limits set,
descriptors closed. That is half of what a short program costs. It never runs the model's code and its memory is closed
to it, but the code may signal it: one that was killed is missed before anything has run, one that was stopped goes on.
"""

from __future__ import annotations

import _socket as socket
import os
import select
import signal
import struct
from typing import Any, NoReturn

import confine
import start
import wire
import worker
from watch import Tree, signal_process

_NUMBER = struct.Struct("i")
_MOST = 1 << 16
"""Bytes of a program that go to the template at once; a longer one takes longer than its start."""
_SOCKET = 4
"""The template's descriptor: 0 is standard input, and those that it is sent come to lie at 1, 2 and 3."""
_RDHUP = 0x2000
_SAME = ("memory_mb", "file_mb")
"""Limits that the template has already."""


class Stopped(Exception):
    """The template did not answer within the wall limit: other code of the session keeps it from running."""


class Programs:
    """Starts the programs of one box. `base`: address space of the empty interpreter."""

    def __init__(
        self, host: socket.socket, level: str, base: int, user: tuple[int, int] | None, rules: int | None, tree: Tree
    ) -> None:
        self.host, self.level, self.base, self.user, self.rules, self.tree = host, level, base, user, rules, tree
        self.calm = False
        """Whether the last program started nothing: only then a template outlives the next one."""
        self._socket: socket.socket | None = None
        self._answer = select.poll()
        self._limits: tuple[Any, ...] = ()

    def start(
        self, op: str, code: bytes, stdin: bytes, limits: dict[str, Any], others: int, fds: tuple[int, int, int]
    ) -> int:
        """Starts a program (`run`) or a shell command (`bash`) and returns its pid.

        `others`: processes that count against its limit and are not its own; `fds`: output, errors, note. Raises
        OSError, and Stopped.
        """
        if self.calm and op == "run" and self.level == "ns" and len(code) < _MOST:
            pid = self._by_template(code, stdin, limits, others + 1, fds)
            if pid:
                return pid
        pid = confine.bare_fork()
        if pid == 0:
            self._child(op, code, stdin, limits, others, fds)
        return pid

    def forget(self) -> None:
        """Ends the template: the next program finds what the box has become."""
        self.calm = False
        if self._socket:
            self._socket.close()
            self._socket = None
        if self.tree.template:
            signal_process(self.tree.template, signal.SIGKILL)
            os.waitpid(self.tree.template, 0)
            self.tree.template = 0

    def _child(
        self, op: str, code: bytes, stdin: bytes, limits: dict[str, Any], others: int, fds: tuple[int, int, int]
    ) -> NoReturn:
        try:
            os.setsid()
            start.descriptors((start.standard_input(stdin), *fds), self.user, self.rules)
            confine.limit(limits, self.base, others, cpu=True)
            if op == "bash":
                start.shell(code, hidden=self.user is not None)
            confine.install_code_filter()
            worker.run_script(code, "main.py")
        except BaseException as error:  # noqa: BLE001 - last stop of a forked child: it must never return
            os.write(2, f"could not start: {error!r}\n".encode())
        os._exit(127)

    # the template, seen from the box

    def _by_template(
        self, code: bytes, stdin: bytes, limits: dict[str, Any], others: int, fds: tuple[int, ...]
    ) -> int:
        """The pid of a program that the template started; 0 where the template is gone and nothing has run."""
        wanted = tuple(limits[name] for name in _SAME)
        if self._socket and (not self.tree.template or wanted != self._limits):
            self.forget()
        if not self._socket:
            self._limits = wanted
            self._open(limits)
        given = start.standard_input(stdin) if stdin else -1
        try:
            signal_process(self.tree.template, signal.SIGCONT)
            return self._ask(_NUMBER.pack(others) + code, (*fds, given) if stdin else fds, limits["wall"])
        finally:
            if stdin:
                os.close(given)

    def _ask(self, request: bytes, fds: tuple[int, ...], patience: float) -> int:
        """What the template's child says first, or the template where there is none."""
        assert self._socket is not None
        rights = struct.pack(f"{len(fds)}i", *fds)
        try:
            self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            ready = {fd for fd, _ in self._answer.poll(patience * 1000)}
            if self.host.fileno() in ready:
                raise SystemExit(0)
            if not ready:
                raise Stopped
            answer = self._socket.recv(_NUMBER.size)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if not answer:
            self.forget()
            return 0
        (number,) = _NUMBER.unpack(answer)
        if number < 0:
            raise OSError(-number, "fork: " + os.strerror(-number))
        return int(number)

    def _open(self, limits: dict[str, Any]) -> None:
        """Forks a template."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = confine.bare_fork()
        if pid == 0:
            try:
                _serve(theirs.fileno(), limits, self.base)
            except BaseException as error:  # noqa: BLE001 - last stop of a forked child: it must never return
                os.write(2, f"the template ended: {error!r}\n".encode())
            os._exit(70)
        theirs.close()
        self._socket, self.tree.template = ours, pid
        self._answer = select.poll()
        self._answer.register(ours, select.POLLIN)
        self._answer.register(self.host, _RDHUP)


# the template itself


def _serve(fd: int, limits: dict[str, Any], base: int) -> NoReturn:
    """Gives up what a program must not have, then forks a program for every request until the box is gone."""
    confine.prctl(4, 1)  # PR_SET_DUMPABLE, else the next is not ours to write
    confine.oom_first()
    confine.prctl(4, 0)
    os.dup2(fd, 200, inheritable=False)
    os.dup2(start.standard_input(b""), 0)
    os.dup2(200, _SOCKET, inheritable=False)
    os.closerange(1, _SOCKET)
    os.closerange(_SOCKET + 1, 1024)
    confine.limit_sizes(limits, base)
    confine.install_code_filter()
    fork = confine.sibling_fork()
    box = socket.socket(fileno=_SOCKET)
    while True:
        request, fds = wire.take(box, _MOST + _NUMBER.size, 4)
        if not request:
            os._exit(0)
        try:
            pid = fork()
        except OSError as error:
            box.send(_NUMBER.pack(-(error.errno or 1)))
            pid = -1
        if pid == 0:
            try:
                _become(box, len(fds), limits, _NUMBER.unpack_from(request)[0])
                worker.run_script(request[_NUMBER.size :], "main.py")
            except BaseException as error:  # noqa: BLE001 - last stop of a forked child: it must never return
                os.write(2, f"could not start: {error!r}\n".encode())
            os._exit(127)
        for fd in fds:
            os.close(fd)


def _become(box: socket.socket, given: int, limits: dict[str, Any], others: int) -> None:
    """What is left to do for each program."""
    os.setsid()
    box.send(_NUMBER.pack(os.getpid()))  # before any code runs that could kill the template
    os.close(_SOCKET)
    if given > 3:
        os.dup2(_SOCKET + 1, 0)
        os.close(_SOCKET + 1)
    os.set_inheritable(3, False)
    confine.prctl(4, 1)  # PR_SET_DUMPABLE: the box may look at the memory of what it watches
    confine.limit_numbers(limits, others, cpu=True)
