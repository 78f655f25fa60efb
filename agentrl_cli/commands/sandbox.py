"""`agentrl sandbox`: runs a program in the sandbox, builds its image."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands.common import (
    ConfigOption,
    JsonOption,
    ProjectOption,
    SetOption,
    echo,
    echo_json,
    narrate,
    open_project,
    warn_unsafe,
)
from agentrl_cli.errors import UsageError

if TYPE_CHECKING:
    from agentrl_cli.config import SandboxConfig

app = typer.Typer(
    help="Which isolation this machine offers, and whether it holds.", no_args_is_help=True
)

LevelOption = Annotated[
    str | None,
    typer.Option("--level", help="ns, docker, landlock or bare; default: the project's setting."),
]


@app.command()
def run(
    file: Annotated[
        Path, typer.Argument(help="A Python program, or a shell script with --bash; - reads stdin.")
    ],
    bash: Annotated[bool, typer.Option("--bash", help="Run it as a shell script.")] = False,
    level: LevelOption = None,
    wall: Annotated[float | None, typer.Option(min=0.01, help="Time limit in seconds.")] = None,
    imports: Annotated[str, typer.Option(help="Packages to import ahead of time: numpy,…")] = "",
    files_in: Annotated[
        list[Path] | None, typer.Option("--in", help="A file to put beside it; repeatable.")
    ] = None,
    files_out: Annotated[
        list[str] | None,
        typer.Option("--out", help="A file that the program writes, to copy here; repeatable."),
    ] = None,
    project: ProjectOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a program as the model's code is run: isolated, limited, without network."""
    import dataclasses
    import sys

    given = {file.name: _bytes(file) for file in files_in or []}
    code = sys.stdin.read() if str(file) == "-" else _text(file)
    settings = _settings(project, config, sets, level)
    names = [name.strip() for name in imports.split(",") if name.strip()]
    result, made = asyncio.run(_run(settings, code, bash, wall, names, given, files_out or []))
    if as_json:
        echo_json({**dataclasses.asdict(result), "text": result.text()})
    else:
        echo(result.text())
        narrate(f"{result.status} in {result.seconds:.3f} s at level {result.level}")
    missing = [problem for problem in made.values() if isinstance(problem, UsageError)]
    for name, data in made.items():
        if isinstance(data, bytes):
            _save(Path(name), data)
    if missing:
        raise missing[0]
    if not result.ok:
        raise typer.Exit(1)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} cannot be read: {error}.") from None


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from None


def _save(file: Path, data: bytes) -> None:
    """Writes a file from the sandbox into the current folder, never through a link."""
    import os

    try:
        with open(
            os.open(file.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644), "wb"
        ) as out:
            out.write(data)
    except OSError as error:
        raise UsageError(f"{file.name} cannot be written: {error.strerror}.") from None
    narrate(f"wrote {file.name}, {len(data)} bytes")


def _settings(project: Path | None, config: Any, sets: Any, level: str | None) -> SandboxConfig:
    """Return the project's sandbox section, or the defaults outside a project; `level` forces that level."""
    flags = {"sandbox.backend": level, "sandbox.min_level": level} if level else None
    context = open_project(project, config=config, sets=sets, flags=flags, required=False)
    return context.config.sandbox


async def _run(
    settings: SandboxConfig,
    code: str,
    bash: bool,
    wall: float | None,
    imports: list[str],
    given: dict[str, bytes],
    wanted: list[str],
) -> tuple[Any, dict[str, bytes | UsageError]]:
    """Return the result, and for each requested file its content or the error."""
    from agentrl_cli.sandbox import Sandbox
    from agentrl_cli.sandbox.results import package_names

    async with await Sandbox.open(settings) as sandbox:
        warn_unsafe(sandbox)
        session = await sandbox.session(imports=package_names(imports, "--imports"))
        for name, data in given.items():
            await session.write(name, data)
        result = await (session.bash(code, wall=wall) if bash else session.run(code, wall=wall))
        made: dict[str, bytes | UsageError] = {}
        for name in wanted:
            try:
                made[name] = await session.read(name)
            except UsageError as problem:
                made[name] = problem
        return result, made


@app.command("build-image")
def build_image(
    packages: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="A package that programs may import, e.g. numpy; repeatable."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build the image for level docker from the running Python, in seconds and without a registry. Prints its tag.

    JSON: {"image": "agentrl-sandbox:0123456789abcdef", "made": true}
    """
    from agentrl_cli.sandbox import container, image

    api = container.connect()
    try:
        made = not image.exists(api, image.tag(sorted(packages or [])))
        name = image.build(api, sorted(packages or []), narrate)
    finally:
        api.close()
    if as_json:
        echo_json({"image": name, "made": made})
    else:
        echo(name)
