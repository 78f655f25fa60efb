"""The system-call filters (seccomp BPF), built here because no library is available inside the sandbox.

Calls that are neither denied below nor newer than the last known one are allowed. Newer ones, and numbers that the
table of a machine leaves free, fail with ENOSYS, so a new kernel opens nothing.
Denied calls fail with EPERM (a network socket: EACCES): the code gets a PermissionError and is not killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence

from sandbox.isolation.libc import check, libc

LAST_KNOWN = 462
_FREE = {"x86_64": ((335, 423),), "aarch64": ((244, 259), (295, 423))}
"""First and last number of the ranges below LAST_KNOWN that no call had when this was written. (335 and 336 are the
kernel's own: they end a process that was not sent there by a probe.)"""
_NEW_NAMESPACES = 0x7E020080
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_EPERM, _EACCES, _ENOSYS, _UNSUPPORTED = "EPERM", "EACCES", "ENOSYS", "EOPNOTSUPP"

# name: (x86_64, aarch64); -1 if the architecture has no such call.
_DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "statmount": (457, 457), "listmount": (458, 458),
    "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "nfsservctl": (180, 42), "lookup_dcookie": (212, 18),
    "personality": (135, 92), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "syslog": (103, 116),
    "vhangup": (153, 58), "iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1), "uselib": (134, -1),
    "sysfs": (139, -1), "_sysctl": (156, -1), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # These could starve the box's own init, which has the same uid.
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "sched_setaffinity": (203, 122), "ioprio_set": (251, 30), "setpriority": (141, 140),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "memfd_secret": (447, 447),
}  # fmt: skip
_SHARED_MEMORY = {
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191),
    "semop": (65, 193), "msgget": (68, 186), "msgctl": (71, 187), "mq_open": (240, 180),
}  # fmt: skip
_MEMFD = {"memfd_create": (319, 279)}
# Opening a shared file is a message to a session that watches its folder.
_WATCHES = {"inotify_init": (253, -1), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27)}
# What a file outside of the work folder could carry from one session to another: attributes, and whether it is in the
# page cache, which no session may choose (DONTNEED, PAGEOUT) or ask for.
_ATTRIBUTES = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
# Counts of the whole machine: its threads and memory, and the pages of a file that are in memory.
_COUNTS = {"sysinfo": (99, 179), "mincore": (27, 232), "cachestat": (451, 451)}
# How much of a file system is in use, if sessions share one.
_SPACE = {"statfs": (137, 43), "fstatfs": (138, 44), "ustat": (136, -1)}
# Modes, owners and times, for grading where files of the same user, or open to all, are not mounted read-only.
_METADATA = {
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88),
}  # fmt: skip
# For grading: locks; and messages that may hold descriptors, of which the kernel counts those on their way by user.
_TO_OTHERS = {"flock": (73, 32), "sendmsg": (46, 211), "sendmmsg": (307, 269)}
# A socket with a name, or one that connects to a name, reaches other sessions and the host's services.
_NAMED_SOCKETS = {
    "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
}  # fmt: skip
_SOCKET, _CLONE, _CLONE3, _PRLIMIT, _IOCTL = (41, 198), (56, 220), (435, 435), (302, 261), (16, 29)
_SOCKETPAIR, _SENDTO, _FCNTL = (53, 199), (44, 206), (72, 25)
_MADVISE, _FADVISE, _PREADV2 = (28, 233), (221, 223), (327, 286)
_OPEN, _OPENAT, _OPENAT2 = (2, -1), (257, 56), (437, 437)
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX, _AF_INET, _AF_INET6, _SOCK_STREAM, _SOCK_TYPES = 1, 2, 10, 1, 0xF
_MADV_COLD, _MADV_PAGEOUT, _POSIX_FADV_DONTNEED = 20, 21, 4
_FCNTLS = (*range(5), 8, 9, 10, 11, 15, 16, 17, 1027, 1030, 1031, 1032, 1033, 1034)
"""Commands of fcntl that concern a descriptor, its owner, a pipe or seals; leases, watches and hints are the others."""
_LOCKS = (5, 6, 7, 36, 37, 38)
"""F_GETLK, F_SETLK, F_SETLKW, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW."""
_NAMELESS_FILE = 0x400000
"""The bit of O_TMPFILE that O_DIRECTORY does not have."""

_Step = tuple[int, int, int, int]
_Code = list[_Step]
_Table = Mapping[str, tuple[int, int]]
_LOAD, _AND, _JEQ, _JGT, _JGE, _JSET, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH_AT, _ARG0, _ARG1, _ARG2, _ARG3, _ARG4, _ARG4_HIGH, _ARG5 = (
    0,
    4,
    16,
    24,
    32,
    40,
    48,
    52,
    56,
)


def _fail(name: str) -> _Step:
    return (_RETURN, 0, 0, _FAIL | int(getattr(errno, name)))


_OK = (_RETURN, 0, 0, _ALLOW)


def _match(argument: int, values: Sequence[int], then: _Step, otherwise: _Step) -> _Code:
    """Return code that ends with `then` if an argument has one of the values."""
    # A jump counts instructions: each value leads over the later ones to `then`, and the last, if it differs, past it.
    last = len(values) - 1
    jumps = [(_JEQ, last - n, int(n == last), value) for n, value in enumerate(values)]
    return [(_LOAD, 0, 0, argument), *jumps, then, otherwise]


def _refuse(table: _Table, at: int, name: str) -> list[tuple[int, _Code]]:
    """Return the calls of a table that the machine has, each failing with an error."""
    return [(pair[at], [_fail(name)]) for pair in table.values() if pair[at] >= 0]


def _leaves(machine: str, own_ipc: bool, network: bool) -> list[tuple[int, _Code]]:
    """Return the number and deciding code of every call that is not simply allowed."""
    at = 0 if machine == "x86_64" else 1
    denied = _DENIED if own_ipc else {**_DENIED, **_SHARED_MEMORY}
    families = _match(_ARG0, (_AF_UNIX, _AF_INET, _AF_INET6), _OK, _fail(_EACCES))
    new_namespaces = (_JSET, 0, 1, _NEW_NAMESPACES)
    return sorted(
        [
            *_refuse(denied, at, _EPERM),
            (_SOCKET[at], families if network else [_fail(_EACCES)]),
            # The flags of clone3 are in memory; the C library falls back to clone.
            (_CLONE3[at], [_fail(_ENOSYS)]),
            (_CLONE[at], [(_LOAD, 0, 0, _ARG0), new_namespaces, _fail(_EPERM), _OK]),
            # prlimit only on pid 0, the calling process.
            (_PRLIMIT[at], _match(_ARG0, (0,), _OK, _fail(_EPERM))),
            (_IOCTL[at], _match(_ARG1, (_TIOCSTI, _TIOCLINUX), _fail(_EPERM), _OK)),
        ]
    )


def _tree(leaves: list[tuple[int, _Code]]) -> _Code:
    """Return a binary search over the call numbers; every path ends in a return."""
    if len(leaves) == 1:
        number, code = leaves[0]
        return [(_JEQ, 1, 0, number), _OK, *code]
    middle = len(leaves) // 2
    low, high = _tree(leaves[:middle]), _tree(leaves[middle:])
    if len(low) > 255:
        raise ValueError("a branch longer than BPF can jump")
    return [(_JGE, len(low), 0, leaves[middle][0]), *low, *high]


def build(own_ipc: bool = True, machine: str = "", network: bool = False) -> bytes:
    """Return the filter for this machine. Raises OSError on an unknown architecture: no filter, no sandbox.

    `network`: sockets of the local families and IP are allowed, for a network namespace that leads nowhere.
    """
    machine = machine or os.uname().machine
    if machine not in _ARCH:
        raise OSError(errno.ENOSYS, f"no system-call filter for {machine}")
    return _pack(machine, _leaves(machine, own_ipc, network))


def build_for_code(counted: bool = True, grading: bool = False, machine: str = "") -> bytes:
    """Return the second filter, for the model's code alone: denies calls that only the box itself may make.

    It denies memory that outlives its mapping and counts for no process, every socket but a connected pair of streams,
    which cannot get another end, and every message to another session by a file that both see, unless only a clock
    shows it. `counted`: whether a file system of its own counts a session's bytes; if not, files without a name
    and figures of the shared one are denied too. `grading`: the code knows hidden tests, so locks are denied as well.
    """
    machine = machine or os.uname().machine
    at = 0 if machine == "x86_64" else 1
    refused = {**_SHARED_MEMORY, **_MEMFD, **_WATCHES, **(_TO_OTHERS if grading else {})}
    refused |= _METADATA if grading and not counted else {}
    unsupported = {**_ATTRIBUTES, **_COUNTS, **({} if counted else _SPACE)}
    streams = [
        (_LOAD, 0, 0, _ARG0), (_JEQ, 1, 0, _AF_UNIX), _fail(_EACCES),
        (_LOAD, 0, 0, _ARG1), (_AND, 0, 0, _SOCK_TYPES), (_JEQ, 1, 0, _SOCK_STREAM), _fail(_EACCES), _OK,
    ]  # fmt: skip
    # An address; that of sendmsg is in memory, but the kernel refuses one on a connected pair.
    nowhere = [
        (_LOAD, 0, 0, _ARG4), (_JEQ, 0, 2, 0), (_LOAD, 0, 0, _ARG4_HIGH), (_JEQ, 1, 0, 0), _fail(_EACCES), _OK,
    ]  # fmt: skip
    commands = _FCNTLS if grading else (*_FCNTLS, *_LOCKS)
    known = [(_JEQ, len(commands) - n, 0, command) for n, command in enumerate(commands)]
    leaves = [
        *_refuse(refused, at, _EPERM),
        *_refuse(unsupported, at, _UNSUPPORTED),
        *_refuse(_NAMED_SOCKETS, at, _EACCES),
        (_SOCKETPAIR[at], streams),
        (_SENDTO[at], nowhere),
        (_FCNTL[at], [(_LOAD, 0, 0, _ARG1), *known, _fail(_EPERM), _OK]),
        (_MADVISE[at], _match(_ARG2, (_MADV_COLD, _MADV_PAGEOUT), _fail(_EPERM), _OK)),
        (_FADVISE[at], _match(_ARG3, (_POSIX_FADV_DONTNEED,), _fail(_EPERM), _OK)),
        # With RWF_NOWAIT a read reports whether the page is in memory.
        (_PREADV2[at], [(_LOAD, 0, 0, _ARG5), (_JEQ, 1, 0, 0), _fail(_UNSUPPORTED), _OK]),
    ]
    if not counted:
        nameless = [(_JSET, 0, 1, _NAMELESS_FILE), _fail(_UNSUPPORTED), _OK]
        leaves += [
            (_OPEN[at], [(_LOAD, 0, 0, _ARG1), *nameless]),
            (_OPENAT[at], [(_LOAD, 0, 0, _ARG2), *nameless]),
            # The flags of openat2 are in memory; libraries fall back to openat.
            (_OPENAT2[at], [_fail(_ENOSYS)]),
        ]
    return _pack(machine, sorted(leaf for leaf in leaves if leaf[0] >= 0))


def _pack(machine: str, leaves: list[tuple[int, _Code]]) -> bytes:
    ranges = [
        ((_JGE, 0, 2, first), (_JGT, 1, 0, last), _fail(_ENOSYS)) for first, last in _FREE[machine]
    ]
    free = [instruction for one in ranges for instruction in one]
    code: _Code = [
        (_LOAD, 0, 0, _ARCH_AT), (_JEQ, 1, 0, _ARCH[machine]), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR), (_JGT, 0, 1, LAST_KNOWN), _fail(_ENOSYS), *free,
        *_tree(leaves),
    ]  # fmt: skip
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(program: bytes) -> None:
    """Puts a filter on this process and every process it will start; needs no_new_privs. Raises OSError."""
    argument = _Program(len(program) // 8, program)
    check(libc.prctl(22, 2, ctypes.byref(argument), 0, 0), "seccomp")
