"""What a step leaves behind: its row, its per-token numbers, a line for people, alerts, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from agentrl_cli.config import Config
from agentrl_cli.errors import NotFound, RunFailed, StoreError, TrainingStopped
from agentrl_cli.learning.advantages import compares_groups
from agentrl_cli.learning.update import Update
from agentrl_cli.store import RunRow, Store
from agentrl_cli.trainer.alerts import Health
from agentrl_cli.types import Episode, Fact, Outcome

Metrics = dict[str, float]


class Reporter:
    """Writes the steps of one run."""

    def __init__(self, config: Config, store: Store, run_id: str, narrate: Callable[[str], None]) -> None:
        self.config = config
        self.store = store
        self.run_id = run_id
        self.narrate = narrate
        self.health = Health(config.train.stop_on, config.train.stop_patience, compares_groups(config.algo))
        self.told = False
        """Whether it was said that the template rewrites what the model wrote: once a run is enough."""
        self.warned = False
        """Whether it was said that the parser does not read the model's calls."""
        self.first = ""
        """What was said of the last step in which episodes could not be graded."""
        self.lost = 0
        """Steps in a row in which nothing could be graded."""

    def step(
        self,
        step: int,
        episodes: Sequence[Episode],
        facts: Mapping[str, Fact],
        update: Update,
        metrics: Metrics,
    ) -> str:
        """Store a step (counted from 0) and tell of it. Returns the alert that stops the run, "" where none does."""
        with self.store.transaction():
            self.store.marks.set_facts((e.id, str(facts[e.id]), update.advantages.get(e.id)) for e in episodes)
            for episode_id, signals in update.signals.items():
                self.store.signals.add(episode_id, signals)
            self.store.runs.add_step(self.run_id, step + 1, metrics)
        shown = {"reward": "reward", "solved": "solved", "tool calls": "tools/call_frequency"}
        numbers = [f"{name} {metrics[key]:.3f}" for name, key in shown.items() if key in metrics]
        each = [key for key in metrics if key.startswith("packs/") and key.endswith("/solved")]  # where packs are mixed
        if each:
            numbers.append("solved by pack " + ", ".join(f"{key.split('/')[1]} {metrics[key]:.3f}" for key in each))
        total, seconds = self.config.train.steps, metrics["time/step"]
        line = "  ".join([f"step {step + 1}/{total}", *(numbers or ["nothing graded"]), f"{seconds:.1f} s"])
        self.store.journal.add_log(self.run_id, "info", line)
        self.narrate(line)
        if metrics.get("drift/by_design") and not self.told:
            self.told = True
            text = "The chat template rewrites earlier turns by design; the sampled tokens are trained as they were."
            self.store.journal.add_log(self.run_id, "info", text)
            self.narrate(text)
        before = self.health.steps
        since = int(before.pop()["step"]) if before else 0  # its evaluation came after it
        before += [row for row in self.store.runs.steps(self.run_id, since) if row["step"] <= step]
        alerts, stop = self.health.look({**metrics, "step": step + 1}, len(update.signals))
        for alert in alerts:
            found = (alert.level, alert.name, alert.value, alert.threshold, alert.text)
            self.store.journal.add_alert(self.run_id, *found, step=step + 1)
            if alert.name == stop:
                self.narrate(f"stopping: {alert.name} {alert.value:.4g}. {alert.text}")
        return stop

    def stopped(self, step: int, error: TrainingStopped) -> None:
        """The alert of a step (counted from 0) whose update stopped the run: no rule sees its metrics."""
        name, _, text = error.message.partition(": ")
        text = f"{text[:1].upper()}{text[1:]} {error.hint}"
        self.store.journal.add_alert(self.run_id, "bad", name, 1.0, 0.0, text, step=step + 1)

    def foreign(self, text: str) -> None:
        """Say once that the model writes calls which the parser does not read; empty where it does not."""
        if text and not self.warned:
            self.warned = True
            self.store.journal.add_log(self.run_id, "warn", text)
            self.narrate(f"warning: {text}")

    def errors(self, episodes: Sequence[Episode]) -> None:
        """Say what went wrong with episodes that ended in an error of ours; two steps of nothing else end the run."""
        broken = [
            e for e in episodes if e.outcome is not None and (e.outcome.is_error or e.outcome is Outcome.TOO_LONG)
        ]
        if broken:
            first = next((e.error for e in broken if e.error), "") or "nothing was graded"
            text = f"{len(broken)} of {len(episodes)} episodes ended as {broken[0].outcome}: {first}"
            self.store.journal.add_log(self.run_id, "error", text)
            self.narrate(text)
            self.first = text
        self.lost = self.lost + 1 if len(broken) == len(episodes) else 0
        if self.lost >= 2:
            raise TrainingStopped(
                f"nothing_graded: no episode of the last two steps could be graded. The last: {self.first}",
                hint="`agentrl replay last` shows one; the run's log has the first error of each step.",
            )


def what_ended(problem: BaseException, store: Store, run: RunRow) -> BaseException:
    """The error that ended a run: "it was deleted" says more than the write that was refused because of it."""
    if isinstance(problem, (StoreError, NotFound)):
        try:
            store.runs.get(run.id)
        except NotFound:
            return RunFailed(f"{run.name} was deleted while it ran.", hint="`agentrl train` starts another.")
        except StoreError:
            return problem
    return problem
