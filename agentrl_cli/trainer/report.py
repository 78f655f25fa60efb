"""The records of a step and a run: rows, per-token numbers, a line for people, alerts, and how the run ended."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from agentrl_cli.errors import NotFound, RunFailed, StoreError, TrainingStopped
from agentrl_cli.hooks.threads import thread_metrics
from agentrl_cli.hooks.waits import duration
from agentrl_cli.reports import diagnosis
from agentrl_cli.reports.evidence import Evidence
from agentrl_cli.reports.read_evidence import read_evidence
from agentrl_cli.rollout.flags import short
from agentrl_cli.store.journal import WAITING
from agentrl_cli.trainer.checkpoints import retain
from agentrl_cli.trainer.controls import REQUESTED
from agentrl_cli.trainer.heal import SURE, certain
from agentrl_cli.trainer.metrics import Clock, machine, step_metrics
from agentrl_cli.trainer.prefetch import age_metrics
from agentrl_cli.types import Episode, Fact, Outcome, Task
from agentrl_cli.types.section import Section

if TYPE_CHECKING:
    from agentrl_cli.config.records import TrainerSettings
    from agentrl_cli.learning.protocols import Update
    from agentrl_cli.policies.protocols import TrainablePolicy
    from agentrl_cli.rollout.rehearse import Finding
    from agentrl_cli.store import RunRow, Store
    from agentrl_cli.trainer.sampler import Collector

RECENT = 10
"""Steps whose median time estimates the time left, as in `agentrl watch`."""
COUNTED = {10, 100, 1000}
"""After its first time, an alert is printed at these counts."""
SHOWN_WAITS = 50
"""Most lines of what a run waits for that the store keeps."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did."""

    step: int
    """Counted from 0."""
    episodes: Sequence[Episode]
    facts: Mapping[str, Fact]
    """Disposition of each episode, by its id."""
    update: Update
    metrics: dict[str, float]
    foreign: str
    """What to set if the parser does not read the model's calls; empty if it does."""

    @classmethod
    def collect(
        cls,
        step: int,
        groups: Sequence[Sequence[Episode]],
        facts: Mapping[str, Fact],
        update: Update,
        clock: Clock,
        collector: Collector,
        policy: TrainablePolicy,
    ) -> StepReport:
        """Gather the metrics of a step; counts that are taken here start again from zero."""
        config, rollout = collector.config, collector.rollout
        packs, sandbox = rollout.context.packs, rollout.context.sandbox
        episodes = [episode for group in groups for episode in group]
        sampling = collector.metrics(groups)  # which looks at the drift that is taken here
        drift = [rollout.drift.pop(episode.id, "") for episode in episodes]
        primaries = {name: pack.primary for name, pack in packs.items()}
        metrics = step_metrics(groups, facts, drift, packs, primaries) | update.metrics
        metrics |= sampling | thread_metrics()
        if config.rollout.async_staleness:
            names = collector.store.runs.names(collector.run.id)
            metrics |= age_metrics(groups, names, step)
        if sandbox is not None:
            metrics |= sandbox.take_counts()
        if (
            not config.deterministic
        ):  # there memory is fixed, and a resumed step has the numbers of a whole one
            metrics |= policy.take_metrics()
        metrics |= clock.metrics() | {"time/drift_guard": rollout.take_guard_seconds()}
        return cls(step, episodes, facts, update, metrics, rollout.foreign)

    @property
    def line(self) -> str:
        """The numbers that people look at first."""
        shown = {"reward": "reward", "solved": "solved", "tool calls": "tools/call_frequency"}
        numbers = [
            f"{name} {self.metrics[key]:.3f}" for name, key in shown.items() if key in self.metrics
        ]
        mixed = [
            key for key in self.metrics if key.startswith("packs/") and key.endswith("/solved")
        ]
        if mixed:
            each = (f"{key.split('/')[1]} {self.metrics[key]:.3f}" for key in mixed)
            numbers.append("solved by pack " + ", ".join(each))
        return "  ".join([*(numbers or ["nothing graded"]), f"{self.metrics['time/step']:.1f} s"])


@dataclass
class Health:
    """Which findings of a run (reports/diagnosis.py) are reported, and which of them stop it."""

    stop_on: Sequence[str]
    patience: int = 1
    """Steps in a row that a finding must hold before it stops the run."""
    heals: bool = False
    held: dict[str, int] = field(default_factory=dict)
    """Finding → steps in a row."""
    certain: str = ""
    """The rule by which the newest steps were surely too large, if the run heals."""

    def look(self, evidence: Evidence) -> tuple[list[diagnosis.Finding], str]:
        """Return the alerts of a step, and the name of one that stops the run, "" if none does.

        Alerts are the first fault, findings independent of it, and those that `stop_on` names.
        """
        found = diagnosis.diagnose(evidence)
        cause = diagnosis.first_fault(found)
        names = {one.name: {one.name, diagnosis.KINDS.get(one.name, one.name)} for one in found}
        held = {name for both in names.values() for name in both}
        self.held = {name: self.held.get(name, 0) + 1 for name in held}
        self.certain = certain(evidence) if self.heals else ""
        stops = [
            name
            for name in self.stop_on
            if self.held.get(name, 0) >= self.patience and not (self.heals and name in SURE)
        ]
        wanted = {*diagnosis.NOW, *self.stop_on, *([cause.name] if cause else ()), self.certain}
        shown = [one for one in found if names[one.name] & wanted]
        return shown, stops[0] if stops else ""


class Reporter:
    """Writes the steps of one run."""

    def __init__(
        self,
        config: TrainerSettings,
        store: Store,
        run: RunRow,
        narrate: Callable[[str], None],
        tasks: Sequence[Task] = (),
    ) -> None:
        """`tasks`: those of the training and of its evaluations."""
        self.config = config
        self.store = store
        self.run = run
        self.narrate = narrate
        train = config.train
        self.health = Health(train.stop_on.alerts, train.stop_on.patience, train.heal)
        self.tasks = {task.id: task for task in tasks}
        self._steps: list[Mapping[str, float]] = []
        """Metrics of the steps so far; those before a resume are read from the store."""
        self._alerted: Counter[str] = Counter()
        """How often each alert was raised, and what is reported once was seen."""
        self._ended: deque[float] = deque(maxlen=RECENT + 1)
        """When the last steps ended."""
        self._engine = ""
        self._waits = ""
        """The oldest thing that the run is reported to wait for; empty once it continues."""
        self._ungraded = ""
        """The line about the last step with ungraded episodes."""
        self._lost = 0
        """Steps in a row without a graded episode."""

    def step(self, report: StepReport) -> str:
        """Store a step and report it. Returns the name of the alert that stops the run, "" if none does.

        Raises TrainingStopped after two steps in a row without a graded episode.
        """
        with self.store.transaction():
            advantages = report.update.advantages
            self.store.marks.set_facts(
                (e.id, str(report.facts[e.id]), advantages.get(e.id)) for e in report.episodes
            )
            for episode_id, signals in report.update.signals.items():
                self.store.signals.add(episode_id, signals)
            self.store.runs.add_step(self.run.id, report.step + 1, report.metrics)
        self._ended.append(time.monotonic())
        line = f"step {report.step + 1}/{self.config.train.steps}  {report.line}"
        self.store.journal.add_log(self.run.id, "info", line)
        self.narrate(line + self._estimate_rest(report))
        if report.metrics.get("drift/by_design") and self._count("a rewriting template") == 1:
            text = "The chat template rewrites earlier turns by design; the sampled tokens are trained as they were."
            self.log("info", text)
        stop = self._alerts(report)
        self._errors(report.episodes)
        if report.foreign and self._count("calls of another parser") == 1:
            self.store.journal.add_log(self.run.id, "warn", report.foreign)
            self.narrate(f"warning: {report.foreign}")
        return stop

    def engine(self, description: str) -> None:
        """Log what runs the model, and again if it changes: CUDA graphs may be given up during the run."""
        if not self._engine:
            self.store.journal.add_event(self.run.id, "machine", machine(self.config.model.device))
        if description != self._engine:
            self._engine = description
            self.store.journal.add_log(self.run.id, "info", f"engine {description}")

    def rehearsal(self, findings: Sequence[Finding]) -> None:
        """Report texts of the model that this run would skip as drift."""
        for finding in findings:
            self.narrate(f"warning: {finding}.")
        if findings:
            text = (
                "; ".join(map(str, findings)) + ". algo.skip.drift=false trains them all the same."
            )
            self.store.journal.add_alert(
                self.run.id, "warn", "drift", float(len(findings)), 0.0, text, step=0
            )

    def waits(self, lines: Sequence[str]) -> None:
        """Report what a run waits for, the oldest first; without lines, that it continues. From any thread."""
        text = "the training continues" + f"; it waited for {self._waits}" * bool(self._waits)
        self._waits = lines[0].rpartition(", since ")[0] if lines else ""
        if lines:
            more = f" (and {len(lines) - 1} more: kill -USR1 {os.getpid()})" * (len(lines) > 1)
            text = f"waiting for {lines[0]}{more}"
        try:
            self.log("warn" if lines else "info", text)
            self.store.journal.add_event(self.run.id, WAITING, {"lines": [*lines[:SHOWN_WAITS]]})
        except StoreError as error:  # an earlier write's, which is for the run to end with
            self.store.postpone(error)

    def stopped(self, step: int, error: TrainingStopped) -> None:
        """The alert of a step (counted from 0) whose update stopped the run: no rule sees its metrics."""
        name, _, text = error.message.partition(": ")
        text = f"{text[:1].upper()}{text[1:]} {error.hint}"
        self.store.journal.add_alert(self.run.id, "bad", name, 1.0, 0.0, text, step=step + 1)

    def end(self, error: BaseException | None, step: int, stopping: str) -> None:
        """Store how the run ended. Raises the cause if that fails and nothing else ended the run."""
        if error is None:
            done = step >= self.config.train.steps and stopping in REQUESTED
            status, text = ("stopped", stopping) if stopping and not done else ("finished", "")
        else:
            cancelled = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
            status = "stopped" if cancelled or isinstance(error, TrainingStopped) else "failed"
            text = "stopped at once" if cancelled else str(error)
        try:
            self.store.runs.update(
                self.run.id, status=status, error=text, ended=time.time(), step=step
            )
            retain(self.store, self.run.id, self.config.store)
            self.store.flush()
        except (StoreError, NotFound) as problem:
            cause = cause_of(problem, self.store, self.run)
            if error is None:
                raise cause from problem
            if not isinstance(error, StoreError) and str(cause) != str(error):
                self.narrate(
                    str(cause)
                )  # `error`, which the caller raises, matters more than this failed write

    def _alerts(self, report: StepReport) -> str:
        """Store the alerts of a step. Returns the name of the one that stops the run."""
        step = {**report.metrics, "step": report.step + 1}
        before = self._steps or self.store.runs.steps(self.run.id)
        self._steps = [row for row in before if row["step"] <= report.step] + [step]
        now = {
            name: part.model_dump(mode="json")
            for name, part in vars(self.config).items()
            if isinstance(part, Section)
        }
        run = replace(self.run, config={**self.run.config, **now})
        evidence = read_evidence(
            self.store,
            run,
            self._steps,
            episodes=report.episodes,
            tasks=self.tasks,
            trained=len(report.update.advantages),
            foreign=report.foreign,
            width=1,
        )
        alerts, stop = self.health.look(evidence)
        for alert in alerts:
            found = (alert.level, alert.name, alert.value, alert.threshold, alert.words)
            self.store.journal.add_alert(self.run.id, *found, step=report.step + 1)
            count = self._count(alert.name)
            if alert.name == stop:
                self.narrate(f"stopping: {alert.name}. {alert.line}")
            elif count == 1:
                self.narrate(f"{alert.level}: {alert.name}. {alert.line}")
            elif count in COUNTED:
                self.narrate(f"{alert.level}: {alert.name}, {count} times so far. {alert.text}")
        return stop

    def _estimate_rest(self, report: StepReport) -> str:
        """Return the time left by the median of the last steps, as text; empty after the last step."""
        took = [later - earlier for earlier, later in pairwise(self._ended)] or [
            report.metrics["time/step"]
        ]
        left = self.config.train.steps - report.step - 1
        return f"  ETA {duration(statistics.median(took) * left)}" if left > 0 else ""

    def _errors(self, episodes: Sequence[Episode]) -> None:
        """Report episodes that ended in an infrastructure error; two steps of nothing else end the run."""
        broken = [
            e
            for e in episodes
            if e.outcome is not None and (e.outcome.is_error or e.outcome is Outcome.TOO_LONG)
        ]
        if broken:
            counts = Counter(str(e.outcome) for e in broken)
            kinds = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
            first = next((f": {short(e.error, 300)}" for e in broken if e.error), "")
            self._ungraded = (
                f"{len(broken)} of {len(episodes)} episodes could not be graded ({kinds}){first}"
            )
            self.log("error", self._ungraded)
        self._lost = self._lost + 1 if len(broken) == len(episodes) else 0
        if self._lost >= 2:
            raise TrainingStopped(
                f"nothing_graded: no episode of the last two steps could be graded. The last: {self._ungraded}",
                hint="`agentrl replay last` shows one; the run's log has the first error of each step.",
            )

    def _count(self, name: str) -> int:
        """Return how often something was reported, this time included."""
        self._alerted[name] += 1
        return self._alerted[name]

    def log(self, level: str, text: str) -> None:
        self.narrate(text)  # first: the store may be what does not answer
        self.store.journal.add_log(self.run.id, level, text)


def cause_of(problem: BaseException, store: Store, run: RunRow) -> BaseException:
    """Return the error that ended a run: its deletion, rather than the write that failed because of it."""
    if isinstance(problem, (StoreError, NotFound)):
        try:
            store.runs.get(run.id)
        except NotFound:
            return RunFailed(
                f"{run.name} was deleted while it ran.", hint="`agentrl train` starts another."
            )
        except StoreError:
            return problem
    return problem
