"""Reads Harbor task folders as rows: `task.toml`, `instruction.md`, `environment/`, `solution/`, `tests/test.sh`.

What `environment/Dockerfile` copies is in the episode's folder at its start. A task whose image installs something
needs that image: it is left out, by name.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl_cli.errors import DataError, NotFound
from agentrl_cli.rewards.script import placed

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
FREE = re.compile(r"(mkdir|cp|chmod|git (init|config|add|commit)|echo|touch)\b")
"""Commands of a Dockerfile that change nothing outside of the folder."""


def add(draft: Any, name: str) -> None:
    """Add the task in a folder, or those in the folders of a folder, to a new pack. Raises NotFound, DataError."""
    base = Path(name).expanduser()
    if not base.is_dir():
        raise NotFound(f"{base} is not a folder.", hint="agentrl init NAME --from harbor:FOLDER")
    found = (
        [base]
        if (base / "task.toml").is_file()
        else sorted(one.parent for one in base.glob("*/task.toml"))
    )
    rows, left = [], []
    for folder in found:
        why = needs_image(folder)
        left += [f"{folder.name} ({why})"] if why else []
        rows += [] if why else [row_of(folder)]
    if left:
        draft.notes.append(f"Left out, as they need their own image: {', '.join(left)}.")
    if not rows:
        raise DataError(f"{base} has no task that runs here. {' '.join(draft.notes)}")
    draft.rows, draft.answer, draft.system, draft.spec = rows, "", SYSTEM, SPEC
    draft.tools = draft.names = ["files", "bash"]
    draft.files["task.py"] = TASK.encode()
    draft.limits = {"max_turns": 12, "max_new_tokens": 192, "max_tokens": 4096}


def needs_image(folder: Path) -> str:
    """Return the first line of a Dockerfile that installs something; empty without one."""
    for line in _dockerfile(folder):
        if line.startswith("RUN ") and not all(
            FREE.match(part) for part in re.split(r"&&|;", line[4:].strip())
        ):
            return line[:60]
    return ""


def _dockerfile(folder: Path) -> list[str]:
    path = folder / "environment" / "Dockerfile"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [line.strip() for line in text.replace("\\\n", " ").splitlines()]


def row_of(folder: Path) -> dict[str, Any]:
    """Return a task folder as a row. Raises DataError for a file that is missing, or that is not text."""
    spec = tomllib.loads(_text(folder / "task.toml"))
    lines = _dockerfile(folder)
    root = next((line.split()[1] for line in lines if line.startswith("WORKDIR ")), "/app")
    files: dict[str, str] = {}
    for line in lines:
        if line.startswith(("COPY ", "ADD ")):
            source, target = line.split()[-2:]
            files |= _copied(
                folder / "environment" / source, PurePosixPath(root, target).relative_to(root)
            )
    setup = f"import os\nfor path, text in {files!r}.items():\n"
    setup += "    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)\n    open(path, 'w').write(text)\n"
    tests = _copied(folder / "tests", PurePosixPath())
    if "test.sh" not in tests:
        raise DataError(f"{folder} has no tests/test.sh.")
    solution = folder / "solution" / "solve.sh"
    return {
        "id": folder.name,
        "family": str(spec.get("metadata", {}).get("category", "")),
        "prompt": placed(_text(folder / "instruction.md"), ".", root).strip(),
        "setup": setup + "del path, text, os",
        "tests": tests,
        "root": root,
        "timeout": float(spec.get("verifier", {}).get("timeout_sec", 60)),
        "solution": _text(solution) if solution.is_file() else "true",
    }


def _copied(source: Path, target: PurePosixPath) -> dict[str, str]:
    """Return a file, or the files of a folder without its Dockerfile, by their path under `target`."""
    if source.is_file():
        return {
            str(target if target.suffix or not target.parts else target / source.name): _text(
                source
            )
        }
    inside = (
        path for path in sorted(source.rglob("*")) if path.is_file() and path.name != "Dockerfile"
    )
    return {str(target / path.relative_to(source).as_posix()): _text(path) for path in inside}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}") from error
