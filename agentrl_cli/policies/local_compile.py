"""A shared library from a C file: compiled when it is first wanted, for this machine, kept in the user's cache folder.

A compiler that hangs is given up after `SECONDS` and remembered in that folder, by its path, size and date, so that
neither a second try nor the next process waits for it again; after a day it gets one more, shorter chance. A kept
library that cannot be loaded is made once more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SECONDS = 60.0
"""What a compiler may take: it needs two or three seconds, more on a machine that is busy."""
AGAIN = 10.0
"""What one may take that hung before."""
DAY = 24 * 3600.0


class CompileError(Exception):
    """Why there is no library, in words for a user; `hung` where the compiler did not end."""

    def __init__(self, why: str, hung: bool = False) -> None:
        super().__init__(why)
        self.hung = hung


def loaded(load: Callable[[Path], T], source: Path, compiler: str, flags: list[str]) -> T:
    """`load` of the library of `source`, which is compiled unless it is kept, and once more where it does not load.

    Raises CompileError.
    """
    kept, there = _kept(source, compiler, flags)
    if not there:
        _compile(kept, source, compiler, flags)
    try:
        return load(kept)
    except (OSError, AttributeError) as error:  # no library, or not one of ours
        if not there:
            raise CompileError(f"its compiled code could not be loaded: {error}") from error
    _compile(kept, source, compiler, flags)
    try:
        return load(kept)
    except (OSError, AttributeError) as error:
        raise CompileError(f"its compiled code could not be loaded: {error}") from error


def _kept(source: Path, compiler: str, flags: list[str]) -> tuple[Path, bool]:
    """Where the library is kept, and whether it is there."""
    try:
        kept = _folder() / _name(source, compiler, flags)
        return kept, kept.is_file()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        raise CompileError(f"its code could not be compiled: {error}") from error


def _compile(kept: Path, source: Path, compiler: str, flags: list[str]) -> None:
    """Make the library: whole or not at all, since several processes may do this at once."""
    mark = kept.parent / f"hung-{_digest(*_identity(compiler))}"
    before = _age(mark)
    if before is not None and before < DAY:
        raise CompileError(f"{compiler} hung when it was last tried ({mark} keeps that for a day)", hung=True)
    seconds = SECONDS if before is None else AGAIN
    try:
        with tempfile.TemporaryDirectory(dir=kept.parent) as place:
            made = Path(place) / kept.name
            _run([compiler, *flags, "-o", str(made), str(source)], seconds)
            os.replace(made, kept)
        mark.unlink(missing_ok=True)
    except subprocess.TimeoutExpired as error:
        with contextlib.suppress(OSError):  # a full disk: the next process waits again
            mark.touch()
        raise CompileError(f"{compiler} did not end within {seconds:g} seconds", hung=True) from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip() or str(error)
        raise CompileError(f"its code could not be compiled: {said.splitlines()[-1]}") from error
    except OSError as error:
        raise CompileError(f"its code could not be compiled: {error}") from error


def _run(command: list[str], seconds: float) -> None:
    """Run a compiler with all that it starts: they go together, or its grandchildren would hold our pipes open."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            out, said = process.communicate(timeout=seconds)
        except BaseException:  # time is over, or a user interrupts
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, said)


def _name(source: Path, compiler: str, flags: list[str]) -> str:
    """The library's file: another one for another source, compiler, or processor."""
    parts = (source.read_text(encoding="utf-8"), " ".join(flags), platform.platform(), _processor())
    return f"decoding-{_digest(*parts, *_identity(compiler))}.so"


def _identity(compiler: str) -> tuple[str, ...]:
    """What tells a compiler from the one that stood in its place before."""
    facts = os.stat(compiler)  # of what links lead to
    return compiler, os.path.realpath(compiler), str(facts.st_size), str(facts.st_mtime_ns)


def _digest(*parts: str) -> str:
    return hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]


def _age(path: Path) -> float | None:
    """Seconds since a file was written, None where there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None


def _folder() -> Path:
    """Where compiled code is kept: the user's own cache folder, which nobody else may write."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.stat()
    if hasattr(os, "getuid") and (facts.st_uid != os.getuid() or facts.st_mode & 0o022):
        raise OSError(f"{folder} can be written by others")
    return folder


def _processor() -> str:
    """What -march=native depends on."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux
        return platform.processor()
