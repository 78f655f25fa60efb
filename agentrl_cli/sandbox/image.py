"""The Docker image: made from the running Python by `tar` and `docker import`, without a registry or a Dockerfile.

The tag is a hash of the interpreter, the guest and the packages. The same inputs give the same tag.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentrl_cli.errors import SandboxUnavailable
from agentrl_cli.paths import sandbox_dir
from agentrl_cli.registry.files import PIP
from agentrl_cli.sandbox.launch import INSIDE, PACKAGES, Launch, package_folders

REPOSITORY = "agentrl-sandbox"
_FORMAT = "2"
_PROGRAMS = (
    "bash sh awk basename cat chmod cp cut date dd diff dirname du echo env expr false file find fold grep gzip "
    "head id join ln ls mkdir mkfifo mknod mktemp mv nl od paste printf pwd readlink realpath rm rmdir sed seq "
    "setsid sha256sum sleep sort split stat su tac tail tar tee test timeout touch tr true truncate tsort uname "
    "uniq wc which xargs yes"
).split()
_SKIPPED = {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages",
            "dist-packages", "__pycache__"}  # fmt: skip
"""Folders of the standard library that are left out."""


def tag(imports: Sequence[str] = ()) -> str:
    """Return the name of the image for a set of packages. Raises MissingDependency if one is not installed."""
    digest = hashlib.sha256()
    for part in (_FORMAT, sys.version, platform.machine(), *_versions(imports)):
        digest.update(part.encode() + b"\0")
    digest.update(_runner())
    return f"{REPOSITORY}:{digest.hexdigest()[:16]}"


@cache
def _runner() -> bytes:
    """Return a hash of the guest's own files."""
    digest = hashlib.sha256()
    for inside, path in _own_files().items():
        digest.update(inside.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def _own_files() -> dict[str, Path]:
    """Return the guest's own files, by their path inside the image."""
    folder = Path(sandbox_dir())
    found = {f"{INSIDE}/{path.relative_to(folder)}": path for path in sorted(folder.rglob("*.py"))}
    return found | {f"/etc/{name}": folder / "etc" / name for name in ("group", "passwd")}


def _versions(imports: Sequence[str]) -> Iterator[str]:
    for name in sorted(imports):
        try:
            yield f"{name}=={version(name)}"
        except PackageNotFoundError:
            yield f"{name} in {package_folders([name])[0]}"


def build(
    api: Any, imports: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> str:
    """Makes the image if it is absent, in a few seconds; returns its tag.

    `api`: a docker.APIClient. Raises SandboxUnavailable on anything but Linux, whose Python would not run in a
    container.
    """
    name = tag(imports)
    if exists(api, name):
        return name
    if sys.platform != "linux":
        raise SandboxUnavailable(
            "The image is made from the running Python, which has to be one for Linux.",
            hint=f"Elsewhere: {docker_command(imports)}",
        )
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            _fill(tar, imports)
        file.flush()
        say(f"importing {os.path.getsize(file.name) / 1e6:.0f} MB as {name}")
        repository, _, label = name.partition(":")
        api.import_image_from_file(file.name, repository=repository, tag=label)
    if not imports:
        api.tag(name, REPOSITORY, "latest")
    return name


def docker_command(imports: Sequence[str] = ()) -> str:
    """Return the command that makes the image from a registry's Python, with the packages of its tag."""
    names = " ".join(PIP.get(name, name) for name in sorted(imports))
    packages = ["--build-arg", f"PACKAGES={names}"] if names else []
    return shlex.join(["docker", "build", "-t", tag(imports), *packages, str(sandbox_dir())])


def exists(api: Any, name: str) -> bool:
    """Whether the engine has an image."""
    from docker.errors import ImageNotFound

    try:
        api.inspect_image(name)
    except ImageNotFound:
        return False
    return True


def _fill(tar: tarfile.TarFile, imports: Sequence[str]) -> None:
    """Writes the file system: interpreter, standard library, a few programs, their libraries, packages, the runner."""
    launch = Launch("docker", tuple(imports))
    files: dict[str, Path] = {}
    number = f"python{sys.version_info.major}.{sys.version_info.minor}"
    files[f"/usr/local/bin/{number}"] = Path(launch.python)
    files |= _tree(Path(sysconfig.get_path("stdlib")), f"/usr/local/lib/{number}", _SKIPPED)
    for folder in package_folders(imports):
        files |= _tree(folder, f"{PACKAGES}/{folder.name}", {"__pycache__"})
    for name in _PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        if found:
            files[f"/usr/bin/{name}"] = Path(os.path.realpath(found))
    files |= _libraries(
        [path for path in files.values() if path.suffix != ".py" and _is_elf(path)], launch.prefix
    )
    files |= _own_files()
    _write(tar, files)
    for link, target in {
        "bin": "usr/bin", "usr/local/bin/python3": number, "usr/local/bin/python": number,
        "usr/bin/python3": f"/usr/local/bin/{number}", "tmp": "proc/self/cwd/.tmp",
    }.items():  # fmt: skip
        entry = tarfile.TarInfo(link)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        tar.addfile(entry)


def _tree(folder: Path, inside: str, skipped: set[str]) -> dict[str, Path]:
    """Return the files below a folder, by their path inside the image."""
    found: dict[str, Path] = {}
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - skipped)
        below = os.path.relpath(here, folder)
        for name in sorted(names):
            if not name.endswith((".pyc", ".a")):
                found[os.path.normpath(f"{inside}/{below}/{name}")] = Path(here, name)
    return found


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _libraries(binaries: Sequence[Path], prefix: str) -> dict[str, Path]:
    """Return the libraries that the dynamic linker would load for them, by their path inside the image.

    Libraries of the interpreter's own prefix go beside the system's, because that prefix does not exist in the image.
    """
    text = subprocess.run(
        ["ldd", *map(str, binaries)], capture_output=True, text=True, check=False
    ).stdout
    found: dict[str, Path] = {}
    loose: list[Path] = []
    system = "/usr/lib"
    for place in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", text, re.MULTILINE):
        if place.startswith(prefix + "/") and prefix != "/usr":
            loose.append(Path(place))
        elif not place.startswith(PACKAGES) and "site-packages" not in place:
            found[place] = Path(os.path.realpath(place))
            if Path(place).name.startswith("libc.so"):
                system = os.path.dirname(place)
    return found | {f"{system}/{path.name}": Path(os.path.realpath(path)) for path in loose}


def _write(tar: tarfile.TarFile, files: dict[str, Path]) -> None:
    """Writes files in order, and the folders above them; owned by root, without times."""
    folders = {"proc", "sys", "dev", "box", "etc", PACKAGES.strip("/")}
    for name in files:
        folders |= {str(parent).strip("/") for parent in Path(name).parents}
    for name in sorted(folders - {"", "bin"}):
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(entry)
    for name, path in sorted(files.items()):
        if name.startswith("/bin/"):
            name = "/usr" + name
        data = path.read_bytes()
        entry = tarfile.TarInfo(name.strip("/"))
        entry.size, entry.mode = len(data), 0o755 if os.access(path, os.X_OK) else 0o644
        tar.addfile(entry, io.BytesIO(data))
