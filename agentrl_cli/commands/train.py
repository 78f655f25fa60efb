"""`agentrl train`: one run, in the foreground, or as a process of its own under the watch screen."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands.common import (
    ConfigOption,
    Context,
    DbOption,
    JsonOption,
    ModelOption,
    PackOption,
    ProjectOption,
    SeedOption,
    SetOption,
    data_stdout,
    echo_json,
    echo_jsonl,
    is_terminal,
    narrate,
    open_project,
    warn,
)
from agentrl_cli.errors import ConfigError, NotFound, RunFailed

if TYPE_CHECKING:
    from agentrl_cli.runtime import Runtime
    from agentrl_cli.store import RunRow

StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")]
RateOption = Annotated[float | None, typer.Option("--lr", min=0, help="Peak learning rate.")]
GroupOption = Annotated[int | None, typer.Option("--group", "-g", min=1, help="Attempts at each task.")]
LoraOption = Annotated[bool | None, typer.Option("--lora/--full", help="Train a LoRA adapter, or all weights.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Train in a process of its own and watch it.")]
DetachOption = Annotated[bool, typer.Option("--detach", help="Train in a process of its own and come back at once.")]
ResumeOption = Annotated[str | None, typer.Option("--resume", help='Go on with a run: its name, id, or "last".')]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Print settings, memory and time; train nothing.")]
IdOption = Annotated[str | None, typer.Option("--run-id", hidden=True, help="The id that the new run gets.")]

STARTUP = 90.0
"""Seconds that a process of its own may take until its run is in the store."""


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
    dry_run: DryOption = False,
    pack: PackOption = None,
    project: ProjectOption = None,
    db: DbOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    run_id: IdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on the local GPU or CPU. Ctrl-C finishes the step and saves, twice stops now; --resume goes on."""
    flags = {
        "train.steps": steps,
        "train.lr": lr,
        "model.name": model,
        "adapter.enabled": lora,
        "rollout.group_size": group,
        "seed": seed,
        "task.packs": pack or None,
    }
    context = open_project(project, db, config, sets, flags)
    if resume is not None:
        context = _resumed(context, resume, flags)
    if dry_run:
        from agentrl_cli.commands.dry import dry_run as dry

        dry(context, as_json=as_json)
        return
    if watch or detach:
        _own_process(watch=watch and is_terminal(), context=context)
        return
    with data_stdout():
        run = asyncio.run(_train(context, resume, run_id, as_json))
        if as_json:
            echo_json({"run": run.name, "id": run.id, "status": run.status, "step": run.step, "error": run.error})
    if run.status == "failed":
        raise RunFailed(run.error)
    if not as_json:
        narrate(f"{run.name}: {run.status} at step {run.step}. Next: agentrl eval, agentrl replay best")


def _resumed(context: Context, name: str, flags: dict[str, Any]) -> Context:
    """The context with the settings that the run was started with; flags given now still win."""
    import dataclasses

    from agentrl_cli.config import Config
    from agentrl_cli.store import Store

    with Store.open(context.db, readonly=True) as store:
        row = _run(store, name)
    if row.alive and row.pid != os.getpid():
        raise ConfigError(f"{row.name} is running (process {row.pid}).", hint=f"agentrl watch {row.name}")
    settings = Config.model_validate(dict(row.config))
    for key, value in flags.items():
        section, _, leaf = key.partition(".")
        if value is not None and leaf:
            setattr(getattr(settings, section), leaf, value)
    return dataclasses.replace(context, config=settings)


def _run(store: Any, name: str) -> RunRow:
    if name == "last":
        runs = [row for row in store.runs() if row.kind == "train"]
        if not runs:
            raise NotFound("There is no training to go on with.", hint="`agentrl train` starts one.")
        newest: RunRow = max(runs, key=lambda row: row.started)
        return newest
    row: RunRow = store.run(name)
    if row.kind != "train":
        raise ConfigError(f"{row.name} is a {row.kind}, not a training.")
    return row


async def _train(context: Context, resume: str | None, run_id: str | None, as_json: bool) -> RunRow:
    from agentrl_cli.runtime import open_runtime

    config = context.config
    async with open_runtime(config, base=context.project, db=context.db, trainable=True) as runtime:
        run = _row(runtime, context, resume, run_id)
        narrate(
            f"{run.name}: {runtime.loaded.name}, {config.train.steps} steps, sandbox {_level(runtime)}, {context.db}"
        )
        if config.rollout.top_p < 1 or config.rollout.top_k:
            warn("Sampling is truncated (top_p, top_k): the loss is corrected by truncated importance sampling.")
        from agentrl_cli.trainer import Trainer

        on_step = (lambda step, metrics: echo_jsonl([{"step": step, **metrics}])) if as_json else None
        trainer = Trainer(
            config,
            run,
            runtime.loaded,
            runtime.packs,
            runtime.store,
            sandbox=runtime.sandbox,
            hooks=runtime.hooks,
            narrate=narrate,
            on_step=on_step,
        )
        return await trainer.train()


def _row(runtime: Runtime, context: Context, resume: str | None, run_id: str | None) -> RunRow:
    from agentrl_cli.runtime import new_run

    if resume is not None:
        row = _run(runtime.store, resume)
        runtime.store.update_run(row.id, pid=os.getpid(), total_steps=context.config.train.steps)
        return row
    return new_run(
        context.config,
        runtime.store,
        kind="train",
        runs=context.runs,
        packs=list(runtime.packs),
        tokenizer=runtime.loaded.hash,
        id=run_id or "",
    )


def _level(runtime: Runtime) -> str:
    return runtime.sandbox.level if runtime.sandbox is not None else "not needed"


def _own_process(*, watch: bool, context: Context) -> None:
    """Start this very command without --watch in a session of its own, then look at its run."""
    from agentrl_cli.types import new_id

    run_id = new_id()
    arguments = [a for a in sys.argv[1:] if a not in ("--watch", "--detach")]
    log = context.runs / "logs" / f"{run_id}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentrl_cli", *arguments, "--run-id", run_id],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    name = _wait_for_run(process, run_id, context.db, log)
    if watch:
        from agentrl_cli.tui.app import watch as screen

        screen(context.db, name)
    narrate(f"{name} goes on in process {process.pid}. agentrl watch {name} looks at it; its log: {log}")


def _wait_for_run(process: subprocess.Popen[bytes], run_id: str, db: Path, log: Path) -> str:
    from agentrl_cli.store import Store

    deadline = time.monotonic() + STARTUP
    while time.monotonic() < deadline:
        if process.poll() not in (None, 0):
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-6:])
            raise RunFailed(f"The training did not start:\n{tail}", hint=f"Its log: {log}")
        if db.is_file():
            with Store.open(db, readonly=True) as store:
                try:
                    return store.run(run_id).name
                except NotFound:
                    pass
        time.sleep(0.1)
    raise RunFailed(f"The training did not come up in {STARTUP:g} s.", hint=f"Its log: {log}")
