"""The hostile programs, read from `sandbox/attacks.txt`, which says how they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentrl_cli.paths import sandbox_dir


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile program and the results that count as right for it."""

    name: str
    guarantee: str
    """files | network | signals | processes | memory | disk | output | system | state"""
    op: str
    """run | cell | bash | grade"""
    right: tuple[str, ...]
    """Names of the statuses that are right."""
    quick: bool
    """Part of the probe that `agentrl doctor` runs."""
    strong: bool
    """Promised only by the levels that hold hostile code (ns, docker)."""
    code: str
    meanwhile: str
    """The program that runs in another session at the same time; empty for an attack of one session."""


@cache
def attacks() -> tuple[Attack, ...]:
    """All of them, in the order of the file."""
    return tuple(_parse((Path(sandbox_dir()) / "attacks.txt").read_text(encoding="utf-8")))


def _parse(text: str) -> Iterator[Attack]:
    for part in text.split("\n=== ")[1:]:
        head, _, code = part.partition("\n")
        name, guarantee, op, right, flags = (field.strip() for field in head.split("|"))
        words = flags.split()
        code, _, other = code.strip("\n").partition("\n--- meanwhile\n")
        yield Attack(name, guarantee, op, tuple(right.split()), "quick" in words, "strong" in words, code, other)
