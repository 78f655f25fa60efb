"""Process 1 of a container: carries bytes between the host's one stream and the sockets of the boxes.

    contained.py OPTION…    (the options of runner.py, but for --control)

It starts the runner, which never sees what passes here, so that no box inherits anything of another. When the host
goes away, its stream ends, this process with it, and so the container.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import wire

_PIECE = 1 << 18


class Lane:
    """Our end of one box's socket, and what is still to be written to it."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number, self.sock = number, sock
        self.waiting = bytearray()


class Relay:
    """Moves envelopes. Writing to the host blocks: it always reads."""

    def __init__(self, host_in: int, host_out: int, runner: socket.socket) -> None:
        self.host_in, self.host_out, self.runner = host_in, host_out, runner
        self.lanes: dict[int, Lane] = {}
        self.envelopes = wire.Envelopes()
        self.selector = selectors.DefaultSelector()
        self.selector.register(host_in, selectors.EVENT_READ, self.from_host)
        self.selector.register(runner, selectors.EVENT_READ, self.from_runner)

    def serve(self) -> NoReturn:
        """Until the host or the runner is gone."""
        while True:
            for key, events in self.selector.select():
                if isinstance(key.data, Lane):
                    self.with_box(key.data, events)
                else:
                    key.data()
            while True:
                try:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        break
                except ChildProcessError:
                    os._exit(1)  # the runner is gone, too

    def emit(self, number: int, kind: int, data: bytes = b"") -> None:
        """Writes one envelope to the host."""
        left = memoryview(wire.envelope(number, kind, data))
        while left:
            left = left[os.write(self.host_out, left) :]

    def from_host(self) -> None:
        """What the host sent."""
        data = os.read(self.host_in, _PIECE)
        if not data:
            os._exit(0)
        for number, kind, body in self.envelopes.feed(data):
            if kind == wire.CONTROL:
                self.control(json.loads(body), body)
                continue
            lane = self.lanes.get(number)
            if lane is None:
                continue
            if kind == wire.CLOSE:
                self.close(lane)
            else:
                lane.waiting += body
                self.flush(lane)

    def control(self, request: dict[str, Any], data: bytes) -> None:
        """A request to the runner; to open a box it needs a socket for it."""
        if request["op"] != "open":
            self.runner.send(data)
            return
        ours, theirs = socket.socketpair()
        socket.send_fds(self.runner, [data], [theirs.fileno()])
        theirs.close()
        ours.setblocking(False)
        lane = self.lanes[request["id"]] = Lane(request["id"], ours)
        self.selector.register(ours, selectors.EVENT_READ, lane)

    def from_runner(self) -> None:
        """What the runner says goes to the host."""
        data = self.runner.recv(65536)
        if not data:
            os._exit(1)
        self.emit(0, wire.CONTROL, data)

    def with_box(self, lane: Lane, events: int) -> None:
        """Moves what one box sent, or can take now."""
        if self.lanes.get(lane.number) is not lane:
            return  # closed by an earlier event
        if events & selectors.EVENT_WRITE:
            self.flush(lane)
        if events & selectors.EVENT_READ:
            try:
                data = lane.sock.recv(_PIECE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self.emit(lane.number, wire.DATA, data)
            else:
                self.close(lane)
                self.emit(lane.number, wire.CLOSE)

    def flush(self, lane: Lane) -> None:
        """Writes what the box takes without waiting."""
        try:
            while lane.waiting:
                del lane.waiting[: lane.sock.send(lane.waiting)]
        except BlockingIOError:
            self.selector.modify(lane.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, lane)
            return
        except OSError:
            lane.waiting.clear()  # the box is gone; its end is read next
        self.selector.modify(lane.sock, selectors.EVENT_READ, lane)

    def close(self, lane: Lane) -> None:
        """The box exits when its socket closes."""
        self.lanes.pop(lane.number, None)
        self.selector.unregister(lane.sock)
        lane.sock.close()


def main() -> None:
    """Starts the runner without the host's stream, then carries."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.set_inheritable(theirs.fileno(), True)
        runner = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runner.py")
        command = [*sys.orig_argv[: sys.orig_argv.index(sys.argv[0])], runner, "--control", str(theirs.fileno())]
        os.execv(sys.executable, [*command, *sys.argv[1:]])
    theirs.close()
    Relay(0, 1, ours).serve()


if __name__ == "__main__":
    main()
