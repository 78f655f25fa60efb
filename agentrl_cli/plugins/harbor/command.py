"""`agentrl harbor`: tasks of packs as Harbor folders, for packs that a script in `tests` grades (rewards/script.py)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands.common import PackOption, ProjectOption, echo, open_project, packs_of
from agentrl_cli.commands.options import ForceOption
from agentrl_cli.errors import DataError, UsageError

if TYPE_CHECKING:
    from agentrl_cli.config import SandboxConfig
    from agentrl_cli.tasks import Pack
    from agentrl_cli.types import Task


def command(
    out: Annotated[Path, typer.Argument(help="The folder that gets a folder for each task.")],
    pack: PackOption = None,
    split: Annotated[str, typer.Option(help="The split of the tasks.")] = "train",
    count: Annotated[
        int | None, typer.Option("--tasks", "-n", min=1, help="At most so many.")
    ] = None,
    force: ForceOption = False,
    project: ProjectOption = None,
) -> None:
    """Write tasks as Harbor folders: task.toml, instruction.md, environment/, solution/, tests/.

    The files of environment/ are those that a task's set-up makes in the sandbox. Prints the folders, which
    `agentrl init NAME --from harbor:FOLDER` reads.
    """
    context = open_project(project, required=False)
    packs = packs_of(context, pack)
    if not packs:
        raise UsageError(
            "No pack is named.", hint=f"agentrl harbor {quote(str(out))} --pack swe-task"
        )
    for one in packs.values():
        tasks = one.tasks(split, limit=count)
        if not all("test.sh" in (task.data.get("tests") or ()) for task in tasks):
            raise DataError(
                f"The pack {one.name} is not graded by a script tests/test.sh, which Harbor runs.",
                hint="docs/formats.md#harbor: rewards/script.py grades by one, as in swe-task.",
            )
        folders = [
            out.expanduser() / f"{one.name}-{task.split}-{number:04d}"
            for number, task in enumerate(tasks)
        ]
        if (old := next((path for path in folders if path.exists()), None)) and not force:
            raise UsageError(f"{old} exists already.", hint="--force overwrites its files.")
        asyncio.run(_write(one, tasks, context.config.sandbox, folders))
        echo("\n".join(map(str, folders)))


async def _write(
    pack: Pack, tasks: list[Task], settings: SandboxConfig, folders: list[Path]
) -> None:
    """Write the tasks of a pack. Raises DataError if the set-up code of one fails."""
    from agentrl_cli.sandbox import Sandbox

    async with await Sandbox.open(settings) as sandbox:
        for folder, task in zip(folders, tasks, strict=True):
            opening = pack.open_session(sandbox, 0)
            assert opening is not None
            session = await opening()
            try:
                done = await session.cell(str(task.data.get("setup") or ""))
                if not done.ok:
                    raise DataError(f"The set-up code of {task.id} failed: {done.text()[:300]}")
                listed = await session.list()
                if listed.more:
                    raise DataError(
                        f"The set-up code of {task.id} makes more than {len(listed)} files and folders."
                    )
                paths = {entry.path: entry.kind for entry in listed}
                files = {path: await session.read(path) for path in paths if paths[path] == "file"}
                runs = await session.bash("find . -type f -perm -u+x -exec printf '%s\\0' {} +")
            finally:
                await session.close()
            filled = {path.rpartition("/")[0] for path in paths}
            empty = [path for path in paths if paths[path] == "folder" and path not in filled]
            _put(folder, task, files, {"mkdir -p": empty, "chmod +x": runs.stdout.split("\0")[:-1]})


def _put(folder: Path, task: Task, files: dict[str, bytes], made: dict[str, list[str]]) -> None:
    """Write a task; `made`: a command of its Dockerfile to the paths that it gets."""
    from agentrl_cli.types.content import content_text

    row: dict[str, Any] = dict(task.data)
    root, said = str(row.get("root") or "/app"), content_text(task.prompt[-1]["content"])
    toml = f'version = "1.0"\n\n[metadata]\ncategory = {json.dumps(task.family, ensure_ascii=False)}\n\n'
    toml += f"[verifier]\ntimeout_sec = {float(row.get('timeout') or 60.0)}\n"
    dockerfile = f"FROM python:3.12-slim\nWORKDIR {root}\n" + f"COPY files {root}\n" * bool(files)
    lines = (f"RUN {word} {' '.join(map(quote, paths))}\n" for word, paths in made.items() if paths)
    dockerfile += "".join(lines)
    texts = {
        "task.toml": toml,
        "instruction.md": f"{said.strip()}\n",
        "environment/Dockerfile": dockerfile,
        **{f"tests/{path}": text for path, text in row["tests"].items()},
    }
    if row.get("solution"):
        texts["solution/solve.sh"] = row["solution"]
    every = {path: text.encode() for path, text in texts.items()}
    for path, data in {
        **every,
        **{f"environment/files/{path}": one for path, one in files.items()},
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
