"""`--dry-run`: the resolved settings, a run's memory and time, and whether it fits. Trains and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl_cli.commands.common import Context, data_stdout, echo, echo_json, narrate
from agentrl_cli.errors import EnvironmentProblem

if TYPE_CHECKING:
    from agentrl_cli.analysis.memory_plan import Plan

MiB = 1024**2


def dry_run(context: Context, *, as_json: bool = False) -> None:
    """Print settings, memory and time. Raises EnvironmentProblem, with what to change, if the run will not fit.

    Raises as `check_trainable` does if this machine cannot train with these settings at all.
    """
    from agentrl_cli.config.show import full_yaml

    with data_stdout():
        from agentrl_cli.analysis.memory_plan import plan
        from agentrl_cli.learning.settings import check
        from agentrl_cli.models.device import pick_device
        from agentrl_cli.models.load import model_folder
        from agentrl_cli.models.quantise import check_trainable

        config = context.config
        check(config.algo)
        check_trainable(config, pick_device(config.model.device))
        found = plan(config, model_folder(config.model.name, config, base=context.project))
        minutes = found.seconds_per_step * config.train.steps / 60
        if as_json:
            echo_json({"config": config.model_dump(mode="json"), **_report(found)})
        else:
            echo(full_yaml(config).rstrip())
    narrate("")
    narrate(f"{found.parameters:,} parameters, {found.trainable:,} trained, on {found.device}")
    for name, phase in (("rollout", found.rollout), ("update", found.update)):
        narrate(f"{name:8} {sum(phase.values()) / MiB:8,.0f} MiB   {_parts(phase)}")
    narrate(f"without the runtime, which torch's allocator does not see: {_parts(found.allocated)} MiB")
    if found.aside:
        narrate("while episodes are sampled, the optimizer's state is offloaded to CPU memory")
    if found.checkpointing:
        narrate("activations are recomputed in the backward pass (train.checkpointing)")
    narrate(f"available {found.available / MiB:7,.0f} MiB")
    narrate(f"time     about {found.seconds_per_step:.1f} s a step, {minutes:.0f} min for {config.train.steps} steps")
    if not found.fits:
        raise EnvironmentProblem(
            "This run does not fit into memory.", hint="To make it fit: " + "; ".join(found.advice())
        )


def _report(found: Plan) -> dict[str, Any]:
    """The plan as JSON; bytes and seconds."""
    memory = {name: getattr(found, name) for name in ("rollout", "update", "available", "allocated")}
    names = ("parameters", "trainable", "checkpointing", "aside", "seconds_per_step", "fits")
    return {"memory": memory, **{name: getattr(found, name) for name in names}}


def _parts(phase: Mapping[str, float]) -> str:
    ranked = sorted(phase.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / MiB:,.0f}" for name, size in ranked)
