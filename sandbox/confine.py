"""What takes rights away from a box: own namespaces, no capabilities, a system-call filter, limits.

Three ways, chosen by the runner's `--level`: `ns` (own user, pid, mount and ipc namespaces for every box), `uid` (in a
container: a fresh uid for every box), `landlock` (no namespaces to be had: a Landlock ruleset) and `bare` (limits
only). Only the first two are strong; the host never claims more than the level it asked for.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import landlock
import seccomp

libc = ctypes.CDLL(None, use_errno=True)
WORK = "/work"
_RAW = ctypes.PyDLL(None, use_errno=True)
_BYTE = ctypes.create_string_buffer(1)
_code_filter = b""

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_CLONE_PARENT, _CLONE_CLEARTID, _CLONE_SETTID = 0x8000, 0x00200000, 0x01000000
_SYS_CLONE = 56 if os.uname().machine == "x86_64" else 220
ANY_KIND = 0x40000000
"""__WALL of waitpid(2): children that send no signal at their end, too."""
_NOSUID, _NODEV, _REC, _PRIVATE, _NOEXEC = 2, 4, 16384, 1 << 18, 8
_PR_DUMPABLE, _PR_NNP, _PR_CAPBSET_DROP, _PR_SUBREAPER, _PR_DEATHSIG, _PR_AMBIENT = 4, 38, 24, 36, 1, 47
_PR_TID_ADDRESS = 40
_CAP_VERSION = 0x20080522


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0) -> None:
    """prctl(2) with one argument; raises OSError."""
    _check(libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def dumpable() -> Callable[[], int]:
    """What makes this process's memory open to others of its user."""
    return partial(libc.prctl, _PR_DUMPABLE, 1, 0, 0, 0)


def clone_namespaces() -> int:
    """fork() whose child lives in user, pid, mount, ipc and network namespaces of its own. Raises OSError."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    # PyDLL keeps the interpreter's lock over the call: the child wakes up holding it.
    pid = int(_RAW.syscall(
        _SYS_CLONE, _NEWUSER | _NEWPID | _NEWNS | _NEWIPC | _NEWNET | signal.SIGCHLD, 0, 0, 0, 0
    ))  # fmt: skip
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone into new namespaces: {os.strerror(number)}")
    return pid


def bare_fork() -> int:
    """fork() without the interpreter's own work around it, which costs more than the fork.

    For a process with one thread only, whose child neither needs its at-fork hooks nor runs them later (`wake`).
    """
    # PyDLL keeps the interpreter's lock over the call: the child wakes up holding it.
    pid = int(_RAW.fork())
    if pid < 0:
        raise OSError(ctypes.get_errno(), "fork: " + os.strerror(ctypes.get_errno()))
    return pid


def sleeping_fork(fd: int) -> int:
    """Forks a child that sleeps, having touched next to nothing, until a byte arrives on `fd`, and ends at its end.

    Returns the child's pid, and 0 in the child once it is woken. Raises OSError. Code that waits for any child of its
    own does not meet this one, which sends no signal at its end: wait for it with ANY_KIND.
    """
    # Only clone can leave the signal away, and only fork takes the C library's locks, which other threads may hold.
    alone = _thread._count() == 0 or len(sys._current_frames()) == 1  # the quicker one counts those before a fork, too
    # Neither the interpreter's lock for imports nor its hooks around a fork: nobody is to notice this one.
    pid = int(_quiet_fork() if alone else _RAW.fork())
    if pid == 0:
        if _RAW.read(fd, _BYTE, 1) != 1:
            _RAW._exit(0)
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    if pid < 0:
        raise OSError(ctypes.get_errno(), "fork: " + os.strerror(ctypes.get_errno()))
    return pid


def sibling_fork() -> Callable[[], int]:
    """A `bare_fork` whose child is a child of this process's parent; it answers a negative number where it fails."""
    return partial(_RAW.syscall, _SYS_CLONE, *_as_fork(_CLONE_PARENT | signal.SIGCHLD))


@cache
def _as_fork(flags: int) -> tuple[Any, ...]:
    """Arguments of clone that make it the C library's fork but for `flags`.

    The kernel tells where the library keeps the number of its thread, which is at the same place in every fork; where
    it does not, that number stays the parent's, of which only the locks that processes share would take notice.
    """
    address = ctypes.c_void_p()
    if libc.prctl(_PR_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) != 0:
        return flags, 0, 0, 0, 0
    here = (0, address, 0) if os.uname().machine == "x86_64" else (0, 0, address)
    return flags | _CLONE_SETTID | _CLONE_CLEARTID, 0, *here


_quiet_fork = partial(_RAW.syscall, _SYS_CLONE, *_as_fork(0))
"""Sends no signal at the child's end."""


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode())
    _check(libc.mount(*arguments), f"mount {target}")


def mount_proc() -> None:
    """A /proc of the own pid namespace."""
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)


def enter_namespaces(limits: dict[str, Any], uid: int, gid: int) -> None:
    """First thing in a box: map the user, mount an empty work folder of limited size and a /proc of its own."""
    prctl(_PR_DUMPABLE, 1)  # else the files under /proc/self belong to root
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/gid_map", f"1000 {gid} 1")
    _write("/proc/self/uid_map", f"1000 {uid} 1")
    _mount("none", "/", None, _REC | _PRIVATE)
    size = f"size={limits['disk_mb']}m,nr_inodes={limits['inodes'] + 3},mode=0755"
    _mount("tmpfs", WORK, "tmpfs", _NOSUID | _NODEV, size)
    mount_proc()
    # /tmp and /dev/shm are links to these: one budget for all that a box writes.
    os.mkdir(WORK + "/.tmp")
    os.mkdir(WORK + "/.shm")


def enter_folder(base: str, number: int, level: str, readable: list[str]) -> int | None:
    """First thing in a box without namespaces: a work folder under `base`; under Landlock also the rules for code.

    Returns the descriptor of the rules. Raises OSError, also where Landlock is too old.
    """
    global WORK
    WORK = f"{base}/{number}"
    os.chmod(base, 0o700)  # what Landlock does not hold: the code of another box may have closed it
    for folder in (WORK, WORK + "/.tmp", WORK + "/.shm"):
        os.mkdir(folder, 0o700)
    os.environ.update(HOME=WORK, TMPDIR=WORK + "/.tmp")
    adopt_orphans()
    if level == "bare":
        return None
    if level != "landlock":
        raise ValueError(f"no level {level!r}")
    if landlock.abi(libc) < landlock.NEEDED_ABI:
        raise OSError(95, f"Landlock has version {landlock.abi(libc)} here, {landlock.NEEDED_ABI} is needed")
    return landlock.ruleset(libc, WORK, readable)


def enter_slot(folder: str, number: int, user: tuple[int, int]) -> None:
    """First thing in a box of a container: a work folder in a file system of limited size, owned by the box's user.

    The box itself stays root with no more capabilities than signalling and becoming its user.
    """
    global WORK
    WORK = f"{folder}/{number}"
    os.environ.update(HOME=WORK, TMPDIR=WORK + "/.tmp")
    adopt_orphans()
    with acting_as(user):
        for path in (WORK, WORK + "/.tmp", WORK + "/.shm"):
            os.mkdir(path, 0o700)
        os.chdir(WORK)
    os.chmod(folder, 0o1710)  # what the user put beside its folder would stay for the next one


@contextmanager
def acting_as(user: tuple[int, int] | None) -> Iterator[None]:
    """Rights of another user for file access, real and saved ids unchanged: that user cannot signal us meanwhile."""
    if user is None:
        yield
        return
    os.setegid(user[1])
    os.seteuid(user[0])
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def signal_user(uid: int, number: int) -> None:
    """A signal to every process of a user at once. The next higher uid belongs to nobody, and is ours meanwhile."""
    os.setresuid(uid + 1, uid, 0)
    try:
        os.kill(-1, number)
    except ProcessLookupError:
        return
    finally:
        os.seteuid(0)
        os.setresuid(0, 0, 0)


def restrict(rules: int) -> None:
    """Puts this process under Landlock rules."""
    landlock.restrict(libc, rules)
    os.close(rules)


def count_processes() -> int:
    """Threads of this user on the whole machine: what RLIMIT_NPROC counts outside of a user namespace."""
    total, me = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}").st_uid == me:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return total


def drop(program: bytes) -> None:
    """Gives up every capability and the way back, then installs the system-call filter."""
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(libc.capset(ctypes.byref(header), ctypes.byref(none)), "capset")
    install_filter(program)
    prctl(_PR_DUMPABLE, 0)


def install_filter(program: bytes) -> None:
    """Puts the system-call filter on this process and all it will start."""
    prctl(_PR_NNP, 1)
    if program:
        seccomp.install(program, libc)


def install_code_filter() -> None:
    """The second filter, on a process that is about to run code; see seccomp.build_for_code."""
    seccomp.install(_code_filter, libc)


def know_code_filter(level: str) -> None:
    """Makes it once, before there are children that would each do it again."""
    global _code_filter
    _code_filter = seccomp.build_for_code(counted=level in ("ns", "uid"))


def oom_first() -> None:
    """Where a cgroup or container runs out of memory the kernel takes this process before ours."""
    _write("/proc/self/oom_score_adj", "500")


def die_with_parent() -> None:
    """SIGKILL for this process when the one that forked it ends."""
    prctl(_PR_DEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants."""
    prctl(_PR_SUBREAPER, 1)


def become(uid: int, gid: int) -> None:
    """Leaves root for good."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def virtual_size() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit(limits: dict[str, Any], base: int, extra_processes: int, cpu: bool) -> None:
    """Resource limits of one execution. `base`: address space of the empty interpreter, which does not count."""
    space = base + (int(limits["memory_mb"]) << 20)
    file_size = int(limits["file_mb"]) << 20
    pairs = [
        (resource.RLIMIT_FSIZE, file_size, file_size),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 65536, 65536),
        (resource.RLIMIT_NPROC, limits["processes"] + extra_processes, limits["processes"] + extra_processes),
    ]
    if sys.platform == "linux":
        pairs.append((resource.RLIMIT_MSGQUEUE, 65536, 65536))
        pairs.append((resource.RLIMIT_AS, space, space))
    if cpu:
        seconds = max(1, int(-(-limits["cpu"] // 1)))
        pairs.append((resource.RLIMIT_CPU, seconds, seconds + 1))
    for which, soft, hard in pairs:
        most = _most(which)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (soft, hard))


@cache
def _most(which: int) -> int:
    """The hard limit of a box, which never changes its own."""
    return resource.getrlimit(which)[1]


def know_limits() -> None:
    """Looks the hard limits up once, before there are children that would each do it again."""
    for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK,
                  resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_CPU):  # fmt: skip
        _most(which)
    if sys.platform == "linux":
        _most(resource.RLIMIT_MSGQUEUE)
