"""The machine of a measurement, in words."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def machine() -> str:
    """The processor, its cores as the process sees them, and the libraries that torch multiplies matrices with."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    built = torch.__config__.show()
    libraries = [name for name, mark in (("oneDNN", "MKL-DNN"), ("MKL", "Math Kernel Library")) if mark in built]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {len(names)} cores; {', '.join(libraries)}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
