"""Attributes of classes under their names before 0.1: each works for one release, with a warning that says the new one.

Modules and their objects are in `registry/old_modules.py`.
"""

from __future__ import annotations

import warnings
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
    """Warn of an old name where it stands; Python shows it once for each place."""
    warnings.warn(f"{old} is now {new}.", FutureWarning, stacklevel=3)
