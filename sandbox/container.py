"""Process 1 of a container: carries bytes between the host's one stream and the sockets of the boxes.

    container.py OPTION…    (the options of main.py, except --control)

It starts the fork server, which never sees these bytes, so that no box inherits anything of another. When the host
exits, its stream ends, and with it this process and the container.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from sandbox.protocol import framing

_PIECE = 1 << 18


class BoxSocket:
    """This end of one box's socket, and the bytes still to be written to it."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number, self.sock = number, sock
        self.waiting = bytearray()


class Relay:
    """Moves envelopes. Writing to the host may block: it always reads."""

    def __init__(self, host_in: int, host_out: int, runner: socket.socket) -> None:
        self.host_in, self.host_out, self.runner = host_in, host_out, runner
        self.boxes: dict[int, BoxSocket] = {}
        self.envelopes = framing.Envelopes()
        self.selector = selectors.DefaultSelector()
        self.selector.register(host_in, selectors.EVENT_READ, self.from_host)
        self.selector.register(runner, selectors.EVENT_READ, self.from_runner)

    def serve(self) -> NoReturn:
        """Carries until the host or the fork server closes its end."""
        while True:
            for key, events in self.selector.select():
                if isinstance(key.data, BoxSocket):
                    self.with_box(key.data, events)
                else:
                    key.data()
            while True:
                try:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        break
                except ChildProcessError:
                    os._exit(1)  # the fork server has ended

    def emit(self, number: int, kind: int, data: bytes = b"") -> None:
        """Writes one envelope to the host."""
        left = memoryview(framing.envelope(number, kind, data))
        while left:
            left = left[os.write(self.host_out, left) :]

    def from_host(self) -> None:
        """Passes on the host's envelopes."""
        data = os.read(self.host_in, _PIECE)
        if not data:
            os._exit(0)
        for number, kind, body in self.envelopes.feed(data):
            if kind == framing.CONTROL:
                self.control(json.loads(body), body)
                continue
            box = self.boxes.get(number)
            if box is None:
                continue
            if kind == framing.CLOSE:
                self.close(box)
            else:
                box.waiting += body
                self.flush(box)

    def control(self, request: dict[str, Any], data: bytes) -> None:
        """Sends a request to the fork server, with a socket if it opens a box."""
        if request["op"] != "open":
            self.runner.send(data)
            return
        ours, theirs = socket.socketpair()
        socket.send_fds(self.runner, [data], [theirs.fileno()])
        theirs.close()
        ours.setblocking(False)
        box = self.boxes[request["id"]] = BoxSocket(request["id"], ours)
        self.selector.register(ours, selectors.EVENT_READ, box)

    def from_runner(self) -> None:
        """Passes the fork server's messages on to the host."""
        data = self.runner.recv(65536)
        if not data:
            os._exit(1)
        self.emit(0, framing.CONTROL, data)

    def with_box(self, box: BoxSocket, events: int) -> None:
        """Moves the bytes that one box sent, or can receive now."""
        if self.boxes.get(box.number) is not box:
            return  # closed by an earlier event
        if events & selectors.EVENT_WRITE:
            self.flush(box)
        if events & selectors.EVENT_READ:
            try:
                data = box.sock.recv(_PIECE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self.emit(box.number, framing.DATA, data)
            else:
                self.close(box)
                self.emit(box.number, framing.CLOSE)

    def flush(self, box: BoxSocket) -> None:
        """Writes as many bytes as the box receives without blocking."""
        try:
            while box.waiting:
                del box.waiting[: box.sock.send(box.waiting)]
        except BlockingIOError:
            self.selector.modify(box.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, box)
            return
        except OSError:
            box.waiting.clear()  # the box has ended; the end of its stream is read next
        self.selector.modify(box.sock, selectors.EVENT_READ, box)

    def close(self, box: BoxSocket) -> None:
        """Closes the socket of a box, which then exits."""
        self.boxes.pop(box.number, None)
        self.selector.unregister(box.sock)
        box.sock.close()


def main() -> None:
    """Starts the fork server without the host's stream, then carries."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.set_inheritable(theirs.fileno(), True)
        runner = os.path.join(os.path.dirname(os.path.abspath(__file__)), "main.py")
        command = [
            *sys.orig_argv[: sys.orig_argv.index(sys.argv[0])],
            runner,
            "--control",
            str(theirs.fileno()),
        ]
        os.execv(sys.executable, [*command, *sys.argv[1:]])
    theirs.close()
    Relay(0, 1, ours).serve()


if __name__ == "__main__":
    main()
