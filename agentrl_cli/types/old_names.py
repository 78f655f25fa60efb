"""Attributes of classes under their names before 0.1: each works for one release, with a warning that says the new one.

Modules and their objects are in `registry/old_modules.py`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any


class OldAttribute:
    """An attribute of a class under its old name."""

    def __init__(self, new: str) -> None:
        self.new = new
        self.old = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        warn(self.old, f"{self.old.partition('.')[0]}.{self.new}")
        return getattr(owner if instance is None else instance, self.new)


def adopt_override(kind: type, old: str, new: str) -> None:
    """Let a class that defines a method under its old name define it under the new one."""
    if callable(vars(kind).get(old)) and new not in vars(kind):
        warn(f"{kind.__name__}.{old}", f"{kind.__name__}.{new}")
        setattr(kind, new, vars(kind)[old])


def warn(old: str, new: str) -> None:
    """Warn of an old name, once for each place outside this package that uses it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(f"{old} is now {new}.", FutureWarning, *place, registry=seen)


def _is_inside(file: str) -> bool:
    """Whether a file is of this package, or of the machinery that imports."""
    return "importlib" in file or Path(file).is_relative_to(Path(__file__).parents[1])
