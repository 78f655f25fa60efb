"""The alerts of a running training: the diagnosis (reports/diagnosis.py) after every step, and the reasons to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl_cli.reports.diagnosis import KINDS, NOW, Finding, diagnose, first_fault
from agentrl_cli.reports.evidence import Evidence


@dataclass
class Health:
    """Which findings of a run are reported, and which of them stop it."""

    stop_on: Sequence[str]
    patience: int = 1
    """Steps in a row that a finding must hold before it stops the run."""
    held: dict[str, int] = field(default_factory=dict)
    """Finding → steps in a row."""

    def look(self, evidence: Evidence) -> tuple[list[Finding], str]:
        """Return the alerts of a step, and the name of one that stops the run, "" if none does.

        Alerts are the first fault, findings independent of it, and those that `stop_on` names.
        """
        found = diagnose(evidence)
        cause = first_fault(found)
        names = {one.name: {one.name, KINDS.get(one.name, one.name)} for one in found}
        held = {name for both in names.values() for name in both}
        self.held = {name: self.held.get(name, 0) + 1 for name in held}
        stops = [n for n in self.stop_on if self.held.get(n, 0) >= self.patience]
        wanted = {*NOW, *self.stop_on, *([cause.name] if cause else ())}
        shown = [one for one in found if names[one.name] & wanted]
        return shown, stops[0] if stops else ""
