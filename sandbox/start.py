"""What a forked child of a box does before it becomes the model's code: descriptors, user, rules, limits."""

from __future__ import annotations

import os
from typing import NoReturn

import confine


def descriptors(fds: tuple[int, ...], user: tuple[int, int] | None, rules: int | None) -> None:
    """Leaves exactly 0, 1, 2 and 3 open; from here on Landlock holds, or the user is another, where that holds."""
    if user:
        confine.oom_first()
        confine.become(*user)
    confine.prctl(4, 1)  # PR_SET_DUMPABLE: the init may look at the memory of what it watches
    if not user:
        confine.oom_first()
    if rules is not None:
        confine.restrict(rules)
    if min(fds) < 4:  # one of them would be overwritten before it is taken
        fds = tuple(os.dup2(os.dup(fd), 200 + n, inheritable=False) for n, fd in enumerate(fds))
    for target, fd in enumerate(fds):
        os.dup2(fd, target, inheritable=target < 3)
    os.closerange(4, 1024)


def standard_input(data: bytes) -> int:
    """A descriptor that gives a program its input."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY)
    return _file("stdin", data)


def _file(name: str, data: bytes, flags: int = os.MFD_CLOEXEC) -> int:
    """A descriptor of a file in memory, at its beginning."""
    file = os.memfd_create(name, flags)
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def shell(code: bytes, hidden: bool) -> NoReturn:
    """Becomes bash. `hidden`: not in the command line, which everyone in a container can read."""
    code = code.replace(b"\0", b"")
    os.set_inheritable(3, False)
    command = [b"bash", b"-c", code]
    if hidden:
        os.dup2(_file("script", b"exec 9<&-; " + code, 0), 9)
        command[2] = b". /dev/fd/9"
    confine.install_code_filter()
    os.execve("/bin/bash", command, dict(os.environ))
