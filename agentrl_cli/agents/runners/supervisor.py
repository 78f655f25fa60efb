"""Starts the programs of agents, each below a small process that ends everything the program started.

That process adopts orphans (a subreaper), so it also finds what left the program's group or session: a daemon, say. It
ends the rest when the program has ended, when `end` asks for it, and when this process is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

_SCRIPT = """\
import ctypes, os, select, signal, sys, time

def reap(flags):
    global status
    try:
        while (ended := os.waitpid(-1, flags))[0]:
            if ended[0] == program:
                status = ended[1]
    except ChildProcessError:
        return False
    return True

def children():
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return file.read().split()
    except OSError:
        return [program] * (status is None)

leash, *command = sys.argv[1:]
leash, status = int(leash), None
try:
    libc = ctypes.CDLL(None)
    libc.prctl(4, 0, 0, 0, 0)  # no core file when it ends by its program's signal
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
except (AttributeError, OSError):
    pass  # not Linux: the program's own process is ended, and its group by the host
os.set_inheritable(leash, False)
bell, ring = os.pipe()
os.set_blocking(ring, False)
signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
signal.signal(signal.SIGCHLD, lambda *_: None)
program = os.fork()
if not program:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} could not be started: {error.strerror}\\n".encode())
        os._exit(127)
while status is None and leash not in (ready := select.select([leash, bell], [], [])[0]):
    os.read(bell, 4096)
    reap(os.WNOHANG)
end = time.monotonic() + 5
while reap(os.WNOHANG) and time.monotonic() < end:  # killing a process gives this one its children
    for child in children():
        try:
            os.kill(int(child), signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.001)
if status is not None and os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(1 if status is None else os.waitstatus_to_exitcode(status))
"""

_LEASHES: dict[int, int] = {}
"""Pid of a process started here → the end of a pipe; closing it ends the program and everything it started."""


def start(
    command: list[str], pass_fds: tuple[int, ...] = (), **given: Any
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with the arguments of Popen. Raises OSError.

    The exit status is the program's; 127 with a line on stderr if there is no such program.
    """
    theirs, ours = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SCRIPT, str(theirs), *command],
            pass_fds=(theirs, *pass_fds), start_new_session=True, **given,
        )  # fmt: skip
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    _LEASHES[process.pid] = ours
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask for the end of a program and of everything it started; the process ends after them."""
    leash = _LEASHES.pop(process.pid, None)
    if leash is not None:
        os.close(leash)


def _forget() -> None:
    """Close the pipes in a forked child, which must not hold them open."""
    for leash in _LEASHES.values():
        os.close(leash)
    _LEASHES.clear()


os.register_at_fork(after_in_child=_forget)
