"""`agentrl doctor`: checks this machine, audits a chat template, or tests a model with tools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ModelOption,
    ProjectOption,
    SetOption,
    echo,
    echo_json,
    is_terminal,
    narrate,
    open_project,
    warn,
)
from agentrl_cli.commands.options import refuse_idle
from agentrl_cli.commands.place import find_db
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.registry import resolve
from agentrl_cli.tui.common.plain_text import harmless

if TYPE_CHECKING:
    from agentrl_cli.chat.audit import AuditReport
    from agentrl_cli.config import Config
    from agentrl_cli.doctor import Check

TemplateOption = Annotated[
    Path | None,
    typer.Option("--template", metavar="FOLDER", help="Audit the chat template of a model folder."),
]
SandboxOption = Annotated[
    bool,
    typer.Option(
        "--sandbox", help="Attack the sandbox and show what it guarantees here (some seconds)."
    ),
]
LevelOption = Annotated[
    str | None,
    typer.Option(
        "--level", help="With --sandbox: ns, docker or landlock; default: the strongest here."
    ),
]
ClusterOption = Annotated[
    bool,
    typer.Option("--cluster", help="Start the project's workers, compare them, send each a job."),
]
GpuOption = Annotated[
    bool,
    typer.Option(
        "--gpu",
        help="Sample and update on the GPU for a minute, beside transformers; keep the result.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="With --gpu: a device of torch (cuda:1, cpu); default: the first GPU."
    ),
]
SecondsOption = Annotated[
    float | None,
    typer.Option("--seconds", min=0, help="With --gpu: seconds of sampling; default: 20."),
]
MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}
WIDTH = 18
"""Width of the longest ability's name."""
COLOURS = {"ok": "32", "warn": "33", "fail": "31"}


def command(
    template: TemplateOption = None,
    sandbox: SandboxOption = False,
    level: LevelOption = None,
    model: ModelOption = None,
    cluster: ClusterOption = False,
    gpu: GpuOption = False,
    device: DeviceOption = None,
    seconds: SecondsOption = None,
    project: ProjectOption = None,
    db: DbOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check Python, torch, GPU, disk, sandbox, model and store. Exit 3 if something will not work.

    JSON: [{"name": "sandbox", "status": "ok|warn|fail", "detail": "ns", "fix": ""}];
    with --sandbox: the same for each guarantee;
    with --model: the same for what a task with tools asks of a model (30 s), and last for whether RL can begin;
    with --cluster: the same for every worker, versions, code, clocks and the store;
    with --gpu: the same for each engine and way of updating, which training then obeys;
    with --template: {"append_only", "append_only_without", "stop_token_trained", "thinking_by_design", "problems": [],
    "would_skip": []}
    """
    refuse_idle("without --sandbox", {"--level": level and not sandbox})
    with_gpu = {"--device": device, "--seconds": seconds is not None}
    refuse_idle("without --gpu", {} if gpu else with_gpu)
    ways = {"--template": template, "--gpu": gpu, "--model": model, "--cluster": cluster}
    way, *others = [name for name, value in {**ways, "--sandbox": sandbox}.items() if value] or [""]
    fixed = way in ("--template", "--gpu", "--sandbox")
    refuse_idle(f"with {way}", {**dict.fromkeys(others, True), "--set": fixed and sets})
    if template is not None:
        _audit(template, as_json)
        return
    store = find_db(project, db, must_exist=False)
    if gpu:
        checks = _device(device, seconds)
    elif model is not None:
        checks = _model(model, project, store, sets)
    elif cluster:
        checks = _workers(project, store, sets)
    elif sandbox:
        checks = _guarantees(level)
    else:
        checks = _machine(project, store, sets)
    _report(checks, WIDTH if model or cluster or gpu else 10, as_json)


def _report(checks: Iterable[Check], width: int, as_json: bool) -> None:
    """Print each check as it ends, or all as JSON; exit with 3 if one failed."""
    found = []
    for check in checks:
        found.append(check)
        if not as_json:
            text = f"{check.name:{width}} {harmless(check.detail)}"
            echo(f"{_mark(check.status)} {text}", painted=True)
            if check.fix:
                echo(f"  {'':10} → {check.fix}")
    if as_json:
        echo_json(found)
    if any(check.status == "fail" for check in found):
        raise typer.Exit(3)


def _machine(project: Path | None, db: Path, sets: list[str] | None) -> Iterable[Check]:
    """Return the machine's checks with the project's settings: the defaults without one, or if they are invalid."""
    from agentrl_cli.doctor.machine import check_machine

    config: Config | None = None
    base: Path | None = None
    try:
        context = open_project(project, sets=sets, required=False)
        config, base = context.config, context.project
    except ConfigError as problem:
        if sets:
            raise
        warn(f"{problem.message} Using the default settings.")
    return check_machine(db, config, base)


def _device(device: str | None, seconds: float | None) -> Iterable[Check]:
    from agentrl_cli.doctor.device import check_device

    narrate("sampling and updating a small model, beside transformers: about a minute")
    return check_device(device, seconds)


def _model(model: str, project: Path | None, db: Path, sets: list[str] | None) -> Iterable[Check]:
    from agentrl_cli.doctor.model import check_abilities
    from agentrl_cli.policies.load import load_policy
    from agentrl_cli.store import Store

    context = open_project(project, sets=sets, required=False)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store.open(db, readonly=True)) if db.is_file() else None
        loaded = load_policy(model, context.config, base=context.project, store=store)
    narrate(f"sampling from {loaded.name} for at most 30 seconds")
    return check_abilities(loaded, context.config)


def _workers(project: Path | None, db: Path, sets: list[str] | None) -> Iterable[Check]:
    """Check the workers that the project's configuration asks for, started as a run starts them."""
    import asyncio

    from agentrl_cli.doctor import Check

    context = open_project(project, sets=sets)
    check = resolve("doctors", {}, "cluster")
    found = asyncio.run(check(context.config, context.project, db, narrate))
    return [Check(*one) for one in found]


def _guarantees(level: str | None) -> Iterable[Check]:
    from agentrl_cli.doctor.sandbox import check_guarantees
    from agentrl_cli.sandbox import STRENGTH

    if level is not None and level not in STRENGTH:
        raise NotFound.of("isolation level", level, STRENGTH)
    narrate("running the self-test's hostile programs; they target canaries only")
    held, checks = check_guarantees(level)
    narrate(f"level {held}")
    return checks


def _audit(folder: Path, as_json: bool) -> None:
    from agentrl_cli.config import Config
    from agentrl_cli.doctor.model import audit_template

    if not folder.is_dir():
        from agentrl_cli.models.load import model_folder

        folder = model_folder(str(folder), Config().model, base=Path.cwd())
    report = audit_template(folder)
    if as_json:
        echo_json(report)
    else:
        _print_audit(report)
    if not report.append_only and not report.append_only_without:
        raise typer.Exit(1)


def _print_audit(report: AuditReport) -> None:
    without, skipped = report.append_only_without, report.would_skip
    stop = report.stop_token_trained
    shown = f"only without {without}" if without else report.append_only
    rows = [
        ("ok" if report.append_only else "warn" if without else "fail", f"turns can be appended: {shown}"),
        ("ok" if stop else "warn", f"the stop token is trained: {stop}"),
        ("ok", f"earlier thinking is dropped by design: {report.thinking_by_design}"),
        ("warn" if skipped else "ok", f"text, thinking and mistakes around a call are trained: {not skipped}"),
    ]  # fmt: skip
    for status, text in rows:
        echo(f"{_mark(status)} {text}", painted=True)
    for text in (*report.distinct, *report.notes, *skipped):
        echo(f"  {text}")
    if not report.append_only:
        when = f"packs that have {without}" if without else "it"
        echo(
            f"  train refuses {when}; --set model.chat.append_only=true trains the appended rendering as it is"
        )


def _mark(status: str) -> str:
    mark = MARKS[status]
    return f"\x1b[{COLOURS[status]}m{mark}\x1b[0m" if is_terminal() else mark
