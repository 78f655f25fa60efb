"""Frames over a stream socket: an 8-byte prefix with two lengths, a JSON header, raw bytes.

Used between host and box, and between box and worker. A worker runs the model's code, so a reader states how much it
accepts and treats everything else as a broken peer; nothing here evaluates what it reads.
"""

from __future__ import annotations

import _socket as socket  # `socket` takes 800 KiB that every fork would copy
import json
import select
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

PREFIX = struct.Struct("!II")
_SECONDS = struct.Struct("@ll")
_NEWLINE = "\x1e"
"""Stands for a newline in a header of lines."""
_encode = json.JSONEncoder(separators=(",", ":")).encode
MAX_HEADER = 1 << 16
MAX_BODY = 64 << 20
MAX_ANSWER = 1 << 20
"""Bytes of one call's answer, as text."""


class Broken(Exception):
    """The peer sent something other than a frame, or closed in the middle of one."""


class Frame(NamedTuple):
    header: dict[str, Any]
    body: bytes


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    head = _encode(header).encode()
    return PREFIX.pack(len(head), len(body)) + head + body


def pair() -> tuple[socket.socket, socket.socket]:
    """Return a socket.socketpair() without looking up the names of both ends, which have none."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def set_timeout(sock: socket.socket, seconds: int = 2) -> None:
    """Sets the seconds after which one call of the socket raises OSError; for a whole frame see `until`."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, _SECONDS.pack(seconds, 0))


def send(
    sock: socket.socket, header: dict[str, Any], body: bytes = b"", fds: Sequence[int] = ()
) -> None:
    """Sends one frame, with descriptors on its first byte. Blocks, up to the socket's timeout."""
    _send(sock, pack(header, body), fds)


def _send(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    if fds:
        data = data[sock.sendmsg([data], _rights(fds)) :]
    if data:
        sock.sendall(data)


def _rights(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]


def say(
    sock: socket.socket,
    header: dict[str, str],
    body: bytes = b"",
    fds: Sequence[int] = (),
    until: float | None = None,
) -> None:
    """Sends a frame between box and worker: the header as `name=value` lines, which is quicker than JSON.

    `until`: the monotonic time by which it has to be sent whole, else TimeoutError; None: the socket's own timeout.
    """
    head = "\n".join([f"{name}={value}".replace("\n", _NEWLINE) for name, value in header.items()])
    data = head.encode("utf-8", "replace")
    frame = PREFIX.pack(len(data), len(body)) + data + body
    if until is None:
        _send(sock, frame, fds)
    else:
        _send_until(sock, frame, fds, until)


def _send_until(sock: socket.socket, data: bytes, fds: Sequence[int], until: float) -> None:
    """Sends with a timeout for the whole frame: a slow reader would restart the kernel's with every piece."""
    rights = _rights(fds) if fds else []
    view = memoryview(data)
    while True:
        try:
            sent = sock.sendmsg([view], rights, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        if sent:
            view, rights = view[sent:], []
        if not view:
            return
        _wait(sock, select.POLLOUT, until)


def _wait(sock: socket.socket, event: int, until: float) -> None:
    """Waits until a socket is ready. Raises TimeoutError."""
    poll = select.poll()
    poll.register(sock, event)
    left = until - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000 + 1):
        raise TimeoutError("the peer neither reads nor writes")


def _lines(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = {}
    for line in data.decode("utf-8", "replace").split("\n"):
        name, _, value = line.partition("=")
        header[name] = value.replace(_NEWLINE, "\n")
    return header


def receive(sock: socket.socket, until: float) -> Frame | None:
    """Return the next frame of `say`, at most MAX_ANSWER large, from a peer that began to send; None if it closed
    instead.

    Raises Broken or TimeoutError if it is not whole by `until`, by the monotonic clock: a peer that sends a byte now
    and then cannot block the reader.
    """
    start = sock.recv(PREFIX.size)
    if not start:
        return None
    head_size, body_size = _sizes(
        start + _exactly(sock, PREFIX.size - len(start), until), MAX_ANSWER
    )
    data = _exactly(sock, head_size + body_size, until)
    return Frame(_lines(data[:head_size]), data[head_size:])


def take(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Bytes, at most `size`, and the descriptors that came with them, at most `most`."""
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_LEN(4 * most))
    fds: list[int] = []
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += struct.unpack(f"{len(rights) // 4}i", rights[: len(rights) // 4 * 4])
    return data, fds


def receive_one(sock: socket.socket, max_fds: int) -> tuple[Frame, list[int]] | None:
    """Return the frame of a peer that sends one and waits, with its descriptors. One read if it is small; None if
    closed.
    """
    data, fds = take(sock, 1 << 16, max_fds)
    if not data:
        return None
    data += _exactly(sock, PREFIX.size - len(data))
    head_size, body_size = _sizes(data[: PREFIX.size])
    data += _exactly(sock, PREFIX.size + head_size + body_size - len(data))
    head_end = PREFIX.size + head_size
    return Frame(_lines(data[PREFIX.size : head_end]), data[head_end:]), fds


def _sizes(prefix: bytes | bytearray, max_body: int = MAX_BODY) -> tuple[int, int]:
    head_size, body_size = PREFIX.unpack(prefix)
    if head_size > MAX_HEADER or body_size > max_body:
        raise Broken("a frame larger than the limit")
    return head_size, body_size


def _exactly(sock: socket.socket, size: int, until: float | None = None) -> bytes:
    if size <= 0:
        return b""
    data = bytearray()
    flags = 0 if until is None else socket.MSG_DONTWAIT
    while len(data) < size:
        try:
            piece = sock.recv(min(size - len(data), 1 << 20), flags)
        except BlockingIOError:
            if until is None:
                raise
            _wait(sock, select.POLLIN, until)
            continue
        if not piece:
            raise Broken("closed in the middle of a frame")
        data += piece
        if until is not None and len(data) < size and time.monotonic() > until:
            raise Broken("late in the middle of a frame")
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

    def __init__(self, max_body: int = MAX_BODY) -> None:
        self.max_body = max_body
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete with this piece."""
        if not self._data and len(data) >= PREFIX.size:  # usually one frame, which needs no copy
            head_size, body_size = _sizes(data[: PREFIX.size], self.max_body)
            head_end = PREFIX.size + head_size
            if len(data) == head_end + body_size:
                return [Frame(_header(data[PREFIX.size : head_end]), data[head_end:])]
        self._data += data
        frames: list[Frame] = []
        while len(self._data) >= PREFIX.size:
            head_size, body_size = _sizes(self._data[: PREFIX.size], self.max_body)
            end = PREFIX.size + head_size + body_size
            if len(self._data) < end:
                break
            head_end = PREFIX.size + head_size
            frames.append(
                Frame(
                    _header(bytes(self._data[PREFIX.size : head_end])),
                    bytes(self._data[head_end:end]),
                )
            )
            del self._data[:end]
        return frames


ENVELOPE = struct.Struct("!IBI")
"""On the one stream of a container: number of the box, kind, number of bytes that follow."""
CONTROL, DATA, CLOSE = 0, 1, 2
FIRST_GROUP = 20_000
"""gid of a container's first slot; the host mounts the slots' file systems with it."""


def envelope(number: int, kind: int, data: bytes = b"") -> bytes:
    """Return one envelope as bytes."""
    return ENVELOPE.pack(number, kind, len(data)) + data


class Envelopes:
    """Puts envelopes together from pieces as they arrive; raises Broken on anything else."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """Return the envelopes that are complete with this piece, as `(number, kind, bytes)`."""
        self._data += data
        found: list[tuple[int, int, bytes]] = []
        while len(self._data) >= ENVELOPE.size:
            number, kind, size = ENVELOPE.unpack_from(self._data)
            if kind > CLOSE or size > MAX_HEADER + MAX_BODY + PREFIX.size:
                raise Broken("invalid envelope")
            end = ENVELOPE.size + size
            if len(self._data) < end:
                break
            found.append((number, kind, bytes(self._data[ENVELOPE.size : end])))
            del self._data[:end]
        return found
