"""The machine of a measurement, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

MARKS = ("cpu family", "model")
"""What /proc/cpuinfo has besides the name, which a cloud's processors often share."""


def machine() -> str:
    """The processor, its cores as the process sees them, and the libraries that torch multiplies matrices with."""
    lines = [[part.strip() for part in line.split(":", 1)] for line in _cpuinfo() if ":" in line]
    names = [value for key, value in lines if key == "model name"]
    numbers = [
        f"{key.removeprefix('cpu ')} {value}" for key, value in dict(lines).items() if key in MARKS
    ]
    built = torch.__config__.show()
    libraries = [
        name
        for name, mark in (("oneDNN", "MKL-DNN"), ("MKL", "Math Kernel Library"))
        if mark in built
    ]
    processor = names[0] if names else platform.processor() or platform.machine()
    processor += f" ({', '.join(numbers)})" * bool(numbers)
    return f"{processor}, {len(names)} cores; {', '.join(libraries)}"


def machine_and_load() -> dict[str, str | float]:
    """The machine, and how many programs wanted to run in the last minute."""
    return {"machine": machine(), "load": round(os.getloadavg()[0], 1)}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
