"""The machine that a run is trained on, for its report."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path


def machine(device: str) -> dict[str, str]:
    """Processor, memory, GPU, versions; without a host's name."""
    import torch

    found = {"processor": f"{_processor()}, {os.cpu_count()} cores", "memory": _memory()}
    if device != "cpu" and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(device if device.startswith("cuda") else "cuda")
    found["system"] = f"{platform.system()} {platform.machine()}"
    found["python"] = sys.version.split()[0]
    found["torch"] = torch.__version__
    return {name: value for name, value in found.items() if value}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    ) or (platform.processor() or platform.machine())


def _memory() -> str:
    names = os.sysconf_names
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return ""
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
