"""The loop: sample, learn, report, save (see the package). `build.py` makes its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl_cli.config.records import TrainerSettings
from agentrl_cli.errors import TrainingStopped, pluralise
from agentrl_cli.evaluate import EvalResult, evaluate_policy
from agentrl_cli.hooks import HookList
from agentrl_cli.hooks.waits import QUIET, Watchman, waiting
from agentrl_cli.learning.batch import Batch
from agentrl_cli.policies.protocols import Sleeping, TrainablePolicy
from agentrl_cli.rollout.greedy import rewards as greedy_rewards
from agentrl_cli.rollout.job import seed_of
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.checkpoint_names import pin_version
from agentrl_cli.trainer.inputs import Inputs
from agentrl_cli.trainer.metrics import Clock
from agentrl_cli.trainer.prefetch import Prefetcher, run_in_thread, stale
from agentrl_cli.trainer.probe import probe
from agentrl_cli.trainer.report import StepReport, cause_of
from agentrl_cli.trainer.validation import OTHER_MEASURE, fallback, restart_curve, sampling_of
from agentrl_cli.types import Episode, Fact, Task

if TYPE_CHECKING:
    from agentrl_cli.learning.protocols import PolicyLearner, Update
    from agentrl_cli.policies.load import Loaded
    from agentrl_cli.rollout import Rollout
    from agentrl_cli.rollout.greedy import Greedy
    from agentrl_cli.tasks import Pack
    from agentrl_cli.trainer.checkpoints import Checkpoints
    from agentrl_cli.trainer.controls import Controls
    from agentrl_cli.trainer.heal import Healer
    from agentrl_cli.trainer.report import Reporter
    from agentrl_cli.trainer.sampler import Collector


@dataclass(eq=False)
class Trainer:
    """One run, from its parts. `build_trainer` makes them all; a test may exchange any."""

    config: TrainerSettings
    run: RunRow
    """The run's row, in the store; `run.dir` is its folder."""
    loaded: Loaded
    """The policy with its model and chat, loaded `trainable`."""
    policy: TrainablePolicy
    packs: dict[str, Pack]
    store: Store
    hooks: HookList
    learner: PolicyLearner
    rollout: Rollout
    collector: Collector
    """Chooses a step's tasks and samples its groups."""
    prefetcher: Prefetcher
    greedy: Greedy | None
    """Greedy attempts as the baseline, for an estimator that needs them."""
    reporter: Reporter
    checkpoints: Checkpoints
    controls: Controls
    healer: Healer
    eval_tasks: list[Task]
    narrate: Callable[[str], None]
    """Gets a line for people now and then."""
    base: Path
    """The project folder."""
    on_step: Callable[[int, dict[str, float]], None] | None = None
    """Gets the metrics of every step."""
    accept_changes: bool = False
    """Whether a resume may replace groups that would mix two versions of rows, code or tokenizer."""
    quiet: float = QUIET
    """Seconds without progress after which the run says what it waits for."""
    step: int = 0
    """Steps that are done."""
    best: float | None = None
    """The best evaluation so far."""

    async def train(self) -> RunRow:
        """Train from the current step to the last and return the run, as it is stored.

        Raises UsageError if another process holds the run, RunFailed if one took it over.
        """
        with self.store.claims.hold(self.run.id, "train"):
            try:
                with Watchman(self.reporter.waits, self.quiet):
                    return await self._train()
            except asyncio.CancelledError:
                self.controls.require_claim()
                raise

    async def _train(self) -> RunRow:
        self.controls.listen()  # from here on Ctrl-C stops the run with its status written
        try:
            resumed = self._resume()
        except BaseException:
            self.controls.ignore()
            raise
        error: BaseException | None = None
        try:
            self.reporter.engine(self.policy.describe())
            await self._rehearse()
            await self.hooks.call("on_run_start", run=self.run)
            if resumed or self.policy.separate_weights:
                await self.policy.publish(f"{self.run.name}@{self.step}")
            if self.checkpoints.missing(self.step):  # killed after the step's best checkpoint
                await self._save("step")
            await self._steps()
            await self._save("last")
        except BaseException as problem:
            error = self.controls.fault() or cause_of(problem, self.store, self.run)
            if error is not problem:
                raise error from problem
            raise
        finally:
            await self.prefetcher.stop()
            self.learner.close()
            try:
                if not self.controls.lost:
                    self.reporter.end(error, self.step, self.controls.stopping)
            finally:
                self.controls.ignore()
            await self.hooks.call("on_run_end", run=self.run, error=error)
        return self.store.runs.get(self.run.id)

    async def _steps(self) -> None:
        """Steps until the last, or until something stops the run; between two of them controls are obeyed."""
        if self.config.train.eval.every and self.step == 0:
            await self.evaluate()  # of the base: the curve begins there, and `best` may be it
        base = self.step == 0 and self.best is None
        if self.config.train.heal and (base or not self.checkpoints.lead_back()):
            await self._save("step")  # for a fall before the first one that is due
        actions = {"checkpoint": lambda: self._save("step"), "evaluate": self.evaluate}
        while self.step < self.config.train.steps and not self.controls.stopping:
            await self.controls.obey(actions)
            if self.controls.changed:  # a resume uses the new settings, for no step before them
                self.controls.changed = False
                await self._save("step", self.controls.keep)
            if not self.controls.stopping:
                await self._one_step(self.step)

    async def _one_step(self, step: int) -> None:
        """Sample, learn, report, save."""
        await self.hooks.call("on_step_start", run=self.run, step=step + 1)
        clock = Clock()
        groups = await self.prefetcher.take(step)
        clock.sampled()
        try:
            facts, update = await self.learn(groups, step)
        except TrainingStopped as error:
            self.reporter.stopped(step, error)
            raise
        self.controls.require_claim()
        report = StepReport.collect(step, groups, facts, update, clock, self.collector, self.policy)
        self.controls.stopping = self.reporter.step(report) or self.controls.stopping
        self.reporter.engine(self.policy.describe())
        if self.on_step is not None:
            self.on_step(step + 1, report.metrics)
        self.step = step + 1
        await self.hooks.call("on_update", run=self.run, metrics=report.metrics, step=self.step)
        if self.config.train.eval.every and self.step % self.config.train.eval.every == 0:
            await self.evaluate()
        rule = self.reporter.health.certain
        if rule and not self.checkpoints.has_best(self.step):
            await self._heal(rule)
        elif self.checkpoints.due(self.step):
            await self._save("step")

    async def _heal(self, rule: str) -> None:
        """Continue from the best checkpoint with a smaller step, or end with its weights."""
        await self.prefetcher.stop()
        await self.policy.rest()
        text, end = self.healer.heal(self.step, rule, self.best)
        await self.policy.publish(f"{self.run.name}@{self.step}-healed")
        self.reporter.log("warn", text)
        self.controls.stopping = end or self.controls.stopping

    async def learn(
        self, groups: Sequence[Sequence[Episode]], step: int
    ) -> tuple[dict[str, Fact], Update]:
        """Decide which episodes are trained, train on them, and publish the new weights."""
        facts = self.collector.dispositions(
            groups,
            stale(groups, self.store.runs.names(self.run.id), step, self.prefetcher.staleness),
        )
        baselines: dict[str, float] | None = None
        if self.greedy is not None:
            baselines = greedy_rewards(
                await self.greedy.attempts(groups, self.collector.tasks, step)
            )
            facts |= {
                e.id: Fact.SKIPPED_NO_BASELINE
                for group in groups
                for e in group
                if facts[e.id] is Fact.TRAINED and e.group_id not in baselines
            }
        trained = ([e for e in group if facts[e.id] is Fact.TRAINED] for group in groups)
        kept = [group for group in trained if group]
        if self.hooks and kept:
            batch = Batch.from_episodes([episode for group in kept for episode in group])
            await self.hooks.call("on_batch", run=self.run, batch=batch, step=step + 1)
        torch.manual_seed(seed_of(self.config.seed, "update", step) % 2**32)
        if self.prefetcher.staleness:
            with waiting(f"the update of step {step + 1}"):
                update = await run_in_thread(lambda: self.learner.update(kept, step, baselines))
        else:
            if isinstance(self.policy, Sleeping):
                await self.policy.sleep()
            # Nothing is awaited between this and the update: no turn begins.
            await self.policy.rest()
            with waiting(f"the update of step {step + 1}"):
                update = self.learner.update(kept, step, baselines)
        await self.policy.publish(f"{self.run.name}@{step + 1}")
        update.metrics |= await probe(self.policy, self.learner.compute, kept, self.config)
        return facts, update

    async def evaluate(self) -> EvalResult | None:
        """Evaluate the current weights, unless the store has it already; the best so far is kept as a checkpoint."""
        config = self.config
        self.eval_tasks = self.eval_tasks or fallback(config, self.packs, self.narrate)
        if restart_curve(config, self.eval_tasks, self.store, self.run, self.step):
            self.best = None
            self.reporter.log("warn", OTHER_MEASURE.format(step=self.step))
        known = [row for row in self.store.runs.evals(self.run.id) if row.step == self.step]
        if known:  # killed since: perhaps before the step had it
            rate = known[0].pass_rate
            self.reporter.log("info", f"step {self.step} was evaluated already: {_show(rate)}")
            await self._take_rate(rate)
            return None
        self.store.tasks.add(self.eval_tasks)
        probe = self.rollout.with_(temperature=config.eval.temperature, hooks=self.hooks)
        tasks = pluralise(len(self.eval_tasks), "task")
        if self.step == 0:
            self.narrate(f"step 0: evaluating the base on {tasks} …")
        # Held-out training tasks count with the split of the packs that have one: the rate is of all of them.
        alike = [replace(task, split=self.eval_tasks[0].split) for task in self.eval_tasks]
        with self.controls.announce(f"evaluation of {tasks}"):
            given = (probe, alike, config.train.eval.samples, config.seed)
            result = await evaluate_policy(*given, run_id=self.run.id, step=self.step)
        self.narrate(f"step {self.step}: evaluation {_show(result.pass_rate)} on {tasks}")
        await self.hooks.call("on_eval", run=self.run, result=result, step=self.step)
        await self._take_rate(result.pass_rate)
        return result

    async def _take_rate(self, rate: float | None) -> None:
        """Note an evaluation's rate with its step, and keep the weights if it is the best so far."""
        if rate is not None and self.step:
            self.store.runs.add_step(self.run.id, self.step, {"eval/solved": rate})
        if rate is not None and (self.best is None or rate > self.best):
            self.best = rate
            await self._save("best")

    async def _save(self, kind: str, also: Callable[[], None] = lambda: None) -> None:
        path = self.checkpoints.save(kind, self.step, self.best, also)
        await self.hooks.call("on_checkpoint", run=self.run, path=path, step=self.step)
        if kind == "step":
            self.checkpoints.forget_old(self.step, self.healer.anchor(self.step))

    def _resume(self) -> bool:
        """Load the newest usable checkpoint. Returns False if the run has none."""
        state = self.checkpoints.restore()
        model, folder = self.loaded.name, self.loaded.folder
        model = model if folder is None else pin_version(self.store, model, folder)
        found = (self.collector.tasks, self.packs.values(), self.loaded.hash, self.base, model)
        inputs = Inputs.of(*found, sampling_of(self.config))
        size, greedy = self.config.rollout.group_size, self.greedy is not None
        done = int(state.get("step", 0))
        inputs.keep_reference(self.store, self.run)
        if changed := inputs.settle(
            self.store, self.run, done, size, greedy=greedy, accept=self.accept_changes
        ):
            self.reporter.log("warn", changed)
        self.store.episodes.cancel(self.run.id)
        if state:
            self.step, self.best = int(state["step"]), state.get("best")
            self.narrate(f"resumed at step {self.step}")
            self.store.journal.add_event(self.run.id, "resumed", {"step": self.step})
        elif self.run.step:
            self.narrate("no checkpoint: begins again at step 0, with the stored episodes")
        self.store.runs.update(self.run.id, status="running", error="", ended=0.0, step=self.step)
        return bool(state)

    async def _rehearse(self) -> None:
        """Report before the first step texts of the model that this run would skip as drift."""
        if self.config.algo.skip.drift and any(pack.tools for pack in self.packs.values()):
            from agentrl_cli.rollout.rehearse import rehearse

            self.reporter.rehearsal(await rehearse(self.loaded.chat))


def _show(rate: float | None) -> str:
    """Return the share solved in an evaluation as text."""
    return "nothing could be graded" if rate is None else f"{rate:.3f}"
