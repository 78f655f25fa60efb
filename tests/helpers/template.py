"""Real chat templates, read from packages that ship them; pinned by version and hash, kept in a cache.

Without network and cache the tests that want them skip. Nothing of these packages is installed or run, but that pip
asks llama-cpp-python's build for its name and version.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

CACHE = Path.home() / ".cache" / "agentrl-tests"
SOURCES = {
    "trl": ("1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"),
    "axolotl": ("0.19.0", "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc"),
    "llama-cpp-python": ("0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"),
}
"""Package to the version and the SHA-256 of the file: two wheels, and a source archive that holds llama.cpp's."""


@cache
def templates_of(package: str) -> dict[str, str]:
    """Name to source of a package's templates; empty where it is not to be had."""
    version = SOURCES[package][0]
    kept = CACHE / f"{package}-{version}-templates.zip"
    if not kept.is_file():
        archive = _download(package)
        if archive is None:
            return {}
        _keep(archive, kept)
        if archive.suffix != ".whl":
            archive.unlink()  # the source archive is large
    with zipfile.ZipFile(kept) as found:
        return {name: found.read(name).decode() for name in found.namelist()}


def _download(package: str) -> Path | None:
    version, digest = SOURCES[package]
    kind = "--no-binary" if package == "llama-cpp-python" else "--only-binary"
    name = package.replace("-", "_")
    CACHE.mkdir(parents=True, exist_ok=True)
    if not any(CACHE.glob(f"{name}-{version}[-.]*")):
        command = [sys.executable, "-m", "pip", "download", f"{package}=={version}", "--no-deps", "-q"]
        command += [kind, package, "-d", str(CACHE), "--retries", "0", "--timeout", "5"]
        subprocess.run(command, capture_output=True, check=False)
    path = next(iter(CACHE.glob(f"{name}-{version}[-.]*")), None)
    assert path is None or hashlib.sha256(path.read_bytes()).hexdigest() == digest
    return path


def _keep(archive: Path, target: Path) -> None:
    """The templates alone, by their bare names."""
    found: dict[str, bytes] = {}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            found = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".jinja")}
    else:
        with tarfile.open(archive) as source:
            for member in source:
                if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                    file = source.extractfile(member)
                    assert file is not None
                    found[member.name] = file.read()
    beside = target.with_suffix(".part")
    with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as kept:
        for name, text in found.items():
            kept.writestr(Path(name).stem, text)
    beside.replace(target)
