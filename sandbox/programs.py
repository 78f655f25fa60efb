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
import worker
from watch import Tree, signal_process

_MOST = 1 << 16
"""Bytes of a program that go to the template at once; a longer one takes longer than its start."""
_SOCKET = 4
"""The template's descriptor: 0 is taken, and those that it is sent come to lie at 1, 2, 3 and beside it."""
_RDHUP = 0x2000


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
        self._limits: dict[str, Any] = {}

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

    def _by_template(self, code: bytes, stdin: bytes, limits: dict[str, Any], others: int, fds: tuple[int, ...]) -> int:
        """The pid of a program that the template started; 0 where the template is gone and nothing has run."""
        wanted = {**limits, "wall": 0, "others": others}
        if self._socket and (not self.tree.template or wanted != self._limits):
            self.forget()
        if not self._socket:
            self._limits = wanted
            self._open(limits, others)
        given = start.standard_input(stdin)
        try:
            signal_process(self.tree.template, signal.SIGCONT)
            return self._ask(code, (*fds, given), limits["wall"])
        finally:
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
            answer = self._socket.recv(16)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if not answer.isdigit():  # it is gone, or cannot fork: the box is under no such limit as it is
            self.forget()
            return 0
        return int(answer)

    def _open(self, limits: dict[str, Any], others: int) -> None:
        """Forks a template."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = confine.bare_fork()
        if pid == 0:
            try:
                _serve(theirs.fileno(), limits, self.base, others)
            except BaseException as error:  # noqa: BLE001 - last stop of a forked child: it must never return
                os.write(2, f"could not start: {error!r}\n".encode())
            finally:
                os._exit(127)
        theirs.close()
        self._socket, self.tree.template = ours, pid
        self._answer = select.poll()
        self._answer.register(ours, select.POLLIN)
        self._answer.register(self.host, _RDHUP)


# the template itself


def _serve(fd: int, limits: dict[str, Any], base: int, others: int) -> NoReturn:
    """Gives up what a program must not have, then forks a program for every request until the box is gone."""
    confine.prctl(4, 1)  # PR_SET_DUMPABLE, else the next is not ours to write
    confine.oom_first()
    confine.prctl(4, 0)
    os.dup2(fd, 200, inheritable=False)
    os.dup2(start.standard_input(b""), 0)
    os.dup2(200, _SOCKET, inheritable=False)
    os.closerange(1, _SOCKET)
    os.closerange(_SOCKET + 1, 1024)
    confine.limit(limits, base, others, cpu=True)  # of time it takes little itself; one that ends over that is missed
    confine.install_code_filter()
    box, data = socket.socket(fileno=_SOCKET), bytearray(_MOST)
    # Every object touched from here on is on a page that is copied, for each program: hence no calls of functions.
    fork, dumpable, setsid, getpid = confine.sibling_fork(), confine.dumpable(), os.setsid, os.getpid
    take, send, closerange, pieces = box.recvmsg_into, box.send, os.closerange, [data]
    while True:
        size = take(pieces, 64)[0]
        if not size:
            os._exit(0)
        os.set_inheritable(3, False)
        pid = fork()
        if pid == 0:
            setsid()
            send(b"%d" % getpid())  # before any code runs that could kill the template
            os.dup2(_SOCKET + 1, 0)
            closerange(_SOCKET, _SOCKET + 2)
            dumpable()  # the box may look at the memory of what it watches
            worker.run_script(data[:size], "main.py")
        if pid < 0:
            send(b"%d" % pid)
        closerange(1, _SOCKET)
        closerange(_SOCKET + 1, _SOCKET + 2)
