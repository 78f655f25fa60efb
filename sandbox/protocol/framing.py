"""Frames over a stream socket: an 8-byte prefix with two lengths, a JSON header, raw bytes.

Used between host and box, between box and worker, and around both on the one stream of a container. A worker runs the
model's code, so a reader states how much it accepts and treats everything else as a broken peer; nothing here evaluates
its input.
"""

from __future__ import annotations

import _socket as socket  # `socket` takes 800 KiB that every fork would copy
import json
import select
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

PREFIX = struct.Struct("!II")
_encode = json.JSONEncoder(separators=(",", ":")).encode
MAX_HEADER = 1 << 16
MAX_BODY = 64 << 20
MAX_ANSWER = 1 << 20
"""Bytes of one call's answer, as text."""
MAX_WRAPPED = PREFIX.size + MAX_HEADER + MAX_BODY
"""Bytes of a frame that another one carries."""
FIRST_GROUP = 20_000
"""gid of a container's first slot; the host mounts the slots' file systems with it."""


class Broken(Exception):
    """The peer sent something other than a frame, or closed in the middle of one."""


class Frame(NamedTuple):
    header: dict[str, Any]
    body: bytes
    fds: Sequence[int] = ()
    """Descriptors that came with it."""


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    head = _encode(header).encode()
    return PREFIX.pack(len(head), len(body)) + head + body


def pair() -> tuple[socket.socket, socket.socket]:
    """Return a socket.socketpair() without looking up the names of both ends, which have none."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def send(
    sock: socket.socket,
    header: dict[str, Any],
    body: bytes = b"",
    fds: Sequence[int] = (),
    until: float | None = None,
) -> None:
    """Sends one frame, with descriptors on its first byte.

    `until`: the monotonic time by which it has to be sent whole, else TimeoutError: a slow reader would restart a
    timeout of the kernel with every piece.
    """
    view = memoryview(pack(header, body))
    if fds:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))
        wait(sock, select.POLLOUT, until)
        view = view[sock.sendmsg([view], [rights], socket.MSG_DONTWAIT) :]
    while view:  # not by sendmsg, which the filter of a box that grades denies
        wait(sock, select.POLLOUT, until)
        with suppress(BlockingIOError):
            view = view[sock.send(view, socket.MSG_DONTWAIT) :]


def wait(sock: socket.socket, event: int, until: float | None) -> None:
    """Waits until a socket is ready. Raises TimeoutError."""
    poll = select.poll()
    poll.register(sock, event)
    left = None if until is None else (until - time.monotonic()) * 1000
    if (left is not None and left <= 0) or not poll.poll(None if left is None else left + 1):
        raise TimeoutError("the peer neither reads nor writes")


def receive(
    sock: socket.socket, until: float | None = None, most: int = MAX_BODY, max_fds: int = 0
) -> Frame | None:
    """Return the next frame, with a body of at most `most` bytes; None if the peer closed instead.

    Raises Broken, or TimeoutError if it is not whole by `until`, by the monotonic clock: a peer that sends a byte now
    and then cannot block the reader.
    """
    wait(sock, select.POLLIN, until)
    start, fds = take(sock, PREFIX.size, max_fds) if max_fds else (sock.recv(PREFIX.size), [])
    if not start:
        return None
    start += _exactly(sock, PREFIX.size - len(start), until)
    head_size, body_size = _sizes(start, most)
    data = _exactly(sock, head_size + body_size, until)
    return Frame(_header(data[:head_size]), data[head_size:], fds)


def take(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Bytes, at most `size`, and the descriptors that came with them, at most `most`."""
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_LEN(4 * most))
    fds: list[int] = []
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += struct.unpack(f"{len(rights) // 4}i", rights[: len(rights) // 4 * 4])
    return data, fds


def _sizes(prefix: bytes | bytearray, most: int) -> tuple[int, int]:
    head_size, body_size = PREFIX.unpack_from(prefix)
    if head_size > MAX_HEADER or body_size > most:
        raise Broken("a frame larger than the limit")
    return head_size, body_size


def _exactly(sock: socket.socket, size: int, until: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        wait(sock, select.POLLIN, until)
        piece = sock.recv(min(size - len(data), 1 << 20), socket.MSG_DONTWAIT)
        if not piece:
            raise Broken("closed in the middle of a frame")
        data += piece
    return bytes(data)


def _header(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data.decode())  # given bytes, json would guess the encoding first
    except (ValueError, RecursionError) as error:
        raise Broken(f"a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise Broken("a header that is not an object")
    return header


class Reader:
    """Puts frames together from pieces as they arrive; raises Broken on anything else."""

    def __init__(self, most: int = MAX_BODY) -> None:
        self.most = most
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete with this piece."""
        self._data += data
        frames: list[Frame] = []
        while len(self._data) >= PREFIX.size:
            head_size, body_size = _sizes(self._data, self.most)
            head_end = PREFIX.size + head_size
            end = head_end + body_size
            if len(self._data) < end:
                break
            header = _header(bytes(self._data[PREFIX.size : head_end]))
            frames.append(Frame(header, bytes(self._data[head_end:end])))
            del self._data[:end]
        return frames
