"""Owner tags, to find resources of dead processes: `pid-start-namespace`, since pids are reused and not unique."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from agentrl_cli.sandbox.channel import guest_module


def born(pid: str) -> str:
    """Return the time when a process started, in clock ticks as text; empty if absent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@cache
def _namespace() -> str:
    """Return the pid namespace of this process; 0 if the kernel has none."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]") or "0"
    except OSError:
        return "0"


def name() -> str:
    """Return the tag of this process, for the names of its resources."""
    return f"{os.getpid()}-{born(str(os.getpid())) or 0}-{_namespace()}"


def has_ended(name: str) -> bool:
    """Whether a name begins with the tag of a process that has ended; False for one of another namespace."""
    pid, _, rest = name.partition("-")
    start, _, rest = rest.partition("-")
    namespace = rest.partition("-")[0]
    known = pid.isdecimal() and start.isdecimal() and start != "0"
    return known and namespace == _namespace() and born(pid) != start


def new_folder(kind: str) -> Path:
    """Return the name of a new temporary folder, which carries its owner for `sweep`."""
    made = f"agentrl-{kind}{_machine()}{name()}-{secrets.token_hex(4)}"
    return Path(tempfile.gettempdir(), made)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Yield a folder that ends with the block, or, if this process is killed, with the next start of a run."""
    sweep()
    folder = new_folder(kind)
    folder.mkdir(0o700)
    try:
        yield folder
    finally:
        clear(folder)


def sweep() -> int:
    """Removes the temporary folders of processes of this machine that were killed; returns how many.

    Another user's stay.
    """
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob(f"agentrl-*{_machine()}*"):
        if has_ended(folder.name.rpartition(_machine())[2]) and not folder.is_symlink():
            removed += clear(folder)
    return removed


def clear(folder: Path) -> bool:
    """Deletes a folder and ends the processes in it: it is their working directory or their HOME.

    Returns whether it is deleted.
    """
    home = b"\0HOME=" + os.fsencode(folder) + b"/"
    for process in Path("/proc").glob("[0-9]*") if folder.exists() else ():
        with suppress(OSError):
            inside = Path(os.readlink(process / "cwd")).is_relative_to(folder)
            if inside or home in b"\0" + (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
    guest_module("filesystem/cleanup").delete(str(folder))
    return not folder.exists()


def _machine() -> str:
    """This machine in the names of its folders: one for temporary files may be shared by several."""
    return f"-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"
