"""What makes the warmed-up interpreter cheap to fork: few mappings, and its code in huge pages.

A fork pays for every mapping and for every page that was written, and its child for every page that it touches first.
Where the kernel refuses any of this, the interpreter stays as it was.
"""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

from confine import libc

_READ, _WRITE, _EXECUTE = 1, 2, 4
_PRIVATE_ANONYMOUS, _MOVE_THERE, _HUGEPAGE = 0x22, 3, 14
_HUGE = 2 << 20
_MUCH = 4
"""A library is used a lot of where this part of its code is in memory."""
_NUMBER, _PLACE = ctypes.c_size_t, ctypes.c_void_p
_HOLE, _SMALLEST = 120_000, 24
"""Bytes: the largest block that is no mapping of its own, and the smallest."""
_ALL = 64 << 20
"""Bytes, more than all holes: where they do not end, the C library is another one, or its heap cannot grow."""
_RAW = ctypes.PyDLL(None)
_POOL, _POOL_HEAD, _SIZES, _MOST = 1 << 14, 48, 16, 1 << 18
"""Bytes of a pool, of its head, between two sizes of blocks, and looked through for the holes of one size."""
_BYTES = sys.getsizeof(b"")
_filled: list[object] = []


class _Mapping(NamedTuple):
    """One line of /proc/self/maps."""

    start: int
    end: int
    rights: str
    offset: int
    inode: str


def _mappings() -> list[_Mapping]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return [_mapping(line) for line in file]


def _mapping(line: str) -> _Mapping:
    span, rights, offset, _, inode, *_ = line.split(None, 5)
    start, _, end = span.partition("-")
    return _Mapping(int(start, 16), int(end, 16), rights, int(offset, 16), inode)


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
    """Puts code into huge pages, which a fork shares at once and its child need not look up.

    That of the interpreter, and of libraries that have been used a lot of.
    """
    inside = ctypes.cast(ctypes.pythonapi.Py_IncRef, _PLACE).value or 0
    for one, fields in _sizes():
        own = one.start <= inside < one.end
        if one.rights == "r-xp" and one.inode != "0" and (own or fields["Rss:"] * _MUCH >= one.end - one.start):
            _enlarge(_up(one.start), one.end // _HUGE * _HUGE)


def _enlarge(start: int, end: int) -> None:
    if start >= end:
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
    """Takes every hole for good, so that all that is allocated from here on lies side by side.

    What a child allocates between the interpreter's own objects it pays for with a page each.
    """
    _fill_pools()
    _fill_heap()


def _fill_pools() -> None:
    """The holes in the interpreter's pools of small blocks, up to where every size begins a new one.

    https://github.com/python/cpython/blob/3.11/Objects/obmalloc.c: pools of 16 KiB, each with a head of 48 bytes.
    """
    for size in range(_SIZES, 512 + _SIZES, _SIZES):
        for _ in range(_MOST // size):
            # The head of an object of bytes is too large for the two smallest sizes.
            one = bytes(size - _BYTES) if size > _BYTES else object() if size == _SIZES else 0.5 + len(_filled)
            _filled.append(one)
            if id(one) % _POOL == _POOL_HEAD:
                break
        else:
            return  # another kind of pools


def _fill_heap() -> None:
    """The holes in the heap of the C library."""
    try:
        allocate, free, end_of = _RAW.malloc, _RAW.free, _RAW.sbrk
    except AttributeError:
        return
    allocate.restype, allocate.argtypes = _NUMBER, [_NUMBER]
    free.restype, free.argtypes = None, [_NUMBER]
    end_of.restype = _NUMBER
    # Blocks as large as they can be lie in the largest holes, until there is none and the heap has to grow.
    end, left = end_of(0), _ALL
    while end_of(0) == end:
        left -= _HOLE
        if left < 0 or not (top := allocate(_HOLE)):
            return
    free(top)
    size = _HOLE
    while size >= _SMALLEST:
        while (place := allocate(size)) < top:
            left -= size
            if left < 0 or not place:
                return
        free(place)
        size = size * 7 // 8


def _up(address: int) -> int:
    return -(-address // _HUGE) * _HUGE


def _is_huge(start: int, size: int) -> bool:
    """Whether the kernel gave huge pages to all of it: in small ones every fork would copy it page by page."""
    return any(one.start <= start < one.end and fields["AnonHugePages:"] >= size for one, fields in _sizes())


def _sizes() -> list[tuple[_Mapping, dict[str, int]]]:
    """Every mapping with what the kernel counts in it, in bytes."""
    found: list[tuple[_Mapping, dict[str, int]]] = []
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            first, *rest = line.split()
            if not first.endswith(":"):
                found.append((_mapping(line), {}))
            elif rest[-1] == "kB":
                found[-1][1][first] = int(rest[0]) << 10
    return found
