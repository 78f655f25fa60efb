"""TRL's GRPOTrainer in the place of our own update: `trainer.kind: trl`.

Our loop keeps the run: tasks, sampling, rewards, the store, checkpoints, controls and resume. TRL's trainer runs in a
thread and asks for rollouts through `rollout_func`; there it waits until the loop has sampled a step, and the loop
waits until TRL asks for the next. https://huggingface.co/docs/trl/grpo_trainer
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, RunFailed, TrainingStopped
from agentrl_cli.hooks import HookList
from agentrl_cli.learning.compute import Compute
from agentrl_cli.learning.optimizers import learning_rate
from agentrl_cli.learning.packing import segments_of
from agentrl_cli.learning.protocols import Update
from agentrl_cli.learning.settings import aggregation_name
from agentrl_cli.plugins.trl.settings import TrainerConfig
from agentrl_cli.policies.load import Loaded
from agentrl_cli.registry import require_package
from agentrl_cli.trainer.compute import LearnerMaker, needed_folder
from agentrl_cli.trainer.memory_plan import checkpoints, row_tokens, sets_aside
from agentrl_cli.types import Episode

LOST = (
    "TRL makes the updates: rewards of turns count only in the episode's, of an episode that branches one branch is"
    " trained, seq_mean divides by all episodes of a step and counts those left out as 0, and replay has no per-token"
    " numbers of training."
)
LOSS_TYPES = {"token_mean": "dapo", "seq_mean": "grpo", "seq_mean_norm": "dr_grpo"}
SCALES = {"grpo": "group", "dr_grpo": "none"}
UNSUPPORTED = {
    "rollout.async_staleness": 0,
    "algo.epochs": 1,
    "algo.minibatches": 1,
    "algo.kl_in": "loss",
    "algo.kl": "k3",
    "algo.kl_target": None,
    "algo.kl_unbiased": False,
    "algo.entropy_target": None,
    "algo.off_policy_mask": None,
    "algo.entropy_share": 1.0,
    "algo.bypass": False,
    "algo.reject": "none",
    "algo.ref_ema": 0.0,
    "rollout.replay_truncation": False,
}
"""Settings that TRL cannot follow at any other value than these."""
OWN = {
    *(
        "output_dir",
        "max_steps",
        "num_generations",
        "generation_batch_size",
        "steps_per_generation",
        "num_iterations",
    ),
    *(
        "gradient_accumulation_steps",
        "temperature",
        "learning_rate",
        "seed",
        "save_strategy",
        "use_vllm",
        "report_to",
    ),
}
"""Fields of GRPOConfig that follow from other settings and cannot be given in `trainer.options`."""
FIXED: Mapping[str, Any] = {
    **{"report_to": "none", "logging_steps": 1, "logging_nan_inf_filter": False},
    **{"disable_tqdm": True, "dataloader_pin_memory": False, "bf16": False},
}
NAMES = ("loss", "grad_norm", "entropy", "kl")
"""Metrics of TRL that screens show under the same name; `clip_ratio/…`, too. The others are stored as `trl/…`."""


def arguments(config: Config) -> dict[str, Any]:
    """Fields of GRPOConfig for a configuration. Raises ConfigError for a setting that TRL cannot follow."""
    algo, train, rollout = config.algo, config.train, config.rollout
    for key, only in UNSUPPORTED.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value not in (only, None):
            raise _unsupported(key, value, only)
    for key, value, known in (
        ("algo.advantage", algo.advantage.name, SCALES),
        ("algo.loss", algo.loss.name, {"ppo_clip": ""}),
        ("algo.aggregation", aggregation_name(algo), LOSS_TYPES),
        ("train.optimizer", train.optimizer, {"adamw": "", "adamw8bit": ""}),
        ("algo.correction", algo.correction, {"auto": "", "none": ""}),
    ):
        if value not in known:
            raise _unsupported(key, value, " or ".join(known))
    if rollout.truncates:
        raise ConfigError(
            "TRL does not correct for truncated sampling (top_p, top_k, min_p, a penalty or bad tokens).",
            hint="Remove them, or set trainer.kind: agentrl.",
        )
    if clash := sorted(OWN & config.section(TrainerConfig).options.keys()):
        raise ConfigError(
            f"trainer.options: {', '.join(clash)} follows from the other settings.",
            hint="Remove it.",
        )
    total = rollout.prompts_per_step * rollout.group_size
    fitting = [
        n
        for n in range(1, total + 1)
        if not total % n and n * rollout.max_tokens <= train.token_budget
    ]
    given: dict[str, Any] = {
        "per_device_train_batch_size": max(fitting, default=1),
        "num_generations": rollout.group_size,
        "temperature": rollout.temperature,
        "loss_type": LOSS_TYPES[aggregation_name(algo)],
        "max_completion_length": rollout.max_tokens,
        "scale_rewards": SCALES[algo.advantage.name],
        "epsilon": getattr(algo.loss, "clip_low", 0.2),
        "epsilon_high": getattr(algo.loss, "clip_high", 0.2),
        "delta": getattr(algo.loss, "clip_dual", None),
        "beta": algo.kl_coef,
        "entropy_coef": algo.entropy_coef,
        "max_grad_norm": train.max_grad_norm,
        "gradient_checkpointing": train.checkpointing == "on",
        **config.section(TrainerConfig).options,
    }
    size = given["per_device_train_batch_size"]
    if not isinstance(size, int) or size < 1 or total % size:
        raise ConfigError(
            f"trainer.options: per_device_train_batch_size {size} does not divide the {total} episodes of a step."
        )
    if algo.entropy_coef:
        _require_one_bonus(config, size, total)
    return given | {"gradient_accumulation_steps": total // size}


def _require_one_bonus(config: Config, size: int, total: int) -> None:
    """Raise ConfigError where TRL's entropy bonus, a mean over a micro-batch's tokens, is not that of a step."""
    if (name := aggregation_name(config.algo)) != "token_mean":
        raise _unsupported("algo.aggregation with algo.entropy_coef", name, "token_mean")
    if size < total:
        raise ConfigError(
            f"TRL takes the entropy bonus as a mean over each of the {total // size} micro-batches of {size} episodes,"
            " which weights their tokens differently.",
            hint=f"--set train.token_budget={total * config.rollout.max_tokens} (one micro-batch), or"
            " trainer.kind: agentrl.",
        )


def _unsupported(key: str, value: object, only: object) -> ConfigError:
    return ConfigError(
        f"trainer.kind trl cannot follow {key}: {value}; with TRL it is {only}.",
        hint=f"Set {key} to that, or trainer.kind: agentrl.",
    )


def check(config: Config) -> None:
    """Raise MissingDependency or ConfigError if TRL cannot train with this configuration."""
    require_package("trl", "1.16", "trl", otherwise="set trainer.kind: agentrl")
    arguments(config)
    require_fields(config.section(TrainerConfig).options)
    if config.algo.kl_coef and config.adapter.path is not None:
        raise ConfigError(
            "With an adapter to start from, TRL's reference is the base without it, and algo.kl_coef is set.",
            hint="Set algo.kl_coef=0, or trainer.kind: agentrl.",
        )


def require_fields(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that are not fields of the installed GRPOConfig."""
    from trl import GRPOConfig

    fields = [field.name for field in dataclasses.fields(GRPOConfig) if field.init]
    for name in options:
        if name not in fields:
            near = ", ".join(get_close_matches(name, fields, 3))
            raise ConfigError(
                f"trainer.options: {name} is not a field of TRL's GRPOConfig.",
                hint=f"Did you mean {near}?"
                if near
                else "Remove it; TRL's documentation lists the fields.",
            )


class _Ended(BaseException):
    """Raised in TRL's thread to unwind it: no step follows."""


class TRLLearner:
    """A `PolicyLearner` whose updates TRL's trainer makes, with the configured optimizer and learning rate."""

    needs = ""

    def __init__(self, loaded: Loaded, config: Config, folder: Path) -> None:
        """`folder`: TRL's own, it stays empty unless an option makes TRL write files."""
        kept, model = needed_folder(loaded), loaded.model
        self.compute = Compute(
            model,
            config,
            checkpoint=checkpoints(config, kept, model),
            aside=sets_aside(config, kept, model),
            row_tokens=partial(row_tokens, config, kept, model),
        )
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
            name if _shared(name) else f"trl/{name}": value for name, value in self._logs.items()
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
        """Continue from what `state` returned."""
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
        rows = [_row(episode) for episode in self._episodes]
        names = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "stored_reward")
        return {name: [row[place] for row in rows] for place, name in enumerate(names)}

    def require_finite(self) -> None:
        """Before TRL's optimizer step: leave the weights as they are if a gradient is not finite, as our trainer does.

        Raises TrainingStopped if `train.stop_on` has nan.
        """
        given = [
            w
            for group in self.compute.optimizer.param_groups
            for w in group["params"]
            if w.grad is not None
        ]
        if all(bool(weight.grad.isfinite().all()) for weight in given):
            return
        if "nan" in self.config.train.stop_on:
            raise TrainingStopped(
                "nan: the gradient of TRL's loss is not finite; the weights were left as they were.",
                hint="Lower train.lr or train.max_grad_norm; look at the last episodes with `agentrl replay last`.",
            )
        for weight in given:
            weight.grad = None  # a step without gradients changes nothing

    def logged(self, logs: Mapping[str, Any]) -> None:
        """Metrics of a finished step."""
        self._logs = {
            name: float(value) for name, value in logs.items() if isinstance(value, int | float)
        }


def stored_reward(stored_reward: list[float | None], **_: object) -> list[float | None]:
    """TRL's reward function: the rewards as the store has them; None, which TRL leaves out of a group, if ungraded."""
    return stored_reward


def _shared(name: str) -> bool:
    return name in NAMES or name.startswith("clip_ratio/")


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
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"(transformers|trl)\."
    )  # of one about the other
    logging.getLogger("trl.trainer.grpo_trainer").setLevel(
        logging.ERROR
    )  # it warns of each ungraded row
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Logs(TrainerCallback):
        """Hands TRL's metrics on, and looks at its gradients."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            learner.require_finite()

        def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            learner.logged(given["logs"])

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
    if "ref" in getattr(
        model, "peft_config", {}
    ):  # the base is the reference, as in our own trainer
        model.delete_adapter("ref")
    return trainer


def make_learner(config: Config) -> LearnerMaker | None:
    """Return what makes TRL's learner, or None unless `trainer.kind` is trl.

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
        report(LOST)
        return TRLLearner(loaded, config, folder / "trl")

    return make
