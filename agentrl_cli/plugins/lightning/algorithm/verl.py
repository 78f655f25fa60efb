"""`VERL(config)`: verl's dictionary as settings of this package. Keys without a meaning here are named in the log.

| verl | here |
| --- | --- |
| `algorithm.adv_estimator` | `algo.advantage` |
| `algorithm.use_kl_in_reward`, `algorithm.kl_ctrl.kl_coef` | `algo.kl.where: reward`, `algo.kl.coef` |
| `actor.use_kl_loss`, `kl_loss_coef`, `kl_loss_type` | `algo.kl.where: loss`, `algo.kl.coef`, `algo.kl.estimate` |
| `data.train_batch_size`, `rollout.n` | `rollout.prompts_per_step`, `rollout.group_size` |
| `data.max_response_length` | `rollout.max_new_tokens`; with `max_prompt_length` `rollout.max_tokens` |
| `actor.ppo_mini_batch_size`, `ppo_epochs` | `algo.minibatches`, `algo.epochs` |
| `actor.clip_ratio[_low/_high]` | `algo.loss: {name: ppo_clip, clip_low, clip_high}` |
| `trainer.total_training_steps`, `total_epochs` | `train.steps` |
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from agentrl_cli.config import Config, load_config
from agentrl_cli.errors import EnvironmentProblem, NotFound
from agentrl_cli.hooks import LOGGERS
from agentrl_cli.hooks.loggers import flat
from agentrl_cli.plugins.lightning.algorithm.training import GRPO
from agentrl_cli.registry import resolve

_LOG = logging.getLogger(__name__)
ACTOR, ROLLOUT, MODEL = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
)

SAME = {
    f"{ROLLOUT}.n": "rollout.group_size",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    f"{ROLLOUT}.top_p": "rollout.truncation.top_p",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.max_response_length": "rollout.max_new_tokens",
    f"{ACTOR}.optim.lr": "train.lr",
    f"{ACTOR}.optim.weight_decay": "train.optimizer.weight_decay",
    f"{ACTOR}.grad_clip": "train.max_grad_norm",
    f"{ACTOR}.entropy_coeff": "algo.entropy.coef",
    f"{ACTOR}.ppo_epochs": "algo.epochs",
    f"{ACTOR}.loss_agg_mode": "algo.aggregation",
    f"{MODEL}.path": "model.name",
    f"{MODEL}.lora_alpha": "adapter.alpha",
    f"{MODEL}.target_modules": "adapter.target_modules",
    f"{MODEL}.lora_adapter_path": "adapter.path",
    "trainer.total_training_steps": "train.steps",
}
"""Keys whose values are taken as they are."""
ESTIMATORS = {
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
CHANGED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "algorithm.adv_estimator": ("algo.advantage", lambda name: ESTIMATORS.get(name, name)),
    f"{ROLLOUT}.top_k": ("rollout.truncation.top_k", lambda count: max(0, count)),
    f"{ACTOR}.optim.lr_warmup_steps": (
        "train.schedule.warmup_steps",
        lambda count: max(0, count),
    ),
    f"{MODEL}.enable_gradient_checkpointing": (
        "train.checkpointing",
        lambda wanted: "auto" if wanted else "off",
    ),
    "trainer.test_freq": ("train.eval.every", lambda every: max(0, every)),
}
"""Keys that mean one setting, in another form."""
KEPT = {
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.use_kl_loss",
    f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.kl_loss_type",
    f"{ACTOR}.clip_ratio",
    f"{ACTOR}.clip_ratio_low",
    f"{ACTOR}.clip_ratio_high",
    f"{ROLLOUT}.multi_turn.format",
    f"{MODEL}.lora_rank",
    "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.kl_coef",
    "data.max_prompt_length",
    "trainer.total_epochs",
    "trainer.save_freq",
    "trainer.logger",
    "trainer.experiment_name",
    "agentlightning.trace_aggregator.level",
    "agentlightning.trace_aggregator.trajectory_max_prompt_length",
    "agentlightning.trace_aggregator.trajectory_max_response_length",
}
"""Keys that become settings together with others, see `translate`."""
KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs"}


class VERL(GRPO):
    """Trains by the settings of verl's dictionary, with this package's trainer on this machine."""

    name = "lightning"

    def __init__(
        self, config: Mapping[str, Any], trainer_cls: Any = None, daemon_cls: Any = None
    ) -> None:
        """`trainer_cls` and `daemon_cls` are verl's own, and ignored like other keys that mean nothing here."""
        self.config = config
        given = flat(config)
        classes = {"trainer_cls": trainer_cls, "daemon_cls": daemon_cls}
        self.ignored = sorted({*given} - SAME.keys() - CHANGED.keys() - KEPT) + [
            name for name, value in classes.items() if value
        ]
        """Keys that have no effect."""
        self.name = str(given.get("trainer.experiment_name") or self.name)

    def settings(self, tasks: int) -> Config:
        """Return the configuration; the log names ignored keys, and loggers that are not installed or known.

        Raises ConfigError for a value that is not valid.
        """
        if self.ignored:
            _LOG.warning("VERL: these keys have no effect here: %s", ", ".join(self.ignored))
        out = translate(flat(self.config), tasks)
        kept = []
        for name in out.pop("loggers", ()):
            try:
                resolve("loggers", LOGGERS, name)()
                kept.append(name)
            except NotFound as error:
                _LOG.warning("VERL: %s The run goes on without it.", error.message)
            except EnvironmentProblem as error:
                # Every published script names wandb, and the store has all of it.
                _LOG.warning(
                    "VERL: %s The run goes on without it; %s",
                    error.message,
                    error.hint.partition(",")[0],
                )
        return load_config((), (), os.environ, out | ({"loggers": kept} if kept else {}))[0]


def translate(given: Mapping[str, Any], tasks: int) -> dict[str, Any]:
    """Settings by dotted key, from verl's by dotted key; `tasks`: how many there are to train on."""
    out = {ours: given[key] for key, ours in SAME.items() if given.get(key) is not None}
    for key, (ours, change) in CHANGED.items():
        if given.get(key) is not None:
            out[ours] = change(given[key])
    clip = {
        side: given.get(f"{ACTOR}.clip_ratio_{side}", given.get(f"{ACTOR}.clip_ratio"))
        for side in ("low", "high")
    }
    bounds = {f"clip_{side}": value for side, value in clip.items() if value is not None}
    if bounds:
        out["algo.loss"] = {"name": "ppo_clip", **bounds}
    if syntax := given.get(f"{ROLLOUT}.multi_turn.format"):
        out["model.chat.parser"] = syntax
    if rank := given.get(f"{MODEL}.lora_rank"):
        out |= {"adapter.enabled": True, "adapter.r": rank}
    return out | _kl(given) | _lengths(given) | _steps(given, tasks)


def _kl(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("algorithm.use_kl_in_reward"):
        return {
            "algo.kl.where": "reward",
            "algo.kl.coef": given.get("algorithm.kl_ctrl.kl_coef", 0.001),
        }
    if not given.get(f"{ACTOR}.use_kl_loss"):
        return {"algo.kl.coef": 0.0}
    kind = given.get(f"{ACTOR}.kl_loss_type", "low_var_kl")
    return {
        "algo.kl.coef": given.get(f"{ACTOR}.kl_loss_coef", 0.001),
        "algo.kl.estimate": KL.get(kind, kind),
    }


def _lengths(given: Mapping[str, Any]) -> dict[str, Any]:
    longest = [given.get("data.max_prompt_length"), given.get("data.max_response_length")]
    place = "agentlightning.trace_aggregator"
    if given.get(f"{place}.level") == "trajectory":
        parts = [
            given.get(f"{place}.trajectory_max_{part}_length") for part in ("prompt", "response")
        ]
        longest = longest if None in parts else parts
    return {} if None in longest else {"rollout.max_tokens": sum(longest)}


def _steps(given: Mapping[str, Any], tasks: int) -> dict[str, Any]:
    batch = given.get("data.train_batch_size")
    out: dict[str, Any] = {}
    epochs = given.get("trainer.total_epochs")
    if epochs is not None and given.get("trainer.total_training_steps") is None:
        out["train.steps"] = max(1, epochs * tasks // (batch or Config().rollout.prompts_per_step))
    small = given.get(f"{ACTOR}.ppo_mini_batch_size")
    if small and batch:
        out["algo.minibatches"] = max(1, batch // small)
    if (save := given.get("trainer.save_freq")) is not None and save > 0:
        out["train.save.every"] = save
    named = given.get("trainer.logger")
    loggers = [named] if isinstance(named, str) else list(named or ())
    if wanted := [name for name in loggers if name != "console"]:  # which is always there
        out["loggers"] = wanted
    return out
