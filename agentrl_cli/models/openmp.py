"""Threads of OpenMP, which torch computes with: set before torch is loaded. Imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cores() -> int:
    """Return the physical cores that this process may use; where they are unknown, the processors it may use."""
    allowed = (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )
    found = set()
    for number in allowed:
        try:
            siblings = Path(
                f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
            ).read_text()
        except OSError:
            siblings = str(number)
        found.add(siblings)
    return max(1, len(found))


def limit_openmp() -> None:
    """Let OpenMP threads sleep while they wait, one for each core. Call before torch loads; variables that are set
    stay.

    Threads that spin for each other on a busy machine cost ten times the CPU. The count does not follow the load: sums
    depend on it, and a resumed run must compute the same ones.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
    if "numpy" not in sys.modules:  # it reads this once; its BLAS knows no passive wait
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
