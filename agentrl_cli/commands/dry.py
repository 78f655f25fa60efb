"""What `agentrl train` plans: `--preset`, `--fit`, and `--dry-run`, which trains and writes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import Context, data_stdout, echo, echo_json, narrate
from agentrl_cli.commands.options import refuse_idle
from agentrl_cli.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from agentrl_cli.config import Config
    from agentrl_cli.trainer.memory_plan import Plan

MiB = 1024**2


SURE = 3.0
"""Factor to both sides of the estimated time: speeds of machines and lengths of episodes differ."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The plan before a training, and whether it begins."""

    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help="Settings for a model and a GPU, over the project's.",
            autocompletion=completion.presets,
        ),
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print memory and time (-v: and settings); train nothing."),
    ] = False
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Change what does not fit into memory, and print the changes."),
    ] = False
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="Choose steps, batch, lengths, evaluations and lr for 5m, 1h or 8h, by a short probe.",
        ),
    ] = None
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory",
            metavar="SIZE",
            help="With --dry-run: plan for a GPU of this size: 8GiB.",
        ),
    ] = None
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With --dry-run: print every setting.")
    ] = False
    accept: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Resume with changed rows, code or tokenizer; cut groups are replaced.",
        ),
    ] = False

    def require_consistent(self, *, resumes: bool) -> None:
        """Raise UsageError for options that exclude each other."""
        given = {"--preset": self.preset, "--fit": self.fit, "--gpu-memory": self.gpu_memory}
        given["--budget"] = self.budget
        name = next((name for name, value in given.items() if value), "")
        if resumes and name:
            raise UsageError(
                f"{name} is for a new run: a resumed one keeps its settings.",
                hint=f"Leave out {name}.",
            )
        if self.accept and not resumes:
            raise UsageError(
                "--accept-changes is for a resume.",
                hint="agentrl train --resume last --accept-changes",
            )
        refuse_idle("without --dry-run", {"--verbose": self.verbose and not self.dry_run})
        if self.gpu_memory is not None and not self.dry_run:
            raise UsageError(
                "--gpu-memory plans for a GPU that may be absent.", hint="Add --dry-run."
            )

    @property
    def files(self) -> list[Path]:
        """The preset's file. Raises NotFound."""
        from agentrl_cli.config.presets import preset_file

        return [] if self.preset is None else [preset_file(self.preset)]

    @property
    def gpu_bytes(self) -> float | None:
        """Bytes of the GPU to plan for; None: this machine. Raises ConfigError."""
        from agentrl_cli.inference.memory import parse_memory

        return None if self.gpu_memory is None else parse_memory(self.gpu_memory, "--gpu-memory")

    def make_fit(self, context: Context) -> Context:
        """Return the context with settings that fit, each change printed."""
        with data_stdout():
            from agentrl_cli.models.device import quantises
            from agentrl_cli.trainer.memory_fit import changes, fit

            before = _planned_config(context)
            folder = _model_folder(context)
            can = self.gpu_memory is not None or quantises(before.model)
            found, planned = fit(before, folder, gpu_bytes=self.gpu_bytes, quantised=can)
        narrate(f"{'fit':9}  {'; '.join(changes(before, found)) or 'nothing has to change'}")
        if not planned.fits and not self.dry_run:
            raise EnvironmentProblem(
                "This run does not fit into memory with any setting that --fit changes.",
                hint="To make it fit: " + "; ".join(planned.advice()),
            )
        kept = {"response_tokens": context.config.rollout.response_tokens}
        config = before.replace(**vars(found)).replace(rollout=kept)
        return dataclasses.replace(context, config=config)

    def make_budget(self, context: Context) -> tuple[Context, dict[str, Any]]:
        """Return the context with settings for the time of --budget, printed, and the record of the choice."""
        with data_stdout():
            from agentrl_cli.commands.budget import describe_budget, parse_time, plan_budget

            seconds = parse_time(self.budget or "")
            narrate(f"{'budget':9}  {self.budget}: a probe of this machine, model and task …")
            # the probe has a store of its own, without a checkpoint that the name may mean
            probed = context.config.replace(model={"name": str(_model_folder(context))})
            given = (probed, context.sources, context.project, seconds)
            config, record = asyncio.run(plan_budget(*given))
            config = config.replace(model={"name": context.config.model.name})
        for line in describe_budget(record):
            narrate(line)
        return dataclasses.replace(context, config=config), record


def _model_folder(context: Context) -> Path:
    from agentrl_cli.models.load import configured_folder

    return configured_folder(context.config.model, context.project, context.db)


def _planned_config(context: Context) -> Config:
    """Return the settings by which memory is planned; packs are loaded only if theirs could differ."""
    from agentrl_cli.rollout.parts import limits_of
    from agentrl_cli.tasks import load_packs

    config = context.config
    if config.rollout.response_tokens is None:
        return config
    packs = load_packs(config.task.packs, base=context.project, agent=config.task.agent)
    return limits_of(config, packs)


def print_plan(context: Context, planned: PlanOptions, *, as_json: bool) -> None:
    """Print memory and time, with --verbose all settings before.

    Raises EnvironmentProblem, with what to change, if the run will not fit, and as `check_trainable` does if this
    machine cannot train with these settings at all.
    """
    from agentrl_cli.config.show import full_yaml

    with data_stdout():
        from agentrl_cli.config.records import PolicySettings
        from agentrl_cli.learning.objective import check
        from agentrl_cli.models.device import check_trainable, pick_device
        from agentrl_cli.trainer.memory_plan import plan

        config = _planned_config(context)
        check(config.algo)
        if planned.gpu_bytes is None:
            check_trainable(PolicySettings.of(config), pick_device(config.model.device))
        found = plan(config, _model_folder(context), gpu_bytes=planned.gpu_bytes)
        if as_json:
            echo_json({"config": context.config.model_dump(mode="json"), **_report(found)})
        elif planned.verbose:
            echo(full_yaml(context.config).rstrip())
            narrate("")
    _print_memory(found, planned.verbose)
    if planned.gpu_bytes is None:
        narrate(f"{'time':9}  {_time(found.seconds_per_step, config.train.steps)}")
    prompts, once = _prompts(config, found)
    if planned.verbose or not once:
        narrate(prompts)
    if not found.fits:
        advice = [*([] if planned.fit else ["--fit"]), *found.advice()]
        raise EnvironmentProblem(
            "This run does not fit into memory.", hint="To make it fit: " + "; ".join(advice)
        )


def _print_memory(found: Plan, verbose: bool) -> None:
    """Print the model, and the memory of each phase."""
    if found.aside:
        narrate("while episodes are sampled, the optimizer's state is offloaded to CPU memory")
    if found.checkpointing:
        narrate("activations are recomputed in the backward pass (train.checkpointing)")
    if verbose:
        narrate(
            f"without the runtime, which torch's allocator does not see: {_parts(found.allocated)} MiB"
        )
    narrate(
        f"{'model':9}  {found.parameters:,} parameters, {found.trainable:,} trained, on {found.device}"
    )
    for name, phase in (("rollout", found.rollout), ("update", found.update)):
        narrate(f"{name:9}{sum(phase.values()) / MiB:7,.0f} MiB   {_parts(phase)}")
    narrate(f"available{found.available / MiB:7,.0f} MiB")


def _time(seconds: float, steps: int) -> str:
    """Return a range, since neither the speed of the machine nor the length of the episodes is known."""
    low, high = (f"{float(f'{factor * seconds:.2g}'):g}" for factor in (1 / SURE, SURE))
    least, most = (factor * seconds * steps for factor in (1 / SURE, SURE))
    unit, size = ("s", 1.0) if most < 180 else ("min", 60.0) if most < 3 * 3600 else ("h", 3600.0)
    return f"{low} to {high} s a step, {least / size:.0f} to {most / size:.0f} {unit} for {steps} steps"


def _prompts(config: Config, found: Plan) -> tuple[str, bool]:
    """Return how often the update computes a group's prompt, and whether all groups cost the same for each token."""
    rollout, most, kept = config.rollout, found.row_tokens, found.kept_tokens
    after, group = rollout.response_tokens, rollout.group_size
    rule = f"a group's prompt is computed once in the update if the group takes at most {most:,} tokens"
    if kept < most:
        rule += f" (beyond {kept:,} activations are recomputed: a third slower)"
    if after is None or after >= rollout.max_tokens:
        return rule, group * rollout.max_tokens <= kept
    prompt = rollout.max_tokens - after
    whole = prompt + group * after
    if whole <= kept:
        text = f"a group's prompt is computed once in the update: at most {whole:,} tokens a group, and {kept:,} fit"
        return text, True
    if whole <= most:
        return f"{rule}; with {rollout.max_tokens:,} tokens an episode up to {whole:,}", False
    times = min(group, -(-group * after // max(after, most - prompt)))
    text = f"with {rollout.max_tokens:,} tokens an episode up to {whole:,}, and then {times} times"
    return f"{rule}; {text}", False


def _report(found: Plan) -> dict[str, Any]:
    """Return the plan as JSON; bytes and seconds."""
    memory = {
        name: getattr(found, name) for name in ("rollout", "update", "available", "allocated")
    }
    names = "parameters trainable checkpointing aside kept_tokens row_tokens seconds_per_step fits"
    return {"memory": memory, **{name: getattr(found, name) for name in names.split()}}


def _parts(phase: Mapping[str, float]) -> str:
    ranked = sorted(phase.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / MiB:,.0f}" for name, size in ranked)
