"""The loop: sample, score, update, log, save (see the package)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agentrl_cli.analysis.memory_plan import checkpoints, sets_aside
from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, NotFound, StoreError, TrainingStopped
from agentrl_cli.evaluate import EvalResult, evaluate_policy, pick_tasks
from agentrl_cli.hooks import HookList
from agentrl_cli.learning.advantages import drops_equal
from agentrl_cli.learning.dispositions import decide
from agentrl_cli.learning.length_shaping import Shaping
from agentrl_cli.learning.update import Learner, Update
from agentrl_cli.models.adapter import ADAPTER_FILE
from agentrl_cli.models.checkpoint import save_checkpoint
from agentrl_cli.policies.loaded import Loaded
from agentrl_cli.rollout import Rollout, seed_of
from agentrl_cli.rollout.greedy import Greedy
from agentrl_cli.rollout.greedy import rewards as greedy_rewards
from agentrl_cli.rollout.rehearse import rehearse
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tasks import Pack
from agentrl_cli.threads import THREADS
from agentrl_cli.trainer.checkpoints import forget_old, restore, retain
from agentrl_cli.trainer.controls import Steering, keep_settings
from agentrl_cli.trainer.metrics import cpu_seconds, step_metrics
from agentrl_cli.trainer.prefetch import Ahead, age_metrics, apart, stale
from agentrl_cli.trainer.report import Reporter, what_ended
from agentrl_cli.trainer.sampler import Collector
from agentrl_cli.trainer.validation import fallback, validation
from agentrl_cli.types import Episode, Fact, Task

if TYPE_CHECKING:
    from agentrl_cli.sandbox import Sandbox


class Trainer:
    """One run. `narrate` gets a line for people now and then, `on_step` the metrics of every step.

    Args:
        config: The resolved configuration.
        run: The run's row, already in the store; `run.dir` is its folder.
        loaded: The policy with its model and chat, loaded `trainable`.
        packs: Packs by name.
    """

    def __init__(
        self,
        config: Config,
        run: RunRow,
        loaded: Loaded,
        packs: dict[str, Pack],
        store: Store,
        *,
        sandbox: Sandbox | None = None,
        hooks: HookList | None = None,
        narrate: Callable[[str], None] = lambda text: None,
        on_step: Callable[[int, dict[str, float]], None] | None = None,
    ) -> None:
        self.config = config
        run = self.run = store.runs.add_folder(run)
        self.loaded = loaded
        self.packs = packs
        self.store = store
        self.hooks = hooks or HookList()
        self.narrate = narrate
        self.on_step = on_step
        self.folder = Path(run.dir)
        found = validation(config, packs, self._tasks(), store, run, narrate)
        self.tasks, self.eval_tasks = found.train, found.tasks
        torch.manual_seed(config.seed)
        recompute = checkpoints(config, loaded.folder, loaded.model)
        aside = sets_aside(config, loaded.folder, loaded.model)
        self.learner = Learner(loaded.model, config, self._frozen_reference(), checkpoint=recompute, aside=aside)
        if self.hooks.has("on_sample") and config.algo.correction == "auto":  # what it takes away is not the policy's
            self.learner.loss_config = replace(self.learner.loss_config, correction="tis")
        self.rollout = Rollout(
            loaded.policy,
            loaded.chat,
            packs,
            config,
            sandbox=sandbox,
            store=store,
            hooks=HookList([*self.hooks.hooks, Shaping(config)]),
            run=run,
        )
        self.collector = Collector(config, run, self.tasks, store, self.rollout, narrate)
        self.ahead = Ahead(self.collector.sample, config)
        if self.ahead.staleness:
            self.rollout.places = asyncio.Semaphore(config.rollout.concurrency)
        self.greedy = Greedy(config, run, store, self.rollout, packs) if self.learner.needs == "baseline" else None
        self.step = 0
        self._engine_line = ""
        self.best: float | None = None
        self.steering = Steering(config, run.id, store, narrate)
        self.reporter = Reporter(config, store, run.id, narrate)

    def _know_vocabulary(self) -> None:
        """What can be trained are the ids that the model has a row for; a server may sample any of them."""
        policy: Any = self.loaded.policy
        self.rollout.vocabulary = int(self.loaded.model.get_input_embeddings().weight.shape[0])
        if self.loaded.sync is not None:
            policy.vocabulary = self.rollout.vocabulary

    async def train(self) -> RunRow:
        """The whole run, from wherever it stands to its last step; the store says how it ended.

        Raises UsageError if another process holds the run, RunFailed if one took it over.
        """
        with self.store.claims.hold(self.run.id, "train"):
            try:
                return await self._train()
            except asyncio.CancelledError:
                self.steering.require_claim()
                raise

    async def _train(self) -> RunRow:
        config = self.config.train
        self._know_vocabulary()
        self.steering.listen()  # from here on Ctrl-C stops the run with its status written down
        try:
            await self._resume()
            self._note_engine()
            await self._rehearse()
            await self.hooks.call("on_run_start", run=self.run)
        except BaseException:
            self.steering.ignore()
            raise
        actions = {"checkpoint": lambda: self._save("step"), "evaluate": self.evaluate}
        error: BaseException | None = None
        try:
            if self.loaded.sync is not None:  # so that a server surely samples with what is trained
                await self.loaded.publish(f"{self.run.name}@{self.step}")
            if self._due and self.step not in {
                c.step for c in self.store.runs.checkpoints(self.run.id) if c.kind == "step"
            }:
                await self._save("step")  # killed after the step's best checkpoint
            while self.step < config.steps and not self.steering.why:
                await self.steering.obey(actions)
                if self.steering.changed:
                    await self._keep_settings()
                if not self.steering.why:
                    await self._one_step(self.step)
            await self._save("last")
        except BaseException as problem:
            error = what_ended(problem, self.store, self.run)
            if error is not problem:
                raise error from problem
            raise
        finally:
            await self.ahead.stop()
            try:
                self._end(error)
            finally:
                self.steering.ignore()
            await self.hooks.call("on_run_end", run=self.run, error=error)
        return self.store.runs.get(self.run.id)

    async def _rehearse(self) -> None:
        """Say before the first step what a model may write that this run would skip as drift."""
        if self.config.drift.structural == "train" or not any(pack.tools for pack in self.packs.values()):
            return
        found = await rehearse(self.loaded.chat)
        for finding in found:
            self.narrate(f"warning: {finding}.")
        if found:
            text = "; ".join(map(str, found)) + ". drift.structural=train trains them all the same."
            self.store.journal.add_alert(self.run.id, "warn", "drift", float(len(found)), 0.0, text, step=0)

    def _note_engine(self) -> None:
        """Log what runs the model, and again where that has changed: recorded steps may be given up on the way."""
        policy: Any = self.loaded.policy
        line = f"engine {getattr(policy, 'engine_line', policy.name)}"
        if line != self._engine_line:
            self._engine_line = line
            self.store.journal.add_log(self.run.id, "info", line)

    async def _one_step(self, step: int) -> None:
        """Sample, score, update, log, save."""
        started, cpu = time.monotonic(), cpu_seconds()
        await self.hooks.call("on_step_start", run=self.run, step=step + 1)
        groups = await self.ahead.take(step)
        sampled = time.monotonic()
        try:
            facts, update = await self.learn(groups, step)
        except TrainingStopped as why:
            self.reporter.stopped(step, why)
            raise
        self.steering.require_claim()
        episodes = [episode for group in groups for episode in group]
        kinds = [self.rollout.drift.pop(episode.id, "") for episode in episodes]
        primaries = {name: pack.primary for name, pack in self.packs.items()}
        metrics = step_metrics(groups, facts, kinds, self.packs, primaries) | update.metrics
        metrics |= self.collector.metrics(groups) | THREADS.metrics()
        if self.ahead.staleness:
            metrics |= age_metrics(groups, self.run.name, step)
        if self.rollout.sandbox is not None:
            metrics |= self.rollout.sandbox.take_counts()
        if not self.config.deterministic:  # there memory is fixed, and a resumed step has the numbers of a whole one
            metrics |= getattr(self.loaded.policy, "take_metrics", dict)()
        metrics |= {"time/step": time.monotonic() - started, "time/rollout": sampled - started}
        metrics |= {"time/update": time.monotonic() - sampled, "time/cpu": cpu_seconds() - cpu}
        metrics["time/drift_guard"], self.rollout.guard_seconds = self.rollout.guard_seconds, 0.0
        self.steering.why = self.reporter.step(step, episodes, facts, update, metrics) or self.steering.why
        self.reporter.errors(episodes)
        self.reporter.foreign(self.rollout.foreign)
        self._note_engine()
        if self.on_step is not None:
            self.on_step(step + 1, metrics)
        self.step = step + 1
        await self.hooks.call("on_update", run=self.run, metrics=metrics, step=self.step)
        if self.config.train.eval_every and self.step % self.config.train.eval_every == 0:
            await self.evaluate()
        if self._due:
            await self._save("step")

    # --- score and update --------------------------------------------------------------------------------------------

    async def learn(self, groups: Sequence[Sequence[Episode]], step: int) -> tuple[dict[str, Fact], Update]:
        """Decide what is trained, train on it, and tell the policy that its weights are new."""
        facts = decide(
            groups,
            drift=self.rollout.drift,
            train_drifted=self.config.drift.structural == "train",
            drop_zero_variance=drops_equal(self.config.algo),
            mask_overlong=self.config.algo.mask_overlong,
            stale=stale(groups, self.run.name, step, self.ahead.staleness),
            vocabulary=self.rollout.vocabulary,
        )
        baselines: dict[str, float] | None = None
        if self.greedy is not None:
            baselines = greedy_rewards(await self.greedy.attempts(groups, self.tasks, step))
            trained = [e for group in groups for e in group if facts[e.id] is Fact.TRAINED]
            facts |= {e.id: Fact.SKIPPED_NO_BASELINE for e in trained if e.group_id not in baselines}
        kept = [[e for e in group if facts[e.id] is Fact.TRAINED] for group in groups]
        kept = [group for group in kept if group]
        if self.hooks and kept:
            from agentrl_cli.learning.batch import Batch

            batch = Batch.from_episodes([episode for group in kept for episode in group])
            await self.hooks.call("on_batch", run=self.run, batch=batch, step=step + 1)
        torch.manual_seed(seed_of(self.config.seed, "update", step) % 2**32)
        if self.ahead.staleness:
            update = await apart(lambda: self.learner.update(kept, step, baselines))
        else:
            policy: Any = self.loaded.policy
            policy.rest()
            update = self.learner.update(kept, step, baselines)
        await self.loaded.publish(f"{self.run.name}@{step + 1}")
        return facts, update

    async def evaluate(self) -> EvalResult | None:
        """Evaluate the current weights, unless the store has it already; the best so far is kept as a checkpoint."""
        known = next((row for row in self.store.runs.evals(self.run.id) if row.step == self.step), None)
        if known is not None:  # killed since: perhaps before the step had it
            self._note_rate(known.pass_rate)
            await self._keep_best(known.pass_rate)
            return None
        rollout = self.rollout
        config = self.config
        self.eval_tasks = self.eval_tasks or fallback(config, self.packs, self.narrate)
        self.store.tasks.add(self.eval_tasks)
        probe = Rollout(
            rollout.policy,
            rollout.chat,
            self.packs,
            config,
            sandbox=rollout.sandbox,
            store=self.store,
            hooks=self.hooks,
            temperature=config.eval.temperature,
            run=self.run,
        )
        result = await evaluate_policy(
            probe, self.eval_tasks, config.train.eval_samples, config.seed, run_id=self.run.id, step=self.step
        )
        rate = result.pass_rate
        self._note_rate(rate)
        shown = "nothing could be graded" if rate is None else f"{rate:.3f}"
        self.narrate(f"step {self.step}: evaluation {shown} on {len(self.eval_tasks)} tasks")
        await self.hooks.call("on_eval", run=self.run, result=result, step=self.step)
        await self._keep_best(result.pass_rate)
        return result

    def _note_rate(self, rate: float | None) -> None:
        if rate is not None:
            self.store.runs.add_step(self.run.id, self.step, {"eval/solved": rate})

    async def _keep_best(self, rate: float | None) -> None:
        if rate is not None and (self.best is None or rate > self.best):
            self.best = rate
            await self._save("best")

    # --- save and resume ---------------------------------------------------------------------------------------------

    async def _save(self, kind: str) -> None:
        name = kind if kind in ("best", "last") else f"step-{self.step:06d}"
        folder = self.folder / "checkpoints" / name
        state = {
            "step": self.step,
            "best": self.best,
            **self.learner.state(),
        }
        assert self.loaded.folder is not None
        save_checkpoint(folder, self.loaded.model, self.loaded.folder, state)
        self._note_checkpoint(kind, folder)
        await self.hooks.call("on_checkpoint", run=self.run, path=folder, step=self.step)
        if kind == "step":
            forget_old(self.store, self.run.id, self.config.train.keep_last)

    def _note_checkpoint(self, kind: str, folder: Path) -> None:
        with self.store.transaction():
            self.store.runs.add_checkpoint(self.run.id, self.step, folder, {"best": self.best}, kind)
            self.store.journal.add_event(self.run.id, "checkpoint", {"kind": kind, "step": self.step})

    @property
    def _due(self) -> bool:
        """Whether the step that was just made is one after which a checkpoint is kept."""
        return self.step % self.config.train.save_every == 0 and 0 < self.step < self.config.train.steps

    async def _resume(self) -> None:
        """Load the newest usable checkpoint of this run, if it has one."""
        folder = self.folder / "checkpoints"
        found, state = restore(self.store, self.run.id, folder, self.narrate, self.loaded.model, self.learner)
        self.store.episodes.cancel(self.run.id)
        self.best = state.get("best")
        if found:
            self.step = int(state["step"])
            if self.step != found[-1].step:  # killed between a `best` or `last` and its row
                self._note_checkpoint(found[-1].kind, Path(found[-1].path))
            if self.loaded.sync is None:
                await self.loaded.publish(f"{self.run.name}@{self.step}")
            self.narrate(f"resumed at step {self.step}")
            self.store.journal.add_event(self.run.id, "resumed", {"step": self.step})
        self.store.runs.update(self.run.id, status="running", error="", ended=0.0, step=self.step)

    def _end(self, error: BaseException | None) -> None:
        if self.steering.lost:
            return
        if error is None:
            status = "stopped" if self.steering.why else "finished"
            text = self.steering.why
        else:
            cancelled = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
            status = "stopped" if cancelled or isinstance(error, TrainingStopped) else "failed"
            text = "stopped at once" if cancelled else str(error)
        try:
            self.store.runs.update(self.run.id, status=status, error=text, ended=time.time(), step=self.step)
            retain(self.store, self.run.id, self.config)
            self.store.flush()
        except (StoreError, NotFound) as problem:
            cause = what_ended(problem, self.store, self.run)
            if error is None:
                raise cause from problem
            if not isinstance(error, StoreError) and str(cause) != str(error):
                self.narrate(str(cause))  # what ended the run says more than that this could not be written down

    async def _keep_settings(self) -> None:
        """After a change: a resume goes on with the new settings, and applies no step from before them again."""
        self.steering.changed = False
        keep_settings(self.run, self.config, self.store)
        await self._save("step")

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _tasks(self) -> list[Task]:
        """The tasks of the training split, at most `task.limit` of each pack."""
        split, limit = self.config.task.split_train, self.config.task.limit
        found = pick_tasks(self.packs, [split], families=self.config.task.families)
        tasks = [t for pack in self.packs for t in [task for task in found if task.pack == pack][:limit]]
        if not tasks:
            raise ConfigError(f"There is no task to train on in the split {split!r}.")
        self.store.tasks.add(tasks)
        return tasks

    def _frozen_reference(self) -> Any:
        """A copy of the weights for the KL term, where no adapter can be switched off instead.

        One that was there before is part of what the training starts from.
        """
        if not self.config.algo.kl_coef or (hasattr(self.loaded.model, "disable_adapter") and not self._adapted()):
            return None
        import copy

        return copy.deepcopy(self.loaded.model).requires_grad_(False).eval()

    def _adapted(self) -> bool:
        """Whether the training starts from an adapter, not from a fresh one."""
        folder = self.loaded.folder
        return self.config.adapter.path is not None or (folder is not None and (folder / ADAPTER_FILE).is_file())
