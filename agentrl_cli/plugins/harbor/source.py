"""Reads Harbor task folders as rows: `task.toml`, `instruction.md`, `environment/`, `solution/`, `tests/test.sh`.

What `environment/Dockerfile` copies and makes in its working folder is in the episode's folder at its start. A task
that needs an image of its own is left out, by name, and so is one that cannot be read or leads out of its folder.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl_cli.errors import DataError, NotFound
from agentrl_cli.rewards.script import place_folders

TASK = '''\
"""Tasks in Harbor's form: their own tests/test.sh is the reward, their own solution/solve.sh the solution."""

from agentrl_cli.rewards.script import passes, solve  # noqa: F401 - `agentrl check` runs solve

REWARDS = {"passes": passes}
'''
SPEC = {
    "rewards": {"passes": {"weight": 1.0, "primary": True}},
    "row": ["setup", "tests"],
    "sandbox": {"wall": 30},
}
SYSTEM = "You work in the current folder. Do the task with the tools, then stop."
FREE = re.compile(r"(mkdir|cp|chmod|git (init|config|add|commit)|echo|touch|cat|tee)\b")
"""Commands of a Dockerfile that install nothing."""
OUTSIDE = re.compile(r"(?<![\w./])/(?!dev/null)\w")
"""A path that is not in the working folder."""
PLAIN = re.compile(r"(^|[\s/])(python|debian|ubuntu)[\d.-]*([:@\s]|$)")
"""Base images that bring nothing which the sandbox lacks; another one is the task's own."""
IMAGE = ("ENV", "USER", "VOLUME", "SHELL", "ONBUILD")
"""Instructions of a Dockerfile that the sandbox does not follow."""
LARGEST = 2**20
"""Bytes of a file of a task."""
BROKEN = (DataError, ValueError, TypeError, LookupError, AttributeError)
"""Raised by a task that cannot be read."""


def add(draft: Any, name: str) -> None:
    """Add the task in a folder, or those in the folders of a folder, to a new pack. Raises NotFound, DataError."""
    base = Path(name).expanduser()
    if not base.is_dir():
        raise NotFound(f"{base} is not a folder.", hint="agentrl init NAME --from harbor:FOLDER")
    inside = sorted(one for one in base.glob("[!.]*") if one.is_dir())
    found = [base] if (base / "task.toml").is_file() or not inside else inside
    rows, left = [], []
    for folder in found:
        try:
            rows.append(row_of(folder))
        except BROKEN as error:
            left.append(f"{folder.name} ({str(error)[:200]})")
    if left:
        draft.notes.append(
            f"Left out, as they need their own image or cannot be read: {', '.join(left)}."
        )
    if not rows:
        raise DataError(f"{base} has no task that runs here. {' '.join(draft.notes)}")
    draft.rows, draft.answer, draft.system, draft.spec = rows, "", SYSTEM, SPEC
    draft.tools = draft.names = ["files", "bash"]
    draft.files["task.py"] = TASK.encode()
    draft.settings["rollout"] = {"max_turns": 12, "max_new_tokens": 192, "max_tokens": 4096}


def row_of(folder: Path) -> dict[str, Any]:
    """Return a task folder as a row. Raises DataError, ValueError and its like for one that cannot be used."""
    spec, place = tomllib.loads(_text(folder, "task.toml")), folder / "environment"
    wants = spec.get("environment", {})
    if wants.get("docker_image") or (place / "docker-compose.yaml").exists():
        raise DataError(str(wants.get("docker_image") or "docker-compose.yaml"))
    docker = place / "Dockerfile"
    text = _text(folder, "environment/Dockerfile") if docker.exists() else ""
    split = [line.strip().partition(" ") for line in text.replace("\\\n", " ").splitlines()]
    lines = [(word.upper(), rest) for word, _, rest in split]
    workdirs = [rest.strip() for word, rest in lines if word == "WORKDIR"]
    root = str(wants.get("workdir") or (workdirs or ["/app"])[0])
    tests = dict(_copy(folder, "tests", PurePosixPath()))
    if "test.sh" not in tests:
        raise DataError(f"{folder} has no tests/test.sh.")
    timeout = float(spec.get("verifier", {}).get("timeout_sec", 600))
    if not 0 < timeout < math.inf:
        raise DataError(f"timeout_sec = {timeout:g}")
    solution = folder / "solution" / "solve.sh"
    solved = {"solution": _text(folder, "solution/solve.sh")} if solution.exists() else {}
    return {
        "id": folder.name,
        "family": str(spec.get("metadata", {}).get("category", "")),
        "prompt": place_folders(_text(folder, "instruction.md"), ".", root).strip(),
        "setup": _setup(folder, lines, root),
        "tests": {path: text for path, (text, _) in tests.items()},
        "root": root,
        "timeout": timeout,
        **solved,
    }


def _setup(folder: Path, lines: list[tuple[str, str]], root: str) -> str:
    """Return code that makes what a Dockerfile makes in its working folder. Raises DataError if it does more."""
    files: dict[str, tuple[str, int]] = {}
    code = ""
    for word, rest in lines:
        whole, words = f"{word} {rest}"[:60], rest.split()
        if word in ("COPY", "ADD"):
            given = [one for one in words if not one.startswith("--")]
            given = json.loads(" ".join(given)) if given[:1] and given[0][0] == "[" else given
            *sources, last = given
            target = PurePosixPath(root, last)
            if (
                re.search("--(from|chmod)=", rest)
                or ".." in target.parts
                or not target.is_relative_to(root)
            ):
                raise DataError(whole)
            inside = target.relative_to(root)
            many = last.endswith("/") or not inside.parts or len(sources) > 1
            for source in sources:
                files |= _copy(folder, f"environment/{source.lstrip('/')}", inside, many=many)
        elif word == "RUN":
            command = place_folders(rest.strip(), ".", root)
            parts = re.split(r"&&|\|\|?|;", command)
            if OUTSIDE.search(command) or not all(FREE.match(part.strip()) for part in parts):
                raise DataError(whole)
            code += f"    subprocess.run({command!r}, shell=True, check=True)\n"
        elif (
            word in IMAGE
            or (word == "FROM" and not PLAIN.search(rest))
            or (word == "WORKDIR" and Path(root, rest.strip()) != Path(root))
        ):
            raise DataError(whole)
    return (
        f"def setup():\n    import os, subprocess\n    for path, (text, mode) in {files!r}.items():\n"
        "        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)\n"
        "        open(path, 'w').write(text)\n        os.chmod(path, mode)\n"
        f"{code}setup()\ndel setup"
    )


def _copy(
    folder: Path, source: str, target: PurePosixPath, *, many: bool = True
) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the files that COPY makes of a file, a pattern or a folder without its Dockerfile, with their modes."""
    found = sorted(folder.glob(source)) if re.search(r"[*?\[]", source) else [folder / source]
    for one in found:
        inside = sorted(one.rglob("*")) if one.is_dir() else [one]
        for path in inside:
            name = path.relative_to(one if one.is_dir() else one.parent).as_posix()
            if path.is_dir() or (one.is_dir() and name == "Dockerfile"):
                continue
            where = target / name if one.is_dir() or many else target
            text = _text(folder, str(path.relative_to(folder)))
            yield str(where), (text, path.stat().st_mode & 0o777)


def _text(folder: Path, name: str) -> str:
    """Return the text of a file of a task. Raises DataError, also for one outside of its folder."""
    path = folder / name
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{path} is not a file of the task.")
    if path.stat().st_size > LARGEST:
        raise DataError(f"{path} is larger than {LARGEST // 2**20} MiB.")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}") from error
