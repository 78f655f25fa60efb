"""`agentrl train`: one run, in the foreground, or as a separate process under the watch screen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    AcceptOption,
    AgentOption,
    ConfigOption,
    Context,
    DbOption,
    JsonOption,
    ModelOption,
    PackOption,
    ProjectOption,
    SeedOption,
    SetOption,
    announce_loading,
    data_stdout,
    echo_jsonl,
    is_terminal,
    narrate,
    open_project,
    warn,
    warn_unsafe,
)
from agentrl_cli.commands.dry import (
    DryOption,
    FitOption,
    GpuMemoryOption,
    PresetOption,
    VerboseOption,
    Wanted,
)
from agentrl_cli.commands.flags import plugin_settings
from agentrl_cli.commands.progress import Progress
from agentrl_cli.commands.restart import is_project, restarting
from agentrl_cli.errors import ConfigError, NotFound, RunFailed, StoreError
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers

if TYPE_CHECKING:
    from agentrl_cli.runtime import Runtime
    from agentrl_cli.store import RunRow

StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")]
RateOption = Annotated[float | None, typer.Option("--lr", min=0, help="Peak learning rate.")]
GroupOption = Annotated[
    int | None, typer.Option("--group", "-g", min=1, help="Attempts at each task.")
]
LoraOption = Annotated[
    bool | None, typer.Option("--lora/--full", help="Train a LoRA adapter, or all weights.")
]
WatchOption = Annotated[
    bool, typer.Option("--watch", help="Train in a separate process and watch it.")
]
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Train in a separate process and return at once.")
]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume", help='Resume a run: its name, id, or "last".', autocompletion=completion.runs
    ),
]
IdOption = Annotated[str | None, typer.Option("--run-id", hidden=True, help="The new run's id.")]

FIXED = ("model", "adapter", "task", "seed", "deterministic")
"""Settings that a resume cannot change."""
AT_ONCE = "stopped at once"
"""The trainer's error for a run that did not finish its step."""


def command(
    steps: StepsOption = None,
    lr: RateOption = None,
    model: ModelOption = None,
    lora: LoraOption = None,
    group: GroupOption = None,
    seed: SeedOption = None,
    watch: WatchOption = False,
    detach: DetachOption = False,
    resume: ResumeOption = None,
    accept: AcceptOption = False,
    preset: PresetOption = None,
    dry_run: DryOption = False,
    fit: FitOption = False,
    gpu_memory: GpuMemoryOption = None,
    verbose: VerboseOption = False,
    pack: PackOption = None,
    project: ProjectOption = None,
    db: DbOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    agent: AgentOption = None,
    run_id: IdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on the local GPU or CPU. Ctrl-C finishes the step and saves, twice stops now; --resume continues."""
    flags = {
        **{"train.steps": steps, "train.lr": lr, "model.name": model, "seed": seed},
        "adapter.enabled": lora,
        "rollout.group_size": group,
        "task.packs": pack or None,
        "task.agent": agent,
        **plugin_settings(),
    }
    wanted = Wanted(
        preset,
        fit=fit,
        gpu_memory=gpu_memory,
        dry_run=dry_run,
        resumes=resume is not None,
        accept=accept,
    )
    context = open_project(project, db, [*wanted.files, *(config or [])], sets, flags)
    if not _joins(context):
        context = (
            context if watch or detach else wanted.fitted(context)
        )  # the process that trains chooses
        shown = _Shown(wanted=wanted, verbose=verbose, watch=watch, detach=detach, as_json=as_json)
        _begin(context, resume, sets, flags, run_id, shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """The options that decide how a training is shown, and whether it begins here."""

    wanted: Wanted
    verbose: bool
    watch: bool
    detach: bool
    as_json: bool


def _begin(
    context: Context,
    resume: str | None,
    sets: list[str] | None,
    flags: dict[str, Any],
    id: str | None,
    shown: _Shown,
) -> None:
    with _claimed(context, resume, here=not (shown.wanted.dry_run or shown.watch or shown.detach)):
        if resume is not None:
            context, resume = _resumed(context, resume, sets, flags)
        if shown.wanted.dry_run:
            from agentrl_cli.commands.dry import dry_run as dry

            dry(context, shown.wanted, as_json=shown.as_json, verbose=shown.verbose)
        elif shown.watch or shown.detach:
            _own_process(context, resume, watch=shown.watch)
        else:
            _foreground(context, resume, id, shown)


def _joins(context: Context) -> bool:
    """Whether this process was part of a training that another process led, which has ended."""
    logs = context.db.parent / "logs"
    return any(resolve("joins", {}, name)(context.config, logs) for name in offers("joins"))


@contextlib.contextmanager
def _claimed(context: Context, resume: str | None, *, here: bool) -> Iterator[None]:
    """Hold the run to resume, from before its settings are read; if it is resumed in another process, only check it.

    Raises UsageError if another process holds it.
    """
    from agentrl_cli.store import Store
    from agentrl_cli.store.claims import in_use

    if resume is None:
        yield
        return
    with Store.open(context.db, readonly=True) as store:
        row = _run(store, resume)
    if not here:
        if row.held:
            raise in_use(row.name, row.claim, row.holder)
        yield
        return
    with Store.open(context.db) as store, store.claims.hold(row.id, "train"):
        yield


def _foreground(context: Context, resume: str | None, run_id: str | None, shown: _Shown) -> None:
    """Train in this process and report the result."""
    begun: list[str] = []
    with restarting(context, begun, as_json=shown.as_json), data_stdout():
        announce_loading()
        steps = context.config.train.steps
        with (
            Progress("train", steps, eta=False)
            if sys.stderr.isatty()
            else contextlib.nullcontext() as bar
        ):
            run = asyncio.run(_train(context, resume, run_id, shown, bar, begun))
        if shown.as_json:
            echo_jsonl(
                [
                    {
                        "type": "run",
                        "run": run.name,
                        "id": run.id,
                        "status": run.status,
                        "step": run.step,
                    }
                ]
            )
    if run.status == "stopped":
        _conclude(context.db, run.id)
        away = is_project(context) and not Path.cwd().resolve().is_relative_to(
            context.project.resolve()
        )
        again = (
            f"agentrl train --resume {run.name}"
            + f" --project {shlex.quote(str(context.project))}" * away
        )
        narrate(f"{run.name} stopped after step {run.step}: {run.error}. Resume it: {again}")
        if run.error in ("interrupted", AT_ONCE):
            raise typer.Exit(130)
        return
    _conclude(context.db, run.id)
    narrate(f"{run.name}: {run.status} at step {run.step}. Next: agentrl eval, agentrl replay best")


def _conclude(db: Path, run_id: str) -> None:
    """Print what a training came to, and how often each alert was raised."""
    from agentrl_cli.reports.verdict import verdict
    from agentrl_cli.store import Store

    with Store.open(db, readonly=True) as store:
        run = store.runs.get(run_id)
        sentences = verdict(store.runs.steps(run.id), run.name)
        alerts = [
            f"{alert['name']} {alert['count']}×" for alert in store.journal.folded_alerts(run.id)
        ]
    for sentence in sentences:
        narrate(sentence)
    if alerts:
        narrate(f"Alerts: {', '.join(alerts)}")


def _resumed(
    context: Context, name: str, sets: list[str] | None, flags: dict[str, Any]
) -> tuple[Context, str]:
    """Return the run's own settings, overridden by environment, --set and flags given now; and the run's name.

    Raises ConfigError if a setting of FIXED would change.
    """
    import dataclasses

    from agentrl_cli.config import Config, load_config
    from agentrl_cli.config.models import fixed_sections
    from agentrl_cli.paths import portable
    from agentrl_cli.store import Store

    with Store.open(context.db, readonly=True) as store:
        store.require_sound()  # before anything relies on it
        row = _run(store, name)
    settings, sources = load_config(
        (), sets or (), os.environ, flags, base=context.project, run=row.config
    )
    before, now = portable(row.config, (context.project,)), settings.model_dump(mode="json")
    default = Config().model_dump(mode="json")
    for key in (*FIXED, *fixed_sections()):
        was = before.get(key, default[key])
        if isinstance(was, dict):  # a setting that is newer than the run had its default
            was = {**default[key], **was}
        if was != now.get(key):
            raise ConfigError(
                f"A run cannot be resumed with other settings under `{key}`.",
                hint=f"Start a new run, or restore `{key}`.",
            )
    if row.status == "finished" and row.step >= settings.train.steps:
        more = f"agentrl train --resume {row.name} --steps {2 * row.step}"
        narrate(
            f"{row.name} has done its {row.step} steps: nothing left to do. Train further: {more}"
        )
        given = [
            *(sets or ()),
            *(f"{key}={value}" for key, value in flags.items() if value is not None),
        ]
        if given:
            narrate(f"Not applied, since no steps are left: {', '.join(given)}.")
        raise typer.Exit(0)
    return dataclasses.replace(context, config=settings, sources=sources), row.name


def _run(store: Any, name: str) -> RunRow:
    if name == "last":
        runs = [row for row in store.runs.all() if row.kind == "train"]
        if not runs:
            raise NotFound("No training to resume.", hint="`agentrl train` starts one.")
        newest: RunRow = max(runs, key=lambda row: row.started)
        return newest
    row: RunRow = store.runs.get(name)
    if row.kind != "train":
        raise ConfigError(f"{row.name} is a {row.kind}, not a training.")
    return row


async def _train(
    context: Context,
    resume: str | None,
    run_id: str | None,
    shown: _Shown,
    bar: Progress | None,
    begun: list[str],
) -> RunRow:
    from agentrl_cli.policies.protocols import require_trainable
    from agentrl_cli.runtime import run_training
    from agentrl_cli.store import Store

    config = context.config

    def begin(runtime: Runtime) -> RunRow:
        run = _row(runtime, context, resume, run_id)
        warn_unsafe(runtime.sandbox)
        engine = require_trainable(runtime.loaded.policy).describe()
        narrate(
            f"{run.name}: {runtime.loaded.name}, engine {engine},"
            f" {config.train.steps} steps, sandbox {_level(runtime)}, {context.db}"
        )
        if config.rollout.truncates or runtime.hooks.has("on_sample"):
            how = {
                "auto": "truncated importance sampling (tis)",
                "none": "nothing: algo.correction is none",
            }
            by = how.get(config.algo.correction, config.algo.correction)
            what = "Sampling is truncated (top_p, top_k, min_p, a penalty or bad tokens)"
            if not config.rollout.truncates:
                what = "A hook's on_sample may change the sampled token"
            warn(f"{what}: the loss is corrected by {by}.")
        begun.append(run.id)
        return run

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if shown.as_json:
            echo_jsonl([{"type": "step", "step": step, **metrics}])
        if bar is not None:
            bar.done = step - 1  # a resumed training begins further on
            bar.advance()

    try:
        given: dict[str, Any] = {
            "base": context.project,
            "db": context.db,
            "accept_changes": shown.wanted.accept,
        }
        return await run_training(config, begin, **given, narrate=narrate, on_step=on_step)
    except (
        asyncio.CancelledError
    ):  # a second Ctrl-C, or `stop now`: the row has it, and a resume continues from it
        if not begun:
            raise
        with Store.open(context.db, readonly=True) as store:
            return store.runs.get(begun[0])


def _row(runtime: Runtime, context: Context, resume: str | None, run_id: str | None) -> RunRow:
    from agentrl_cli.runtime import new_training
    from agentrl_cli.trainer.controls import keep_settings

    if resume is not None:
        row = _run(runtime.store, resume)
        for control in runtime.store.controls.take(row.id, "dropped"):
            narrate(f"{control.action} was requested before the run stopped: ignored now.")
        row = runtime.store.runs.add_folder(row)
        keep_settings(row, context.config, runtime.store)
        return row
    return new_training(runtime, run_id or "")


def _level(runtime: Runtime) -> str:
    return runtime.sandbox.level if runtime.sandbox is not None else "not needed"


def _own_process(context: Context, resume: str | None, *, watch: bool) -> None:
    """Start this command without --watch in a new session, then watch its run."""
    from agentrl_cli.types import new_id

    run_id = new_id()
    arguments = [a for a in sys.argv[1:] if a not in ("--watch", "--detach")]
    log = context.db.parent / "logs" / f"{run_id}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentrl_cli", *arguments, "--run-id", run_id],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    narrate("Starting the trainer in a separate process …")
    name = _wait_for_run(process, resume or run_id, context.db, log)
    if watch:
        from agentrl_cli.commands.watch import command as look

        look(
            name,
            plain=not is_terminal(),
            project=context.project if is_project(context) else None,
            db=context.db,
        )
        if _report_if_finished(context.db, name):
            return
    narrate(f"{name}: process {process.pid}. Watch it: agentrl watch {name}. Its log: {log}")


def _report_if_finished(db: Path, name: str) -> bool:
    """Reports how a watched run ended; False if it is still running. Raises RunFailed if it failed."""
    from agentrl_cli.store import Store

    with Store.open(db, readonly=True) as store:
        run = store.runs.get(name)
    if run.alive:
        return False
    if run.state in ("failed", "interrupted"):
        text = f"{name}: {run.state} at step {run.step}" + (f": {run.error}" if run.error else ".")
        raise RunFailed(text, hint=f"Resume it: agentrl train --resume {name}")
    _conclude(db, run.id)
    after = (
        "agentrl eval, agentrl replay best"
        if run.status == "finished"
        else f"agentrl train --resume {name}"
    )
    narrate(f"{name}: {run.state} at step {run.step}. Next: {after}")
    return True


def _wait_for_run(process: subprocess.Popen[bytes], wanted: str, db: Path, log: Path) -> str:
    """Return the run's name, once the new process holds it. Raises RunFailed, with the tail of its log, if it ends."""
    from agentrl_cli.store import Store

    began = time.time()
    while True:
        try:
            with Store.open(db, readonly=True) as store:
                row = store.runs.get(wanted)
            if row.pid == process.pid and (row.alive or row.ended >= began):
                return row.name
        except (NotFound, StoreError):
            pass  # missing or still being created; a lasting fault also ends the new process
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-6:])
            raise RunFailed(f"The training did not start:\n{tail}", hint=f"Its log: {log}")
        time.sleep(0.1)
