"""Checks of this machine, its sandbox and devices, and of models: `agentrl doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One entry of doctor's report."""

    name: str
    status: str
    """ok | warn (works with limits) | fail (something will not work)"""
    detail: str
    fix: str = ""
    """The remedy: a command where there is one."""
