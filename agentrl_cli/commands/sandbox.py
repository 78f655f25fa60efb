"""`agentrl sandbox`: runs a program in the sandbox, builds its image."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands.common import JsonOption, echo, echo_json, narrate, warn_unsafe
from agentrl_cli.commands.options import SettingsOptions
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
    as_json: JsonOption = False,
    *,
    where: SettingsOptions,
) -> None:
    """Run a program as the model's code is run: isolated, limited, without network."""
    import asyncio

    for option, names in (("--in", files_in or []), ("--out", files_out or [])):
        if len({Path(name).name for name in names}) < len(names):
            raise UsageError(f"Two files of {option} have one name: one would replace the other.")
    given = {file.name: _read(file) for file in files_in or []}
    try:
        code = sys.stdin.read() if str(file) == "-" else _read(file).decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} cannot be read: {error}.") from None
    flags = {"sandbox.backend": level, "sandbox.min_level": level} if level else None
    settings = where.open(flags, required=False).config.sandbox
    packages = [name.strip() for name in imports.split(",") if name.strip()]
    result, made = asyncio.run(_run(settings, code, bash, wall, packages, given, files_out or []))
    if as_json:
        echo_json({**dataclasses.asdict(result), "text": result.text()})
    else:
        echo(result.text())
        narrate(f"{result.status} in {result.seconds:.3f} s at level {result.level}")
    for name, data in made.items():
        if isinstance(data, bytes):
            _save(Path(name), data)
    for problem in made.values():
        if isinstance(problem, UsageError):
            raise problem
    if not result.ok:
        raise typer.Exit(1)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from None


def _save(file: Path, data: bytes) -> None:
    """Write a file from the sandbox into the current folder, never through a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(file.name, flags, 0o644), "wb") as out:
            out.write(data)
    except OSError as error:
        raise UsageError(f"{file.name} cannot be written: {error.strerror}.") from None
    narrate(f"wrote {file.name}, {len(data)} bytes")


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
