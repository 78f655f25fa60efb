"""`agentrl train`: one run, in the foreground, or as a separate process under the watch screen."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    AgentOption,
    Context,
    JsonOption,
    announce_loading,
    data_stdout,
    echo_jsonl,
    narrate,
    warn,
    warn_unsafe,
)
from agentrl_cli.commands.dry import PlanOptions, print_plan
from agentrl_cli.commands.options import (
    ModelOptions,
    RateOption,
    StepsOption,
    refuse_idle,
)
from agentrl_cli.commands.progress import Progress
from agentrl_cli.errors import RunFailed, UsageError, pluralise
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers

if TYPE_CHECKING:
    from agentrl_cli.runtime import Runtime
    from agentrl_cli.store import RunRow

Record = Mapping[str, Any]
INTERRUPTED = ("interrupted", "stopped at once")
"""Errors of a run that Ctrl-C stopped: after its step, and within it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """The process that trains."""

    watch: Annotated[
        bool, typer.Option("--watch", help="Train in a separate process and watch it.")
    ] = False
    detach: Annotated[
        bool, typer.Option("--detach", help="Train in a separate process and return at once.")
    ] = False
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            help='Resume a run: its name, id, or "last".',
            autocompletion=completion.runs,
        ),
    ] = None
    run_id: Annotated[
        str | None, typer.Option("--run-id", hidden=True, help="The new run's id.")
    ] = None
    as_json: JsonOption = False

    def require_consistent(self, *, dry_run: bool) -> None:
        """Raise UsageError for options that would do nothing beside another."""
        ways = {"--dry-run": dry_run, "--detach": self.detach, "--watch": self.watch}
        way, *others = [name for name, value in ways.items() if value] or [""]
        json = self.as_json and way in ("--detach", "--watch")
        refuse_idle(f"with {way}", {**dict.fromkeys(others, True), "--json": json})


def command(
    steps: StepsOption = None,
    lr: RateOption = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Train a LoRA adapter, or all weights.")
    ] = None,
    group: Annotated[
        int | None, typer.Option("--group", "-g", min=1, max=2**16, help="Attempts at each task.")
    ] = None,
    agent: AgentOption = None,
    heal: Annotated[
        bool | None,
        typer.Option("--heal", help="After a collapse: the best checkpoint, a lower lr, go on."),
    ] = None,
    *,
    planned: PlanOptions,
    process: ProcessOptions,
    work: ModelOptions,
) -> None:
    """Train on the local GPU or CPU. Ctrl-C finishes the step and saves, twice stops now; --resume continues."""
    from agentrl_cli.trainer.resume import hold_training

    flags = {
        **{"train.steps": steps, "train.lr": lr, "model.name": work.model},
        **{"adapter.enabled": lora, "rollout.group_size": group, "task.agent": agent},
        "train.heal": heal or None,
    }
    planned.require_consistent(resumes=process.resume is not None)
    process.require_consistent(dry_run=planned.dry_run)
    work = dataclasses.replace(work, config=[*planned.files, *(work.config or [])])
    context = work.open(flags)
    place = (context.project, context.db)
    if any(resolve("joins", {}, name)(context.config, *place) for name in offers("joins")):
        return  # this process was part of a training that another process led, which has ended
    apart, record = process.watch or process.detach, dict[str, Any]()
    with hold_training(context.db, process.resume, here=not (planned.dry_run or apart)) as run:
        if run is not None:
            context = _resume_context(context, run, work, flags)
        elif not apart:  # the process that trains chooses
            _refuse_adapter(context, full=lora is False)
            context = planned.make_fit(context) if planned.fit else context
            if planned.budget:
                context, record = planned.make_budget(context)
        if planned.dry_run:
            print_plan(context, planned, as_json=process.as_json)
        elif apart:
            _train_apart(context, run, process)
        else:
            _train_here(context, run, process, planned.accept, record)


def _refuse_adapter(context: Context, *, full: bool) -> None:
    """Raise UsageError if the model is an adapter and all weights (`full`) are to be trained."""
    from agentrl_cli.models.adapter import ADAPTER_FILE
    from agentrl_cli.models.load import configured_folder

    name = context.config.model.name
    if not full or name == "scripted":
        return
    if (
        configured_folder(context.config.model, context.project, context.db) / ADAPTER_FILE
    ).is_file():
        raise UsageError(
            f"{name} is a LoRA adapter: what is trained on is the adapter, and its base keeps its weights.",
            hint=f"Merge them, then train all: agentrl merge {shlex.quote(name)} merged &&"
            " agentrl train --full --model merged",
        )


def _resume_context(
    context: Context, run: RunRow, work: ModelOptions, flags: Mapping[str, Any]
) -> Context:
    """Return the context with the settings of the run; exits if it has no steps left."""
    from agentrl_cli.trainer.resume import resumed_config

    given = {**work.flags(), **flags}
    settings, sources = resumed_config(run, context.project, work.sets or (), given)
    if run.status != "finished" or run.step < settings.train.steps:
        return dataclasses.replace(context, config=settings, sources=sources)
    more = f"agentrl train --resume {run.name} --steps {2 * run.step}"
    narrate(
        f"{run.name} has done its {pluralise(run.step, 'step')}: nothing left to do. Train further: {more}"
    )
    said = [f"{key}={value}" for key, value in given.items() if value is not None]
    if dropped := [*(work.sets or ()), *said]:
        narrate(f"Not applied, since no steps are left: {', '.join(dropped)}.")
    raise typer.Exit(0)


def _train_here(
    context: Context, resumed: RunRow | None, process: ProcessOptions, accept: bool, record: Record
) -> None:
    """Train in this process, with a line or a bar for each step, and report the result. `record`: its budget's."""
    from agentrl_cli.store import Store
    from agentrl_cli.trainer.resume import restart_after_gpu_fault

    begun: list[str] = []  # the run's id, once it has a row

    begin = partial(_begin, context, resumed, process.run_id or "", begun, record)

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if process.as_json:
            echo_jsonl([{"type": "step", "step": step, **metrics}])
        if bar is not None:
            bar.done = step - 1  # a resumed training begins further on
            bar.advance()

    async def train() -> None:
        try:
            await run_training(
                context.config,
                begin,
                base=context.project,
                db=context.db,
                narrate=narrate,
                on_step=on_step,
                accept_changes=accept,
            )
        except asyncio.CancelledError:
            # A second Ctrl-C, or `stop now`: the row has it, and a resume continues from it.
            if not begun:
                raise

    place = (context.project, context.db)
    restart = restart_after_gpu_fault(*place, begun, as_json=process.as_json, narrate=narrate)
    with restart, data_stdout():
        announce_loading()
        from agentrl_cli.runtime import run_training

        progress = Progress("train", context.config.train.steps, eta=False)
        with progress if sys.stderr.isatty() else contextlib.nullcontext() as bar:
            asyncio.run(train())
        with Store.open(context.db, readonly=True) as store:
            run = store.runs.get(begun[0])
        if process.as_json:
            row = {"run": run.name, "id": run.id, "status": run.status, "step": run.step}
            echo_jsonl([{"type": "run", **row}])
    _conclude(context, run)


def _conclude(context: Context, run: RunRow, *, watched: bool = False) -> None:
    """Print the diagnosis of a training that ended, its alerts, and the next command.

    Raises RunFailed if one in another process failed; exits with 130 if Ctrl-C stopped the one in this.
    """
    from agentrl_cli.reports.diagnosis import conclude, diagnose, first_fault
    from agentrl_cli.reports.read_evidence import read_evidence
    from agentrl_cli.store import Store
    from agentrl_cli.store.checkpoint_names import explain_best

    again, begin = f"agentrl train --resume {run.name}", ""
    with Store.open(context.db, readonly=True) as store:
        kept = [checkpoint.step for checkpoint in store.runs.checkpoints(run.id)]
        if (newest := max(kept, default=0)) < run.step:
            why = "its newest checkpoint" if kept else "no checkpoint was saved"
            begin = f" (from step {newest}: {why})"
        if watched and run.state in ("failed", "interrupted"):
            text = f"{run.name}: {run.state} at step {run.step}"
            text += f": {run.error}" if run.error else "."
            raise RunFailed(text, hint=f"Resume it{begin}: {again}")
        evidence = read_evidence(store, run)
        alerts = [f"{row['name']} {row['count']}×" for row in store.journal.folded_alerts(run.id)]
        budget = store.journal.newest_event(run.id, "budget")
        doubt = explain_best(store, f"{run.name}@best")
    for sentence in conclude(evidence):
        narrate(sentence)
    if doubt:
        narrate(doubt)
    if alerts:
        narrate(f"Alerts: {', '.join(alerts)}")
    if budget and run.status == "finished":
        took = budget["spent"] + run.ended - run.started
        narrate(
            f"Budget {budget['seconds']:.0f} s, expected {budget['expected']:.0f} s, took {took:.0f} s"
        )
    if run.status == "stopped":
        narrate(f"{run.name} stopped after step {run.step}: {run.error}. Resume it{begin}: {again}")
        if run.error in INTERRUPTED and not watched:
            raise typer.Exit(130)
        return
    cause = first_fault(diagnose(evidence))
    fault = cause is not None and cause.fault
    walk = f"The whole walk: agentrl why {run.name}"
    following = walk if fault else "Next: agentrl eval, agentrl replay best"
    narrate(f"{run.name}: {run.status} at step {run.step}. {following}")


def _begin(
    context: Context,
    resumed: RunRow | None,
    id: str,
    begun: list[str],
    record: Record,
    runtime: Runtime,
) -> RunRow:
    """Return the row of the training, note its id, and print its model, sandbox and store."""
    from agentrl_cli.policies.protocols import require_trainable
    from agentrl_cli.runtime import new_training
    from agentrl_cli.trainer.resume import reopen_run

    config = context.config
    run = (
        new_training(runtime, id)
        if resumed is None
        else reopen_run(runtime.store, resumed.id, config, narrate, context.project)
    )
    begun.append(run.id)
    if record:
        runtime.store.journal.add_event(run.id, "budget", dict(record))
    warn_unsafe(runtime.sandbox)
    engine = require_trainable(runtime.loaded.policy).describe()
    level = runtime.sandbox.level if runtime.sandbox is not None else "not needed"
    narrate(
        f"{run.name}: {runtime.loaded.name}, engine {engine},"
        f" {pluralise(config.train.steps, 'step')}, sandbox {level}, {context.db}"
    )
    if config.rollout.truncates or runtime.hooks.has("on_sample"):
        how = {
            "auto": "truncated importance sampling (tis)",
            "none": "nothing: algo.off_policy.correction is none",
        }
        by = how.get(config.algo.off_policy.correction, config.algo.off_policy.correction)
        what = "Sampling is truncated (top_p, top_k, min_p, a penalty or bad tokens)"
        if not config.rollout.truncates:
            what = "A hook's on_sample may change the sampled token"
        warn(f"{what}: the loss is corrected by {by}.")
    return run


def _train_apart(context: Context, resumed: RunRow | None, process: ProcessOptions) -> None:
    """Start this command without --watch in a process of its own, then watch its run."""
    from agentrl_cli.commands.watch import watch_run
    from agentrl_cli.store import Store
    from agentrl_cli.trainer.resume import start_training
    from agentrl_cli.types import new_id

    run_id = new_id()
    arguments = [a for a in sys.argv[1:] if a not in ("--watch", "--detach")]
    log = context.db.parent / "logs" / f"{run_id}.log"
    narrate("Starting the trainer in a separate process …")
    wanted = resumed.id if resumed is not None else run_id
    started = start_training([*arguments, "--run-id", run_id], context.db, wanted, log)
    if process.watch:
        watch_run(context.db, started.id)
        with Store.open(context.db, readonly=True) as store:
            run = store.runs.get(started.id)
        if not run.alive:
            return _conclude(context, run, watched=True)
    name = started.name
    narrate(f"{name}: process {started.pid}. Watch it: agentrl watch {name}. Its log: {log}")
