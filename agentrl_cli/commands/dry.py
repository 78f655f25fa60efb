"""`--dry-run`: the resolved settings, a run's memory and time, and whether it fits. Trains and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl_cli.commands.common import Context, data_stdout, echo, echo_json, narrate
from agentrl_cli.errors import EnvironmentProblem

if TYPE_CHECKING:
    from agentrl_cli.analysis.memory_plan import Plan
    from agentrl_cli.config import Config

MiB = 1024**2


SURE = 3.0
"""Factor to both sides of the estimated time: speeds of machines and lengths of episodes differ."""


def dry_run(context: Context, *, as_json: bool = False, verbose: bool = False) -> None:
    """Print memory and time, with `verbose` all settings before.

    Raises EnvironmentProblem, with what to change, if the run will not fit, and as `check_trainable` does if this
    machine cannot train with these settings at all.
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
        if as_json:
            echo_json({"config": config.model_dump(mode="json"), **_report(found)})
        elif verbose:
            echo(full_yaml(config).rstrip())
            narrate("")
    if found.aside:
        narrate("while episodes are sampled, the optimizer's state is offloaded to CPU memory")
    if found.checkpointing:
        narrate("activations are recomputed in the backward pass (train.checkpointing)")
    if verbose:
        narrate(f"without the runtime, which torch's allocator does not see: {_parts(found.allocated)} MiB")
    narrate(f"{'model':9}  {found.parameters:,} parameters, {found.trainable:,} trained, on {found.device}")
    for name, phase in (("rollout", found.rollout), ("update", found.update)):
        narrate(f"{name:9}{sum(phase.values()) / MiB:7,.0f} MiB   {_parts(phase)}")
    narrate(f"available{found.available / MiB:7,.0f} MiB")
    narrate(f"{'time':9}  {_time(found.seconds_per_step, config.train.steps)}")
    narrate(_prompts(config, found.row_tokens))
    if not found.fits:
        raise EnvironmentProblem(
            "This run does not fit into memory.", hint="To make it fit: " + "; ".join(found.advice())
        )


def _time(seconds: float, steps: int) -> str:
    """A range, since neither the speed of the machine nor the length of the episodes is known."""
    low, high = (f"{factor * seconds:.2g}" for factor in (1 / SURE, SURE))
    least, most = (factor * seconds * steps for factor in (1 / SURE, SURE))
    unit, size = ("s", 1.0) if most < 180 else ("min", 60.0) if most < 3 * 3600 else ("h", 3600.0)
    return f"{low} to {high} s a step, {least / size:.0f} to {most / size:.0f} {unit} for {steps} steps"


def _prompts(config: Config, most: int) -> str:
    """How often the update computes a group's prompt."""
    rollout = config.rollout
    after, group = rollout.response_tokens, rollout.group_size
    rule = f"a group's prompt is computed once in the update if the group takes at most {most:,} tokens"
    if after is None or after >= rollout.max_tokens:
        return rule
    prompt = rollout.max_tokens - after
    whole = prompt + group * after
    if whole <= most:
        return f"a group's prompt is computed once in the update: at most {whole:,} tokens a group, and {most:,} fit"
    times = min(group, -(-group * after // max(after, most - prompt)))
    return f"{rule}; with {rollout.max_tokens:,} tokens an episode up to {whole:,}, and then {times} times"


def _report(found: Plan) -> dict[str, Any]:
    """The plan as JSON; bytes and seconds."""
    memory = {name: getattr(found, name) for name in ("rollout", "update", "available", "allocated")}
    names = ("parameters", "trainable", "checkpointing", "aside", "row_tokens", "seconds_per_step", "fits")
    return {"memory": memory, **{name: getattr(found, name) for name in names}}


def _parts(phase: Mapping[str, float]) -> str:
    ranked = sorted(phase.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / MiB:,.0f}" for name, size in ranked)
