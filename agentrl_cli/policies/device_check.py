"""A trial of a GPU: which parts compute like transformers, once for each GPU, driver and version.

The trial (doctor/device_trial.py) runs in a process of its own, as a fault of a GPU can end it; then the part that
ran has failed, and another process tries the rest. The verdict is kept in the user's state folder.
"""

from __future__ import annotations

import fcntl
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from agentrl_cli.errors import EnvironmentProblem
from agentrl_cli.paths import state_dir

_LOG = logging.getLogger(__name__)
SECONDS = 20.0
"""Seconds of sampling, by all engines together."""
PARTS = ("device", "generate", "paged", "fallback", "packed", "padded", "graphs")
"""In this order: a failed capture may leave a GPU in a state of its own."""
PROGRAM = (sys.executable, "-m", "agentrl_cli.doctor.device_trial")
FULL = "out of memory"
LIMIT = 300.0
"""Seconds after which a trial has failed, beside those of its sampling."""


@dataclass(frozen=True, slots=True)
class Part:
    """The result of one part of a trial."""

    part: str
    problem: str = ""
    """Empty if its numbers are transformers'."""
    worst: float = 0.0
    """The largest difference: nats of a log-probability, or of gradients relative to the largest."""
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The parts of this package that a device can run."""

    identity: dict[str, str] = field(default_factory=dict)
    """GPU, driver and versions."""
    parts: dict[str, Part] = field(default_factory=dict)

    def problem(self, part: str) -> str:
        """Return why a part is not used on this device; empty if it is, or was not tried."""
        found = self.parts.get(part)
        if found is None or not found.problem or FULL in found.problem.lower():
            return ""
        return f"`agentrl doctor --gpu` found on this GPU: {found.problem}"

    @property
    def starved(self) -> bool:
        """Whether something else took the memory, so that the trial shows nothing about the GPU."""
        return any(FULL in part.problem.lower() for part in self.parts.values())

    @property
    def ways(self) -> dict[str, str]:
        """Ways of an update that are not used, and why."""
        return {way: self.problem(way) for way in ("packed", "padded") if self.problem(way)}

    def require_engine(self) -> None:
        """Raise EnvironmentProblem if no engine of this package has the right numbers on this device."""
        if self.problem("paged") and self.problem("fallback"):
            raise EnvironmentProblem(
                f"No engine samples correctly here: {self.problem('fallback')}.",
                hint="Use another driver or torch, or --set model.device=cpu; `agentrl doctor --gpu` tries again.",
            )


def verdict_of(device: Any) -> Verdict:
    """Return the kept verdict of a torch device; a GPU that was never used is tried now. A CPU needs none."""
    from agentrl_cli.inference.remembered import recall
    from agentrl_cli.models.device import identity

    if device.type != "cuda":
        return Verdict()
    wanted = identity(device)
    with _lock_verdicts():  # of several processes the first tries, and the others read
        if (known := recall(KIND, _key(wanted))) is not None:
            return _VERDICT.validate_json(known)
        _LOG.warning(
            "first use of %s: comparing it with transformers, about a minute", wanted["device"]
        )
        return keep(try_device(str(device)))


_VERDICT = TypeAdapter(Verdict)
KIND = "devices"
"""Name of the file of verdicts, each under its device."""
PASSING = ("no answer within", "exit status -9", "exit status -15")
"""How a part ends on a machine that is busy or short of memory: tried again at the next use."""


def try_device(
    device: str, seconds: float = SECONDS, *, program: Sequence[str] = PROGRAM, limit: float = LIMIT
) -> Verdict:
    """Try a device in separate processes. Raises EnvironmentProblem if none of them can name the device."""
    identity: dict[str, str] = {}
    left = [part for part in PARTS if part != "graphs" or device.startswith("cuda")]
    found: dict[str, Part] = {}
    while left:
        text, reason = _run([*program, device, f"{seconds:g}", *left], limit + seconds)
        lines = [
            json.loads(line)
            for line in text.splitlines()
            if line.startswith("{") and line.endswith("}")
        ]
        if not lines:
            raise EnvironmentProblem(
                f"{device} could not be tried: {reason}", hint="`agentrl doctor` checks torch."
            )
        identity = lines[0]
        found |= {line["part"]: Part(**line) for line in lines[1:]}
        left = [part for part in left if part not in found]
        if left:
            found[left[0]] = Part(left[0], problem=reason)
            del left[0]
    return Verdict(identity, found)


def _run(command: Sequence[str], limit: float) -> tuple[str, str]:
    """Return the output of a trial, and how it ended, if not in order."""
    try:
        child = subprocess.run(command, capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), f"no answer within {limit:g} s"
    last = (child.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1][:200]
    return child.stdout.decode(errors="replace"), f"exit status {child.returncode}: {last}"


def keep(verdict: Verdict) -> Verdict:
    """Store a verdict, unless the machine was busy; if the folder cannot be written, the next use tries again."""
    from agentrl_cli.inference.remembered import remember

    passing = any(part.problem.startswith(PASSING) for part in verdict.parts.values())
    if not (verdict.starved or passing):
        remember(KIND, _key(verdict.identity), _VERDICT.dump_json(verdict).decode())
    return verdict


def _key(identity: dict[str, str]) -> str:
    return " / ".join(identity.values())


@contextmanager
def _lock_verdicts() -> Iterator[None]:
    try:
        state_dir().mkdir(parents=True, exist_ok=True)
        file = (state_dir() / "devices.lock").open("w")
    except OSError:  # read-only: every process tries for itself
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
