"""Paths: the packs and the sandbox runner, the bundled model, the project, its runs and its store.

A wheel carries `tasks/` and `sandbox/` of the checkout as `agentrl_cli/_data/…`; a checkout (and so an editable
install) has them beside the package. The packaged folder is used only beside this file: hatchling leaves a stale copy
in site-packages of an editable install, which must be ignored.

Nothing is created at import, and nothing here creates a folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl_cli.errors import ConfigError, EnvironmentProblem, NotFound

PROJECT_FILE = "agentrl.yaml"
"""The file that makes a folder a project."""

_PACKAGE = Path(__file__).resolve().parent


def packs_dir() -> Path:
    """Return the folder of the packs (`code-task`, `calc-task` …)."""
    return _find_shipped("tasks")


def sandbox_dir() -> Path:
    """Return the folder of the code that runs inside the sandbox (`main.py`, `Dockerfile`)."""
    return _find_shipped("sandbox")


def state_dir() -> Path:
    """Return the user's folder for what programs remember, by the XDG base directory specification."""
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given else Path.home() / ".local/state") / "agentrl"


def models_dir() -> Path:
    """Return the folder of the bundled models."""
    return _PACKAGE / "models"


def cache_dir() -> Path:
    """Return the folder of files that can be fetched or made again: environments, converted models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"


def models_cache() -> Path:
    """Return the folder of models that were fetched or converted; `model.name` may be the name of one."""
    return cache_dir() / "models"


def bundled_model(name: str = "tiny") -> Path:
    """Return the folder of a bundled model: `tiny`, which is tiny-agent, or the name of one. It need not exist."""
    return models_dir() / ("tiny-agent" if name == "tiny" else name)


def is_bundled(name: str) -> bool:
    """Whether a bundled model has this name."""
    return (
        name.isprintable()
        and Path(name).name == name
        and (bundled_model(name) / "config.json").is_file()
    )


def shipped_packs() -> dict[str, Path]:
    """Return the folders of the packs that ship by their names: those of `tasks/`, and of a plugin's `tasks/`."""
    folders = (packs_dir(), *_PACKAGE.glob("plugins/*/tasks"))
    found = (path.parent for folder in folders for path in folder.glob("*/task.yaml"))
    return {folder.name: folder for folder in sorted(found, key=lambda folder: folder.name)}


def list_places(name: str, base: Path) -> tuple[Path, Path]:
    """Return where a path written by a user may lie: in `base`, and in the working folder."""
    path = Path(os.path.expanduser(name))  # that of Path raises for the ~NAME of an unknown user
    return base / path, path


def pack_path(name: str, base: Path | None = None) -> Path | None:
    """Return the folder of a pack by its name, or by a path relative to `base` (default: the working folder).

    None without such a folder with a `task.yaml`.
    """
    if shipped := shipped_packs().get(name):
        return shipped
    given = (base or Path.cwd()) / Path(name).expanduser()
    return given.resolve() if (given / "task.yaml").is_file() else None


def find_pack(name: str, base: Path | None = None) -> Path:
    """Return the folder of a pack, as in `pack_path`. Raises NotFound, for a path with the missing file or folder."""
    found = pack_path(name, base)
    if found is not None:
        return found
    given = (base or Path.cwd()) / Path(name).expanduser()
    hint = "`agentrl init --list` lists the built-in packs; any folder with a task.yaml is a pack."
    if given.is_dir():
        raise NotFound(f"{given.resolve()} has no task.yaml, so it is not a pack.", hint=hint)
    if "/" in name or name.startswith("."):
        raise NotFound(f"The pack folder {given} does not exist.", hint=hint)
    raise NotFound.of("pack", name, pack_names(), hint=hint)


def pack_names() -> list[str]:
    """Return the names of the packs that ship, sorted."""
    return list(shipped_packs())


def find_project(start: Path | None = None, override: Path | None = None) -> Path | None:
    """Return the project folder: `override`, or the nearest folder with an agentrl.yaml from `start` (default: here)
    upwards.

    Raises ConfigError if `override` is given and is not a project.
    """
    if override is not None:
        folder = override.expanduser().resolve()
        if folder.name == PROJECT_FILE:
            folder = folder.parent
        if not (folder / PROJECT_FILE).is_file():
            raise ConfigError(
                f"{override} is not a project: it has no {PROJECT_FILE}.",
                hint=f"`agentrl init code-task {override}` makes one.",
            )
        return folder
    here = (start or Path.cwd()).resolve()
    return next(
        (folder for folder in (here, *here.parents) if (folder / PROJECT_FILE).is_file()), None
    )


def runs_dir(project: Path | None) -> Path:
    """Return the folder of the runs: `runs/` of the project, or of the working folder without a project."""
    return (project or Path.cwd()) / "runs"


def default_db(project: Path | None) -> Path:
    """Return the store of a project, unless `--db`, AGENTRL_DB or `store.path` names another."""
    return runs_dir(project) / "agentrl.db"


@contextmanager
def utf8_name(folder: Path) -> Iterator[Path]:
    """Yield a folder under a name that is UTF-8, for libraries that open no other (safetensors, tokenizers)."""
    if os.fsencode(folder).decode("utf-8", "replace") == str(folder):
        yield folder
        return
    import tempfile  # not for every command

    with tempfile.TemporaryDirectory(prefix="agentrl-name-") as place:
        link = Path(place, "folder")
        link.symlink_to(os.path.abspath(folder))
        yield link


def portable(value: Any, projects: Sequence[Path]) -> Any:
    """Return a setting with every path inside one of these project folders made relative to it; also in lists and
    mappings.

    Relative paths stay valid after the project is moved or copied.
    """
    if isinstance(value, Mapping):
        return {key: portable(inner, projects) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(inner, projects) for inner in value]
    if not isinstance(value, str) or not value.startswith(("/", "~/")):
        return value
    path = str(Path(value).expanduser()) if value.startswith("~") else value
    for folder in projects:
        for root in dict.fromkeys((str(folder), str(folder.resolve()))):
            if path.rstrip("/") == root:
                return "."
            if path.startswith(f"{root}/"):
                return f"./{path[len(root) + 1 :]}"
    return value


def _find_shipped(name: str) -> Path:
    packaged = _PACKAGE / "_data" / name
    folder = packaged if packaged.is_dir() else _PACKAGE.parent / name
    if not folder.is_dir():
        raise EnvironmentProblem(
            f"The installation is incomplete: the folder {name}/ is missing.",
            hint="Install again: pip install --force-reinstall agentrl-cli",
        )
    return folder
