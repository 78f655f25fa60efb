"""`agentrl init`: copy a pack into a project folder that a user edits, or begin a new one."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl_cli.commands.common import (
    JsonOption,
    ModelOption,
    confirm,
    echo,
    echo_json,
    narrate,
    warn,
)
from agentrl_cli.commands.options import refuse_idle
from agentrl_cli.errors import ConfigError, NotFound, SandboxUnavailable, UsageError, writing
from agentrl_cli.paths import PROJECT_FILE, find_pack, is_bundled, pack_names, shipped_packs
from agentrl_cli.registry.plugins import offers

NOT_COPIED = {"__pycache__", ".pytest_cache", "runs", PROJECT_FILE, "bases.json"}
"""Files and folders of a pack (or of another project) that a new project does not start with."""

TOOL_MODEL = "tiny-tools"
"""The bundled model that calls tools it has never seen: the default of a user's own task."""
ALWAYS_WRITTEN = "model.name rollout.group_size train.steps train.lr train.eval.every seed".split()
"""Settings that agentrl.yaml shows even at their defaults, since people change them first."""

HEADER = """\
# Settings of this project; `agentrl config show` prints every one with where it came from.
# Later wins: defaults < task.yaml's `defaults` < this file < AGENTRL_TRAIN__LR=… < --set train.lr=… < flags.
"""

PackArgument = Annotated[
    str | None,
    typer.Argument(help="A pack by name or folder; see --list.", autocompletion=pack_names),
]
FolderArgument = Annotated[
    Path | None, typer.Argument(metavar="[DIR]", help="The new folder; default: ./PACK.")
]
ListOption = Annotated[bool, typer.Option("--list", help="List the packs that ship.")]
WeakOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Accept the isolation that this machine offers.")
]
BlankOption = Annotated[
    str | None,
    typer.Option(
        "--blank", metavar="NAME", help="A task of your own: a small working example to change."
    ),
]
FromOption = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="SOURCE",
        help="Make it from rows.jsonl (.csv …), tool.py, agent.py, openapi.json"
        + "".join(f", {name}:PACKAGE" for name in offers("programs"))
        + "".join(f", {name}:WHERE" for name in offers("sources"))
        + "; repeatable.",
    ),
]
PythonOption = Annotated[
    str,
    typer.Option(
        "--python",
        metavar="PATH",
        help="Interpreter that has the package of --from NAME:PACKAGE; default: this.",
    ),
]
LevelOption = Annotated[
    str | None,
    typer.Option("--min-level", help="Weakest sandbox to accept: docker, ns, landlock, bare."),
]


class NotAccepted(ConfigError):
    """Only weaker isolation than the pack's minimum works here, and it was not accepted."""


def command(
    pack: PackArgument = None,
    folder: FolderArgument = None,
    blank: BlankOption = None,
    sources: FromOption = None,
    python: PythonOption = "",
    list_packs: ListOption = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite existing files that differ.")
    ] = False,
    model: ModelOption = None,
    yes: WeakOption = False,
    min_level: LevelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a pack into a project folder: agentrl.yaml, task.py, data, a test. Then edit it.

    `--blank NAME` begins a task of your own; `NAME --from SOURCE` writes it from what you have: rows with answers,
    typed functions, a program that calls a model, an OpenAPI description, an MCP server.

    JSON: {"project": "code-task", "pack": "code-task", "files": ["agentrl.yaml", …], "next": ["cd code-task", …]};
    with --list: [{"name", "description"}].
    """
    if list_packs:
        return _list(as_json)
    refuse_idle("without --from", {"--python": python and not sources})
    notes: list[str] = []
    if blank is not None or sources:
        refuse_idle("with --blank or --from", {"--min-level": min_level})
        name = blank or pack
        if name is None:
            raise UsageError("The new task needs a name.", hint="agentrl init NAME --from SOURCE")
        target = (folder or (Path(pack) if blank and pack else Path(name))).expanduser()
        with tempfile.TemporaryDirectory() as place:
            name = Path(name).name
            model = model or TOOL_MODEL
            source, notes = _new_pack(target, name, sources or [], python, Path(place), model)
            files = _project_files(source, model, {})
    elif pack is None:
        hint = f"Packs: {', '.join(pack_names())}. Start: agentrl init code-task; your own: agentrl init --blank NAME"
        raise UsageError("No pack given.", hint=hint)
    else:
        from agentrl_cli.reports.reference import describe_bases

        source = find_pack(pack)
        name, target = source.name, (folder or Path(source.name)).expanduser()
        files = _project_files(source, model, _isolation(source, min_level, yes))
        notes = list(filter(None, [describe_bases(source, name, model or "tiny")]))
    _write(target, files, force)
    _report(target, name, [*files], as_json, notes)


def _new_pack(
    target: Path, name: str, sources: list[str], python: str, place: Path, model: str
) -> tuple[Path, list[str]]:
    """Write a pack for `target` under `place`; returns its folder, and notes for the user."""
    from agentrl_cli.commands.init.draft import Draft, build
    from agentrl_cli.commands.init.sources import add_source, blank, finish

    if not name.strip(".") or not name.isprintable():
        raise UsageError(
            f"{name!r} cannot be the name of a task.", hint="Take letters, digits and hyphens."
        )
    draft = Draft(name, target=target, model=model)
    for source in sources:
        add_source(draft, source, python)
    if not sources:
        blank(draft)
    finish(draft)
    (place / name).mkdir()
    build(draft, place / name)
    return place / name, draft.notes


def _project_files(source: Path, model: str | None, isolation: dict[str, str]) -> dict[Path, bytes]:
    """Return the files of a project made from a pack, by path relative to it."""
    paths = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    kept = (path for path in paths if NOT_COPIED.isdisjoint(path.parts))
    files = {path: (source / path).read_bytes() for path in kept}
    return files | {Path(PROJECT_FILE): _settings(source, model, isolation).encode()}


def _write(target: Path, files: dict[Path, bytes], force: bool) -> None:
    """Write a project. Raises UsageError before anything is written if a file exists with other content."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file.", hint="Name another folder: agentrl init PACK DIR")
    there = {name: target / name for name in files if (target / name).exists()}
    differ = [str(name) for name, path in there.items() if path.read_bytes() != files[name]]
    if differ and not force:
        shown = ", ".join(differ[:4]) + (" …" if len(differ) > 4 else "")
        raise UsageError(
            f"{target} already has these files, with other content: {shown}. Nothing was written.",
            hint="Name another folder (agentrl init PACK DIR), or overwrite them with --force.",
        )
    with writing(str(target)):
        for name, content in files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)


def _report(
    target: Path, pack: str, files: list[Path], as_json: bool, notes: Sequence[str] = ()
) -> None:
    following = [f"cd {shlex.quote(str(target))}", "agentrl check", "agentrl train --watch"]
    if any("data/train.jsonl" in note for note in notes):  # its only row is a placeholder
        following.insert(1, "$EDITOR data/train.jsonl")
    if as_json:
        shown = {"project": target, "pack": pack, "files": [*map(str, files)], "next": following}
        echo_json(shown | ({"notes": [*notes]} if notes else {}))
        return
    for name in files:
        narrate(f"  write {target / name}")
    for note in notes:
        warn(note)
    narrate(f"\n{target} is a project now. Next:")
    for line in following:
        echo(f"  {line}")


def _list(as_json: bool) -> None:
    from agentrl_cli.config.yamlfile import load_yaml

    heads = {name: load_yaml(folder / "task.yaml") for name, folder in shipped_packs().items()}
    rows = [{"name": n, "description": head.get("description", "")} for n, head in heads.items()]
    if as_json:
        return echo_json(rows)
    for row in rows:
        echo(f"{row['name']:12}  {row['description'].strip()}")


def _settings(source: Path, model: str | None, isolation: dict[str, str]) -> str:
    """Return the text of agentrl.yaml: the pack's defaults and the settings that people change first, with comments."""
    from agentrl_cli.config import load_config
    from agentrl_cli.config.show import get, non_defaults, to_yaml

    flags: dict[str, Any] = {**isolation, "task.packs": [str(source)]}
    if model is not None and is_bundled(model):
        flags["model.name"] = model  # instead of the pack's adapter, if it has one
    elif model is not None:
        # Real models: an adapter trains on a small GPU, and their turns are longer than the tiny model's.
        flags |= {"model.name": model, "adapter.enabled": True}
        flags |= {"rollout.max_new_tokens": 256, "rollout.max_tokens": 2048}
    config, sources = load_config(flags=flags)
    tree = config.model_dump(mode="json")
    settings = {key: get(tree, key) for key in ALWAYS_WRITTEN}
    settings |= non_defaults(config, sources) | {"task.packs": ["."]}
    own = Path(config.model.name)
    if own.is_relative_to(source):  # the pack's adapter, which is copied into the project
        settings["model.name"] = str(own.relative_to(source))
    return f"{HEADER}\n{to_yaml(settings)}"


def _isolation(source: Path, wanted: str | None, yes: bool) -> dict[str, str]:
    """Return the sandbox settings to write, empty if the defaults work here. A level weaker than the pack's minimum
    (default
    `ns`) needs an explicit yes."""
    from agentrl_cli.config import load_config
    from agentrl_cli.doctor.sandbox import sandbox_level
    from agentrl_cli.sandbox import STRENGTH

    if wanted is not None and wanted not in STRENGTH:
        raise NotFound.of("isolation level", wanted, STRENGTH)
    level, why, fix = sandbox_level()
    if level is None:
        raise SandboxUnavailable(f"No sandbox works here. {why}", hint=fix)
    least = load_config(flags={"task.packs": [str(source)]})[0].sandbox.min_level
    weak = STRENGTH[level] < STRENGTH[least]
    if STRENGTH[level] < STRENGTH["ns"]:
        warn(
            f"The model's code would run here with weaker isolation than namespaces: {level}. {why}"
        )
        warn(f"To get a stronger one: {fix}")
    if wanted is not None and STRENGTH[level] < STRENGTH[wanted]:
        if problem := _missing(wanted):
            warn(f"This project will not run code here: its minimum is {wanted}. {problem}")
        return {"sandbox.min_level": wanted}
    if wanted is None and weak and not confirm(f"Accept `{level}` for this project?", yes=yes):
        raise NotAccepted(
            f"Nothing was written: only the sandbox level {level} works here, which is weaker than {least}.",
            hint=f"{fix} Or accept it with --yes, or choose a level with --min-level.",
        )
    # Only the minimum is written, so that a stronger machine isolates better. `auto` never chooses `bare`.
    minimum = {"sandbox.min_level": wanted or level} if wanted or weak else {}
    return minimum | ({"sandbox.backend": "bare"} if level == "bare" else {})


def _missing(level: str) -> str:
    """Return why no sandbox of this level or stronger starts here; empty if one does, even if not the first choice."""
    import asyncio

    from agentrl_cli.config import SandboxConfig
    from agentrl_cli.doctor.sandbox import start

    try:
        asyncio.run(start(SandboxConfig.model_validate({"workers": 1, "min_level": level})))
    except SandboxUnavailable as problem:
        return problem.message
    return ""
