"""The alerts of a running training: the diagnosis (reports/diagnosis.py) after every step, and what stops it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentrl_cli.config import Config
from agentrl_cli.reports.diagnosis import KINDS, NOW, Finding, diagnose, first_fault
from agentrl_cli.reports.evidence import Evidence, Metrics
from agentrl_cli.reports.read_evidence import compare_attempts, compares, control_tokens, read_rates
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Task


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

        Alerts are the first fault, what is independent of it, and what `stop_on` names.
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


class StepEvidence:
    """The evidence of a running training, step by step."""

    def __init__(self, config: Config, store: Store, run: RunRow, tasks: Sequence[Task]) -> None:
        self.config, self.store, self.run = config, store, run
        self.tasks = {task.id: task for task in tasks}
        self.steps: list[Metrics] = []
        self.controls = control_tokens(store, run.tokenizer)
        self._same: tuple[int, tuple[int, int]] = (0, (0, 0))
        """Attempts that are alike, after so many evaluations."""

    def after(
        self, step: Metrics, episodes: Sequence[Episode], trained: int, foreign: str
    ) -> Evidence:
        """Return the evidence after a step, which the store has; after a resume with the steps before it."""
        self.steps = [*self.steps, step] if self.steps else self.store.runs.steps(self.run.id)
        rates = read_rates(self.store, self.run.id)
        if len(rates) != self._same[0]:
            self._same = len(rates), compare_attempts(self.store, self.run.id, rates)
        config = self.config.model_dump(mode="json")
        evidence = Evidence(self.steps, episodes, rates, self.tasks, config, self.run.name)
        facts = {"trained": trained, "foreign": foreign, "controls": self.controls}
        return replace(evidence, **facts, compares=compares(config), same=self._same[1])
