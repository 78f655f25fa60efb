"""What makes the warmed-up interpreter cheap to fork: few mappings, and its code in huge pages.

A fork pays for every mapping and for every page that was written, and its child for every page that it touches first.
Where the kernel refuses any of this, the interpreter stays as it was.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from confine import libc

_READ, _WRITE, _EXECUTE = 1, 2, 4
_PRIVATE_ANONYMOUS, _MOVE_THERE, _HUGEPAGE = 0x22, 3, 14
_HUGE = 2 << 20
_NUMBER, _PLACE = ctypes.c_size_t, ctypes.c_void_p
_HOLE, _SMALLEST = 120_000, 24
"""Bytes: the largest block that is no mapping of its own, and the smallest."""
_RAW = ctypes.PyDLL(None)


class _Mapping(NamedTuple):
    """One line of /proc/self/maps."""

    start: int
    end: int
    rights: str
    offset: int
    inode: str


def _mappings() -> list[_Mapping]:
    found: list[_Mapping] = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            span, rights, offset, _, inode, *_ = line.split(None, 5)
            start, _, end = span.partition("-")
            found.append(_Mapping(int(start, 16), int(end, 16), rights, int(offset, 16), inode))
    return found


def merge() -> None:
    """Gives the parts of every shared library the rights of their neighbours, so that five mappings become two.

    Constants become executable and relocated addresses writable, in processes whose code may do both as it likes.
    """
    found = _mappings()
    for number, one in enumerate(found):
        if one.rights != "r--p" or one.inode == "0":
            continue
        for rights, protection in (("rw-p", _READ | _WRITE), ("r-xp", _READ | _EXECUTE)):
            if any(_continues(one, other, rights) for other in found[max(0, number - 1) : number + 2]):
                libc.mprotect(_PLACE(one.start), _NUMBER(one.end - one.start), protection)
                break


def _continues(one: _Mapping, other: _Mapping, rights: str) -> bool:
    """Whether two mappings could be one, but for what is allowed in them."""
    touching = one.start == other.end or one.end == other.start
    same = one.inode == other.inode and one.start - other.start == one.offset - other.offset
    return touching and same and other.rights == rights


def enlarge() -> None:
    """Puts the interpreter's own code into huge pages, which a fork shares at once and its child need not look up."""
    inside = ctypes.cast(ctypes.pythonapi.Py_IncRef, _PLACE).value or 0
    own = next(one for one in _mappings() if one.start <= inside < one.end)
    start, end = _up(own.start), own.end // _HUGE * _HUGE
    if own.rights != "r-xp" or start >= end:
        return
    size = end - start
    for function in (libc.mmap, libc.mremap):
        function.restype = _PLACE
    room = libc.mmap(_PLACE(0), _NUMBER(size + _HUGE), _READ | _WRITE, _PRIVATE_ANONYMOUS, -1, _NUMBER(0))
    if room in (None, _PLACE(-1).value):
        return
    copy = _up(room)
    libc.madvise(_PLACE(copy), _NUMBER(size), _HUGEPAGE)
    ctypes.memmove(copy, start, size)
    huge = _is_huge(copy, size) and libc.mprotect(_PLACE(copy), _NUMBER(size), _READ | _EXECUTE) == 0
    if huge:  # this code runs from what is replaced, by the same
        libc.mremap(_PLACE(copy), _NUMBER(size), _NUMBER(size), _MOVE_THERE, _PLACE(start))
    for low, high in ((room, copy), (copy, copy + size * (not huge)), (copy + size, room + size + _HUGE)):
        if high > low:
            libc.munmap(_PLACE(low), _NUMBER(high - low))


def fill() -> None:
    """Takes every hole of the C heap for good, so that all that is allocated from here on lies side by side.

    What a child allocates between the interpreter's own objects it pays for with a page each.
    """
    try:
        allocate, free = _RAW.malloc, _RAW.free
    except AttributeError:
        return
    allocate.restype, allocate.argtypes = _NUMBER, [_NUMBER]
    free.restype, free.argtypes = None, [_NUMBER]
    top = allocate(_HOLE)
    free(top)
    size = _HOLE
    while size >= _SMALLEST:
        while (place := allocate(size)) < top:
            if not place:
                return
        free(place)
        size = size * 7 // 8


def _up(address: int) -> int:
    return -(-address // _HUGE) * _HUGE


def _is_huge(start: int, size: int) -> bool:
    """Whether the kernel gave huge pages to all of it: in small ones every fork would copy it page by page."""
    here = False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            first, *rest = line.split()
            if "-" in first and not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                here = low <= start < high
            elif here and first == "AnonHugePages:":
                return int(rest[0]) << 10 >= size
    return False
