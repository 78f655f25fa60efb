"""Starts runners: the command for each level of isolation, and explanations if one does not work.

A level is tried by starting a runner and opening a box in it, never by checking versions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import IO

from agentrl_cli.errors import MissingDependency, SandboxUnavailable
from agentrl_cli.paths import sandbox_dir
from agentrl_cli.sandbox.cgroup import Cgroup

INSIDE = "/opt/agentrl/sandbox"
"""The guest package inside a jail."""
PACKAGES = "/opt/packages"
_FIRST_UID = 61_000
_UIDS = 4_000


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one runner."""

    level: str
    imports: tuple[str, ...] = ()
    """Packages that are available and imported before the first fork."""
    python: str = field(
        default_factory=lambda: os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    )
    prefix: str = field(default_factory=lambda: os.path.realpath(sys.base_prefix))
    """Folder of that interpreter and its standard library."""
    folder: str = field(default_factory=lambda: str(sandbox_dir()))
    grading: bool = False
    """Whether its boxes only grade: their code knows hidden tests, and must not pass them on."""


def environment(prefix: str) -> dict[str, str]:
    """Return the whole environment of a runner and of the code in it."""
    path = "/usr/local/bin:/usr/bin:/bin"
    if not prefix.startswith("/usr"):
        path = f"{prefix}/bin:{path}"
    return {
        "PATH": path,
        "HOME": "/work",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the order of a set is the same when an episode is replayed
        "PYTHONDONTWRITEBYTECODE": "1",
        "MALLOC_ARENA_MAX": "2",  # else a thread takes 64 MiB of address space
        "LD_BIND_NOW": "1",  # else every execution would resolve symbols again; removed before the first
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def guest_command(python: str, program: str, launch: Launch, **options: str) -> list[str]:
    """Return the command that starts a program of the guest, with those of its options that are not empty."""
    given = {"imports": ",".join(launch.imports), "grading": str(int(launch.grading)), **options}
    words = [word for name, value in given.items() if value for word in (f"--{name}", value)]
    return [python, "-P", "-s", "-S", "-B", "-X", "utf8", program, *words]


def start(
    launch: Launch, control: int, number: int, folder: Path, group: Cgroup | None = None
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Starts a runner that listens on the descriptor `control`. Returns the process and the file of its stderr.

    `number` selects the uid that it takes if this process is root; without namespaces it makes `folder`; `group` limits
    its memory. Raises OSError if the program is missing.
    """
    if launch.level not in ("ns", "landlock", "bare"):
        raise SandboxUnavailable(f"Sandbox level {launch.level} is not started as a process.")
    uid = _FIRST_UID + (os.getpid() * 16 + number) % _UIDS if os.geteuid() == 0 else 0
    packages = package_folders(launch.imports)
    inside = launch.level == "ns"
    places = {PACKAGES} if inside and packages else {str(folder.parent) for folder in packages}
    options = {
        "control": str(control),
        "level": launch.level,
        "uid": str(uid or ""),
        "packages": os.pathsep.join(sorted(places)),
    }
    if uid and not inside and not _open_to_others(launch.python):
        launch = replace(launch, python="/usr/bin/python3", prefix="/usr")
    if inside:
        command = [*jail(launch, root=bool(uid)), "--"]
        command += guest_command(launch.python, f"{INSIDE}/main.py", launch, **options)
    else:
        program = str(Path(launch.folder) / "main.py")
        command = guest_command(launch.python, program, launch, folder=str(folder), **options)
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
    try:
        process = subprocess.Popen(
            group.command(command) if group else command,
            env=environment(launch.prefix),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[control],
            start_new_session=True,  # Ctrl-C in the terminal is for this process, which closes the runner
        )
    except OSError:
        stderr.close()
        raise
    return process, stderr


@cache
def nproc_holds() -> bool:
    """Whether RLIMIT_NPROC bounds a runner's processes; tried, since a user may be the host's root in a user namespace.

    The kernel exempts root from it, so a runner that root starts becomes another user.
    """
    if os.geteuid() == 0:
        return True
    program = (
        "import os, resource as r\nr.setrlimit(r.RLIMIT_NPROC, (1, 1))\nos._exit(os.fork() == 0)"
    )
    return (
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", program], capture_output=True, check=False
        ).returncode
        != 0
    )


def _open_to_others(path: str) -> bool:
    """Whether other users may execute a program: without namespaces the runner is another user."""
    file = Path(path)
    return all(step.stat().st_mode & 0o001 for step in (file, *file.parents))


_AS_ROOT = "--cap-add CAP_SETUID --cap-add CAP_SETGID --cap-add CAP_SYS_ADMIN --dir /proc"
"""As root the jail needs no user namespace; the runner mounts /proc and gives up root before its first box. (If root
could write to /proc, bwrap would cover parts of it, and no box could mount its own.)"""


def jail(
    launch: Launch, root: bool, further: Sequence[str] = (), tmp: str = "/work/.tmp"
) -> list[str]:
    """Return the bubblewrap command line: an allow list of visible files, all read-only, and no network.

    `further`: mounts besides, which may cover others. `tmp`: where /tmp leads; if empty, `further` mounts it.
    """
    # Parent folders that bwrap makes by itself are closed to other users, and the runner gives up root.
    above = map(str, reversed(Path(launch.prefix, "bin").parents))
    own = () if launch.prefix.startswith("/usr") else ("bin", "lib", "lib64")  # it may be a home
    links = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1",
             "/dev/stderr": "/proc/self/fd/2", "/dev/shm": "/work/.shm", **({"/tmp": tmp} if tmp else {})}  # fmt: skip
    lines: list[Sequence[str]] = [
        (shutil.which("bwrap") or "bwrap",),
        "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try".split(),
        "--die-with-parent --new-session --hostname sandbox --cap-drop ALL".split(),
        (_AS_ROOT if root else "--unshare-user --uid 1000 --gid 1000 --proc /proc").split(),
        *(
            ("--dir", folder)
            for folder in ("/opt", "/opt/agentrl", PACKAGES, "/etc", *above)
            if folder not in ("/", "/usr")
        ),
        _system(),
        *(_bind(f"{launch.prefix}/{name}", option="--ro-bind-try") for name in own),
        _packages(launch),
        ("--ro-bind", launch.folder, INSIDE),
        *(
            ("--ro-bind", f"{launch.folder}/etc/{name}", f"/etc/{name}")
            for name in ("passwd", "group")
        ),
        ("--tmpfs", "/dev"),
        *(
            _bind(f"/dev/{name}", option="--dev-bind")
            for name in ("null", "zero", "full", "random", "urandom")
        ),
        *(("--symlink", target, link) for link, target in links.items()),
        ("--dir", "/work"),
        further,
        "--remount-ro /dev --remount-ro / --chdir /".split(),
    ]
    return [word for line in lines for word in line]


def _bind(path: str, option: str = "--ro-bind") -> list[str]:
    return [option, path, path]


def _system() -> list[str]:
    """Return the system's programs and libraries."""
    command = _bind("/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            command += _bind(str(path))
    for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime"):
        command += _bind(f"/etc/{name}", option="--ro-bind-try")
    return command


def _packages(launch: Launch) -> list[str]:
    """Hides the interpreter's installed packages, and binds the folders of the wanted ones alone."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = Path(launch.prefix, "lib", version, "site-packages")
    command = (
        ["--tmpfs", str(installed), "--remount-ro", str(installed)] if installed.is_dir() else []
    )
    for name in package_folders(launch.imports):
        command += ["--ro-bind", str(name), f"{PACKAGES}/{name.name}"]
    return command


def package_folders(imports: Sequence[str]) -> list[Path]:
    """Return the folders of installed packages, with the shared libraries that wheels put beside them.

    Raises MissingDependency if one is not installed.
    """
    from importlib.util import find_spec

    found: list[Path] = []
    for name in imports:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise MissingDependency(
                f"The sandbox needs {name}, which is not installed as a package here."
            )
        folder = Path(next(iter(spec.submodule_search_locations)))
        found.append(folder)
        libraries = folder.parent / f"{name}.libs"
        if libraries.is_dir():
            found.append(libraries)
    return found


def explain(level: str, error: str, ids: Path = Path("/proc/self/uid_map")) -> str:
    """Return the remedy for a level that did not start, from its error output; `ids`: the file of mapped users."""
    text = error.lower()
    if "operation not permitted" in text and _is_alone(ids):
        return (
            "Only root is mapped in this user namespace (`unshare -r`, or a container without further ids): the runner "
            "can become no other user, and root inside may not mount. Start agentrl outside of it, as your own user."
        )
    if level == "ns":
        if shutil.which("bwrap") is None:
            return "Install bubblewrap: `apt-get install bubblewrap` or `dnf install bubblewrap`."
        if Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").exists() and (
            Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").read_text().strip()
            == "1"
        ):
            return (
                "AppArmor forbids user namespaces here (Ubuntu 24.04 and later): "
                "`sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or give bwrap a profile with userns."
            )
        if "namespace" in text or "operation not permitted" in text or "no space left" in text:
            return (
                "The kernel or this container forbids user namespaces: `sudo sysctl kernel.unprivileged_userns_clone=1 "
                "user.max_user_namespaces=15000`, or start the container with `--security-opt seccomp=unconfined "
                "--cap-add SYS_ADMIN`, or use `sandbox.backend: docker`."
            )
    return "`agentrl doctor` shows what works here."


def _is_alone(ids: Path) -> bool:
    """Whether this process is root in a user namespace without a user that the runner could become."""
    try:
        rows = [[int(word) for word in line.split()] for line in ids.read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return os.geteuid() == 0 and not any(
        first <= _FIRST_UID < first + count for first, _, count in rows
    )
