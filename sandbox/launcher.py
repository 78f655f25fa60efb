"""Starts the processes that run the model's code: the box's init forks them, and they give up their rights first."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sandbox import worker
from sandbox.checkpoints import Box
from sandbox.isolation import forks, namespaces, privileges

_SCRIPT = 4
"""Descriptor of a hidden script; 0 to 2 are the standard ones, and 3 is for a program's note or a session's frames."""


def start_program(
    box: Box, op: str, code: bytes, stdin: bytes, limits: dict[str, Any], fds: tuple[int, int, int]
) -> int:
    """Starts a program (`run`) or a shell command (`bash`) and returns its pid. `fds`: stdout, stderr, note."""
    if op == "run":
        return fork(box, lambda: worker.run_script(code, "main.py"), fds, limits, stdin=stdin)
    command, script = [b"bash", b"-c", code.replace(b"\0", b"")], b""
    if box.user is not None:  # other boxes of a container can read a command line
        script = b"exec %d<&-; " % _SCRIPT + command[2]
        command[2] = b". /dev/fd/%d" % _SCRIPT
    environment = dict(os.environ)

    def become_shell() -> None:
        os.execve("/bin/bash", command, environment)

    return fork(box, become_shell, fds, limits, stdin=stdin, script=script)


def fork(
    box: Box,
    main: Callable[[], object],
    fds: tuple[int, int, int],
    limits: dict[str, Any],
    *,
    stdin: bytes = b"",
    script: bytes = b"",
    reserve: int = 0,
    cpu: bool = True,
) -> int:
    """Forks a process that runs `main` under limits; returns its pid. Raises OSError.

    `fds`: its descriptors 1 to 3; `reserve`: processes besides the box's own that count against its limit and are not
    its own; `cpu`: whether its CPU time is limited as a whole.
    """
    pid = forks.bare_fork()
    if pid:
        return pid
    try:
        os.setsid()
        given = (_input(stdin), *fds, *([_memory_file("script", script)] if script else []))
        take_descriptors(given, box.user, box.rules)
        others = box.own_processes() + reserve
        privileges.apply_limits(limits, box.base, others, cpu=cpu)
        privileges.install_code_filter()
        main()
    except BaseException as error:  # noqa: BLE001 - last stop of a forked child: it must never return
        os.write(2, f"could not start: {error!r}\n".encode())
    os._exit(127)


def take_descriptors(fds: tuple[int, ...], user: tuple[int, int] | None, rules: int | None) -> None:
    """Becomes the user or enters Landlock's rules, then makes `fds` descriptors 0, 1 … and closes the rest."""
    if user:
        privileges.prefer_for_oom_kill()
        namespaces.become(*user)
    privileges.set_dumpable(True)  # the init reads the memory use of what it supervises
    if not user:
        privileges.prefer_for_oom_kill()
    if rules is not None:
        privileges.restrict(rules)
    if min(fds) < len(fds):  # one of them would be overwritten before it is duplicated
        fds = tuple(os.dup2(os.dup(fd), 200 + n, inheritable=False) for n, fd in enumerate(fds))
    for target, fd in enumerate(fds):
        os.dup2(fd, target, inheritable=target != 3)
    os.closerange(len(fds), 1024)


def _input(data: bytes) -> int:
    """Return a descriptor from which a program reads its input."""
    return _memory_file("stdin", data) if data else os.open(os.devnull, os.O_RDONLY)


def _memory_file(name: str, data: bytes) -> int:
    """Return a descriptor of a file in memory, at its start."""
    file = os.memfd_create(name)
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file
