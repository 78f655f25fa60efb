"""Results of trials that are kept between processes: one JSON file of the user's state folder for each kind.

They belong to a processor and to versions; another machine or another version tries again. A file that is missing,
damaged or cannot be written costs a trial and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch

from agentrl_cli._version import __version__
from agentrl_cli.paths import state_dir

MOST = 500
"""Entries of a file; the oldest go first."""


def recall(kind: str, name: str) -> str | None:
    """Return the value known under a name here, None if nothing is."""
    return _read(kind).get(_key(name))


def remember(kind: str, name: str, value: str) -> None:
    """Keep a result for the next process."""
    file = _file(kind)
    known = dict([*_read(kind).items(), (_key(name), value)][-MOST:])
    part = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known, indent=1), encoding="utf-8")
        part.replace(file)


def _file(kind: str) -> Path:
    return state_dir() / f"{kind}.json"


def _read(kind: str) -> dict[str, str]:
    try:
        found = json.loads(_file(kind).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(name: str) -> str:
    return f"{_machine()} {name}"


@cache
def _machine() -> str:
    """Return a hash of the processor and of the versions that results depend on, this engine's files included."""
    import transformers

    facts = [__version__, torch.__version__, np.__version__, transformers.__version__]
    facts.append(platform.processor() or platform.machine())
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts += sorted(
            {line for line in lines if line.startswith(("model", "cpu family", "flags"))}
        )
    facts += [
        f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}"
        for file in sorted(Path(__file__).parent.glob("*.py"))
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
