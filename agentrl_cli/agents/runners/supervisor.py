"""Ends the programs of agents if this process is killed: one small process that lives as long as its stdin is open."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading

SCRIPT = """\
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Supervisor:
    """Process groups that must not outlive this process. Started with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def add(self, group: int) -> None:
        """A process group was started."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", SCRIPT],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env={},
                    text=True,
                    start_new_session=True,  # a Ctrl-C is for this process, which ends its programs itself
                )
            self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """A process group has ended: its number may mean another one soon."""
        with self._lock:
            self._write(f"-{group}\n")

    def close(self) -> None:
        """End it, and with it what is left."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait()

    def forget(self) -> None:
        """Close the pipe in a forked child, which must not hold it open."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.returncode = 0  # not this process's child: nothing to wait for

    def _write(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it was killed: the next group starts another
                self._process.stdin.write(line)
                self._process.stdin.flush()


SUPERVISOR = Supervisor()
"""That of this process."""
atexit.register(SUPERVISOR.close)
os.register_at_fork(after_in_child=SUPERVISOR.forget)
