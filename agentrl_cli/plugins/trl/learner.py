"""TRL's GRPOTrainer in the place of our own update: `trainer.kind: trl`.

Our loop keeps the run: tasks, sampling, rewards, the store, checkpoints, controls and resume. TRL's trainer runs in a
thread and asks for rollouts through `rollout_func`; there it waits until the loop has sampled a step, and the loop
waits until TRL asks for the next. https://huggingface.co/docs/trl/grpo_trainer
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from agentrl_cli.config import Config
from agentrl_cli.config.records import LearnerSettings, MemorySettings
from agentrl_cli.errors import ConfigError, RunFailed, TrainingStopped
from agentrl_cli.hooks import HookList
from agentrl_cli.learning.compute import Compute
from agentrl_cli.learning.optimizers import learning_rate
from agentrl_cli.learning.packing import segments_of
from agentrl_cli.learning.protocols import Update
from agentrl_cli.plugins.trl.grpo_config import FIXED, arguments, check, require_reference
from agentrl_cli.plugins.trl.settings import TrainerConfig
from agentrl_cli.policies.load import Loaded
from agentrl_cli.trainer.compute import LearnerMaker, needed_folder
from agentrl_cli.trainer.memory_plan import update_memory
from agentrl_cli.types import Episode

LOST = (
    "TRL makes the updates: rewards of turns count only in the episode's, of an episode that branches one branch is"
    " trained, seq_mean divides by all episodes of a step and counts those left out as 0, and replay has no per-token"
    " numbers of training."
)
NAMES = ("loss", "grad_norm", "entropy", "kl")
"""Metrics of TRL that screens show under the same name; `clip_ratio/…`, too. The others are stored as `trl/…`."""


class _Ended(BaseException):
    """Raised in TRL's thread to unwind it: no step follows."""


class TRLLearner:
    """A `PolicyLearner` whose updates TRL's trainer makes, with the configured optimizer and learning rate."""

    needs = ""

    def __init__(self, loaded: Loaded, config: Config, folder: Path) -> None:
        """`folder`: TRL's own, it stays empty unless an option makes TRL write files."""
        memory = update_memory(MemorySettings.of(config), needed_folder(loaded), loaded.model)
        self.compute = Compute(loaded.model, LearnerSettings.of(config), **memory)
        self.config, self.loaded, self.folder = config, loaded, folder
        self._steps: SimpleQueue[tuple[int, float] | None] = SimpleQueue()
        """Seed and learning rate of the next step; None: no further steps."""
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._logs: dict[str, float] = {}
        self._episodes: list[Episode | None] = []
        """The episodes of the step, in the order of TRL's rows; None: a row that fills the batch."""
        self._given: list[float] = []

    def update(
        self,
        groups: Sequence[Sequence[Episode]],
        step: int,
        baselines: Mapping[str, float] | None = None,
    ) -> Update:
        """One step of TRL's. Raises TrainingStopped if its loss is NaN, RunFailed for an error of TRL's."""
        result = Update()
        if not any(groups):
            return result
        size, prompts = self.config.rollout.group_size, self.config.rollout.prompts_per_step
        rows: list[Episode | None] = []
        for group in groups:
            rows += [*group, *[None] * (size - len(group))]
        if len(rows) > prompts * size:
            raise RunFailed(
                f"The step has {len(groups)} groups and TRL's batch {prompts}.",
                hint="Set rollout.resample_rounds: 0.",
            )
        seed = torch.initial_seed()  # of the step; TRL's trainer sets its own when it is made
        self._episodes = rows + [None] * (prompts * size - len(rows))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trl", daemon=True)
            self._thread.start()
            self._wait()
        lr = learning_rate(self.config.train, step)
        self.compute.begin(lr)
        self._steps.put((seed, lr))
        self._wait()
        self.compute.end()
        result.metrics = {
            name if name in NAMES or name.startswith("clip_ratio/") else f"trl/{name}": value
            for name, value in self._logs.items()
        }
        result.metrics["learning_rate"] = lr
        for episode, advantage in zip(self._episodes, self._given, strict=True):
            if episode is not None:
                result.advantages[episode.id] = advantage
        return result

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is not the model's weights."""
        return self.compute.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a value of `state`."""
        self.compute.load_state(state)

    def close(self) -> None:
        """End TRL's thread, which waits for a step."""
        if self._thread is not None and self._thread.is_alive():
            self._steps.put(None)
            self._thread.join()

    def _wait(self) -> None:
        error = self._done.get()
        if isinstance(error, TrainingStopped):
            raise error
        if error is not None:
            raise RunFailed(f"TRL raised {type(error).__name__}: {error}") from error

    # --- in TRL's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            make_trainer(self).train()
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again in the loop's thread
            self._done.put(error)

    def rollouts(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: the step before is done; returns the episodes of the next."""
        self._given = list(trainer._logs["advantages"])[-len(prompts) :]
        self._done.put(None)
        given = self._steps.get()
        if given is None:
            raise _Ended
        trainer.model.train()
        torch.manual_seed(given[0])
        for group in trainer.optimizer.param_groups:  # the scheduler has set it back
            group["lr"] = given[1]
        trainer.args.max_grad_norm = arguments(self.config)["max_grad_norm"]  # a control may set it
        rows = [_row(episode) for episode in self._episodes]
        names = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "stored_reward")
        return {name: [row[place] for row in rows] for place, name in enumerate(names)}

    def require_finite(self) -> None:
        """Before TRL's optimizer step: leave the weights as they are if a gradient is not finite, as our trainer does.

        Raises TrainingStopped if `train.stop_on` has nan and the run does not heal.
        """
        given = [
            w
            for group in self.compute.optimizer.param_groups
            for w in group["params"]
            if w.grad is not None
        ]
        if all(bool(weight.grad.isfinite().all()) for weight in given):
            return
        train = self.config.train
        if "nan" in train.stop_on.alerts and not train.heal:
            raise TrainingStopped(
                "nan: the gradient of TRL's loss is not finite; the weights were left as they were.",
                hint="Lower train.lr or train.max_grad_norm; look at the last episodes with `agentrl replay last`.",
            )
        for weight in given:
            weight.grad = None  # a step without gradients changes nothing

    def keep_logs(self, logs: Mapping[str, Any]) -> None:
        """Metrics of a finished step."""
        self._logs = {
            name: float(value) for name, value in logs.items() if isinstance(value, int | float)
        }


def stored_reward(stored_reward: list[float | None], **_: object) -> list[float | None]:
    """TRL's reward function: the rewards as the store has them; None, which TRL leaves out of a group, if ungraded."""
    return stored_reward


def _row(
    episode: Episode | None,
) -> tuple[list[int], list[int], list[int], list[float], float | None]:
    """(prompt, completion, mask of sampled tokens, log-probabilities, reward); sampling began with the completion.

    Of several branches it is the one that trains the most tokens.
    """
    if episode is None:
        return [0], [0], [0], [0.0], None
    branch, segment = max(segments_of(episode), key=lambda pair: int(pair[0].trained.sum()))
    if segment.images:
        raise ConfigError("TRL's trainer gets no images here.", hint="Set trainer.kind: agentrl.")
    where = np.flatnonzero(segment.trained)
    first, last = int(where[0]), int(where[-1]) + 1
    logps = np.where(segment.trained, episode.tokens.logp_policy[branch.positions], 0.0)[first:last]
    mask = segment.trained[first:last].astype(int).tolist()
    return (
        segment.ids[:first].tolist(),
        segment.ids[first:last].tolist(),
        mask,
        logps.tolist(),
        episode.reward,
    )


def make_trainer(learner: TRLLearner) -> Any:
    """TRL's trainer for a learner; it makes only the updates."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func
    # The two packages warn of each other, and TRL of each ungraded row.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
    logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Logs(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            learner.require_finite()

        def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            learner.keep_logs(given["logs"])

    config, model = learner.config, learner.loaded.model
    try:
        args = GRPOConfig(
            output_dir=str(learner.folder),
            max_steps=10**9,  # the loop ends it
            lr_scheduler_type="constant",
            learning_rate=config.train.lr,
            seed=config.seed,
            save_strategy="no",
            **FIXED,
            use_cpu=next(model.parameters()).device.type == "cpu",
            **arguments(config),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"trainer.options: {error}") from error
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[stored_reward],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [""] * config.rollout.prompts_per_step}),
        processing_class=AutoTokenizer.from_pretrained(learner.loaded.folder),
        callbacks=[Logs()],
        optimizers=(learner.compute.optimizer, None),
        rollout_func=learner.rollouts,
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout
    if "ref" in getattr(model, "peft_config", {}):  # the base is the reference, as in our trainer
        model.delete_adapter("ref")
    return trainer


def make_learner(config: Config) -> LearnerMaker | None:
    """Return a maker of TRL's learner, or None unless `trainer.kind` is trl.

    Raises MissingDependency or ConfigError if TRL cannot train with this configuration.
    """
    if config.section(TrainerConfig).kind == "agentrl":
        return None
    check(config)

    def make(
        loaded: Loaded, folder: Path, hooks: HookList, report: Callable[[str], None]
    ) -> TRLLearner:
        if hooks.has("on_sample"):
            raise ConfigError(
                "A hook's on_sample changes how tokens are drawn, and TRL does not correct for it.",
                hint="Leave out the hook, or set trainer.kind: agentrl.",
            )
        require_reference(config, needed_folder(loaded))
        report(LOST)
        return TRLLearner(loaded, config, folder / "trl")

    return make
