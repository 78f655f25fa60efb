"""Fields of TRL's GRPOConfig for a configuration, and the settings that TRL cannot follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, suggest
from agentrl_cli.learning.objective import aggregation_name
from agentrl_cli.models.adapter import ADAPTER_FILE
from agentrl_cli.plugins.trl.settings import TrainerConfig
from agentrl_cli.registry import require_package

LOSS_TYPES = {"token_mean": "dapo", "seq_mean": "grpo", "seq_mean_norm": "dr_grpo"}
SCALES = {"grpo": "group", "dr_grpo": "none"}
UNSUPPORTED = {
    "rollout.async_staleness": 0,
    "algo.epochs": 1,
    "algo.minibatches": 1,
    "algo.kl.where": "loss",
    "algo.kl.estimate": "k3",
    "algo.kl.target": None,
    "algo.kl.unbiased": False,
    "algo.entropy.target": None,
    "algo.off_policy.mask": None,
    "algo.entropy.share": 1.0,
    "algo.off_policy.bypass": False,
    "algo.off_policy.reject": "none",
    "algo.kl.ref_ema": 0.0,
    "rollout.truncation.replay": False,
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


def _check_settings(config: Config) -> None:
    """Raise ConfigError for a setting that TRL cannot follow."""
    algo, train = config.algo, config.train
    for key, only in UNSUPPORTED.items():
        value = attrgetter(key)(config)
        if value not in (only, None):
            raise _refuse_option(key, value, only)
    for key, value, known in (
        ("algo.advantage", algo.advantage.name, SCALES),
        ("algo.advantage.eps", str(getattr(algo.advantage, "eps", 1e-4)), {"0.0001": ""}),
        ("algo.loss", algo.loss.name, {"ppo_clip": ""}),
        ("algo.aggregation", aggregation_name(algo), LOSS_TYPES),
        ("train.optimizer", train.optimizer.name, {"adamw": "", "adamw8bit": ""}),
        ("algo.off_policy.correction", algo.off_policy.correction, {"auto": "", "none": ""}),
    ):
        if value not in known:
            raise _refuse_option(key, value, " or ".join(known))
    if config.rollout.truncates:
        raise ConfigError(
            "TRL does not correct for truncated sampling (top_p, top_k, min_p, a penalty or bad tokens).",
            hint="Remove them, or set trainer.kind: agentrl.",
        )
    if clash := sorted(OWN & config.section(TrainerConfig).options.keys()):
        raise ConfigError(
            f"trainer.options: {', '.join(clash)} follows from the other settings.",
            hint="Remove it.",
        )


def arguments(config: Config) -> dict[str, Any]:
    """Return fields of GRPOConfig for a configuration. Raises ConfigError for a setting that TRL cannot follow."""
    _check_settings(config)
    algo, train, rollout = config.algo, config.train, config.rollout
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
        "beta": algo.kl.coef,
        "entropy_coef": algo.entropy.coef,
        "max_grad_norm": train.max_grad_norm,
        "gradient_checkpointing": train.checkpointing == "on",
        **config.section(TrainerConfig).options,
    }
    size = given["per_device_train_batch_size"]
    if not isinstance(size, int) or size < 1 or total % size:
        raise ConfigError(
            f"trainer.options: per_device_train_batch_size {size} does not divide the {total} episodes of a step."
        )
    if algo.entropy.coef:
        _require_one_bonus(config, size, total)
    return given | {"gradient_accumulation_steps": total // size}


def _require_one_bonus(config: Config, size: int, total: int) -> None:
    """Raise ConfigError where TRL's entropy bonus, a mean over a micro-batch's tokens, is not that of a step."""
    if (name := aggregation_name(config.algo)) != "token_mean":
        raise _refuse_option("algo.aggregation with algo.entropy.coef", name, "token_mean")
    if size < total:
        raise ConfigError(
            f"TRL takes the entropy bonus as a mean over each of the {total // size} micro-batches of {size} episodes,"
            " which weights their tokens differently.",
            hint=f"--set train.token_budget={total * config.rollout.max_tokens} (one micro-batch), or"
            " trainer.kind: agentrl.",
        )


def _refuse_option(key: str, value: object, only: object) -> ConfigError:
    return ConfigError(
        f"trainer.kind trl cannot follow {key}: {value}; with TRL it is {only}.",
        hint=f"Set {key} to that, or trainer.kind: agentrl.",
    )


def check(config: Config) -> None:
    """Raise MissingDependency or ConfigError if TRL cannot train with this configuration."""
    require_package("trl", "1.16", "trl", otherwise="set trainer.kind: agentrl")
    arguments(config)
    from trl import GRPOConfig

    fields = [field.name for field in dataclasses.fields(GRPOConfig) if field.init]
    for name in config.section(TrainerConfig).options:
        if name not in fields:
            raise ConfigError(
                f"trainer.options: {name} is not a field of TRL's GRPOConfig.",
                hint=suggest(name, fields, "TRL's documentation lists the fields."),
            )


def require_reference(config: Config, folder: Path) -> None:
    """Raise ConfigError if TRL would not compare with the model that a training from `folder` begins with."""
    adapted = config.adapter.path is not None or (folder / ADAPTER_FILE).is_file()
    if config.algo.kl.coef and adapted:
        raise ConfigError(
            "With an adapter to start from, TRL's reference is the base without it, and algo.kl.coef is set.",
            hint="Set algo.kl.coef=0, or trainer.kind: agentrl.",
        )
