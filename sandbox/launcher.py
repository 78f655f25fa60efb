"""Starts programs: each runs in a process of its own, forked by the box's init or by its template.

A template is a process that has already taken the first steps of every program's process: given up rights, set limits,
closed descriptors. That is half of the cost of a short program. It never runs the model's code, which cannot read its
memory but may signal it: a killed template is noticed before anything has run, and a stopped one is resumed.
"""

from __future__ import annotations

import _socket as socket
import os
import select
import signal
import struct
from typing import Any, NoReturn

from sandbox import worker
from sandbox.isolation import forks, namespaces, privileges
from sandbox.processes import ProcessTree, signal_process

_MOST = 1 << 16
"""Bytes of a program that go to the template in one message; a longer one takes longer than its start."""
_SOCKET = 4
"""The template's descriptor: 0 is its stdin, and the descriptors it receives become 1, 2, 3 and 5."""
_RDHUP = 0x2000


class Stopped(Exception):
    """The template did not answer within the wall limit: other code of the session keeps it from running."""


class Launcher:
    """Starts the programs of one box. `base`: address space of the empty interpreter, in bytes."""

    def __init__(
        self,
        host: socket.socket,
        level: str,
        base: int,
        user: tuple[int, int] | None,
        rules: int | None,
        tree: ProcessTree,
    ) -> None:
        self.host, self.level, self.base, self.user, self.rules, self.tree = (
            host,
            level,
            base,
            user,
            rules,
            tree,
        )
        self.quiet = False
        """Whether the last program started nothing: only then a template outlives the next one."""
        self._socket: socket.socket | None = None
        self._answer = select.poll()
        self._limits: dict[str, Any] = {}

    def start(
        self,
        op: str,
        code: bytes,
        stdin: bytes,
        limits: dict[str, Any],
        others: int,
        fds: tuple[int, int, int],
    ) -> int:
        """Starts a program (`run`) or a shell command (`bash`) and returns its pid.

        `others`: processes that count against its limit and are not its own; `fds`: stdout, stderr, note. Raises
        OSError and Stopped.
        """
        if self.quiet and op == "run" and self.level == "ns" and len(code) < _MOST:
            pid = self._by_template(code, stdin, limits, others + 1, fds)
            if pid:
                return pid
        pid = forks.bare_fork()
        if pid == 0:
            self._child(op, code, stdin, limits, others, fds)
        return pid

    def end_template(self) -> None:
        """Ends the template: the next program is forked from the box as it is now."""
        self.quiet = False
        if self._socket:
            self._socket.close()
            self._socket = None
        if self.tree.template:
            signal_process(self.tree.template, signal.SIGKILL)
            os.waitpid(self.tree.template, 0)
            self.tree.template = 0

    def _child(
        self,
        op: str,
        code: bytes,
        stdin: bytes,
        limits: dict[str, Any],
        others: int,
        fds: tuple[int, int, int],
    ) -> NoReturn:
        try:
            os.setsid()
            take_descriptors((standard_input(stdin), *fds), self.user, self.rules)
            privileges.apply_limits(limits, self.base, others, cpu=True)
            if op == "bash":
                _become_shell(code, hidden=self.user is not None)
            privileges.install_code_filter()
            worker.run_script(code, "main.py")
        except BaseException as error:  # noqa: BLE001 - last stop of a forked child: it must never return
            os.write(2, f"could not start: {error!r}\n".encode())
        os._exit(127)

    # the template, seen from the box

    def _by_template(
        self, code: bytes, stdin: bytes, limits: dict[str, Any], others: int, fds: tuple[int, ...]
    ) -> int:
        """Return the pid of a program that the template started; 0 if the template has ended and nothing has run."""
        wanted = {**limits, "wall": 0, "others": others}
        if self._socket and (not self.tree.template or wanted != self._limits):
            self.end_template()
        if not self._socket:
            self._limits = wanted
            self._open(limits, others)
        given = standard_input(stdin)
        try:
            signal_process(self.tree.template, signal.SIGCONT)
            return self._ask(code, (*fds, given), limits["wall"])
        finally:
            os.close(given)

    def _ask(self, request: bytes, fds: tuple[int, ...], timeout: float) -> int:
        """Return the pid that the template's child sends first; 0 if the template has ended or cannot fork."""
        assert self._socket is not None
        rights = struct.pack(f"{len(fds)}i", *fds)
        try:
            self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            ready = {fd for fd, _ in self._answer.poll(timeout * 1000)}
            if self.host.fileno() in ready:
                raise SystemExit(0)
            if not ready:
                raise Stopped
            answer = self._socket.recv(16)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if (
            not answer.isdigit()
        ):  # the box itself is not under the template's limits: it forks the program
            self.end_template()
            return 0
        return int(answer)

    def _open(self, limits: dict[str, Any], others: int) -> None:
        """Forks a template."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = forks.bare_fork()
        if pid == 0:
            try:
                _serve_template(theirs.fileno(), limits, self.base, others)
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


def _serve_template(fd: int, limits: dict[str, Any], base: int, others: int) -> NoReturn:
    """Gives up rights, then forks a program for every request until the box closes its socket."""
    privileges.set_dumpable(True)  # else the next file could not be written
    privileges.prefer_for_oom_kill()
    privileges.set_dumpable(False)
    os.dup2(fd, 200, inheritable=False)
    os.dup2(standard_input(b""), 0)
    os.dup2(200, _SOCKET, inheritable=False)
    os.closerange(1, _SOCKET)
    os.closerange(_SOCKET + 1, 1024)
    privileges.apply_limits(
        limits, base, others, cpu=True
    )  # it uses little CPU time itself; if it meets the limit, it is missed
    privileges.install_code_filter()
    box, data = socket.socket(fileno=_SOCKET), bytearray(_MOST)
    # Every object touched from here on is on a page that is copied for each program: hence no calls of functions.
    fork, dumpable, setsid, getpid = (
        forks.sibling_fork(),
        privileges.dumpable(),
        os.setsid,
        os.getpid,
    )
    receive, send, closerange, pieces = box.recvmsg_into, box.send, os.closerange, [data]
    while True:
        size = receive(pieces, 64)[0]
        if not size:
            os._exit(0)
        os.set_inheritable(3, False)
        pid = fork()
        if pid == 0:
            setsid()
            send(b"%d" % getpid())  # before any code runs that could kill the template
            os.dup2(_SOCKET + 1, 0)
            closerange(_SOCKET, _SOCKET + 2)
            dumpable()  # the box reads the memory use of what it supervises
            worker.run_script(data[:size], "main.py")
        if pid < 0:
            send(b"%d" % pid)
        closerange(1, _SOCKET)
        closerange(_SOCKET + 1, _SOCKET + 2)


# what a forked child does before it runs the model's code


def take_descriptors(fds: tuple[int, ...], user: tuple[int, int] | None, rules: int | None) -> None:
    """Becomes the user or enters Landlock's rules, then makes `fds` descriptors 0 to 3 and closes the rest."""
    if user:
        privileges.prefer_for_oom_kill()
        namespaces.become(*user)
    privileges.set_dumpable(True)  # the init reads the memory use of what it supervises
    if not user:
        privileges.prefer_for_oom_kill()
    if rules is not None:
        privileges.restrict(rules)
    if min(fds) < 4:  # one of them would be overwritten before it is duplicated
        fds = tuple(os.dup2(os.dup(fd), 200 + n, inheritable=False) for n, fd in enumerate(fds))
    for target, fd in enumerate(fds):
        os.dup2(fd, target, inheritable=target < 3)
    os.closerange(4, 1024)


def standard_input(data: bytes) -> int:
    """Return a descriptor from which a program reads its input."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY)
    return _memory_file("stdin", data)


def _memory_file(name: str, data: bytes, flags: int = os.MFD_CLOEXEC) -> int:
    """Return a descriptor of a file in memory, at its start."""
    file = os.memfd_create(name, flags)
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _become_shell(code: bytes, hidden: bool) -> NoReturn:
    """Replaces the process by bash. `hidden`: keeps the code out of the command line, which a container can read."""
    code = code.replace(b"\0", b"")
    os.set_inheritable(3, False)
    command = [b"bash", b"-c", code]
    if hidden:
        os.dup2(_memory_file("script", b"exec 9<&-; " + code, 0), 9)
        command[2] = b". /dev/fd/9"
    privileges.install_code_filter()
    os.execve("/bin/bash", command, dict(os.environ))
