"""Process 1 of a container: carries bytes between the host's one stream and the sockets of the boxes.

    container.py OPTION…    (the options of main.py, except --control)

On the stream a frame `{"op": "data" | "close", "id"}` carries bytes of a box, or its end; every other one is a request
to the fork server, or its message. The fork server never sees the bytes, so that no box inherits anything of another.
When the host exits, its stream ends, and with it this process and the container.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from sandbox.protocol import framing

_PIECE = 1 << 18


class Relay:
    """Moves frames. Writing to the host may block: it always reads."""

    def __init__(self, runner: socket.socket) -> None:
        self.runner = runner
        self.boxes: dict[int, asyncio.StreamWriter] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> NoReturn:
        """Carries until the host or the fork server closes its end."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, reap)
        loop.add_reader(self.runner, self.from_runner)
        host = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(host), sys.stdin)
        frames = framing.Reader(framing.MAX_WRAPPED)
        while data := await host.read(_PIECE):
            for header, body, _ in frames.feed(data):
                await self.handle(header, body)
        os._exit(0)

    async def handle(self, header: dict[str, Any], body: bytes) -> None:
        """Passes on one frame of the host; a socket goes with a request to open a box."""
        number = header.get("id", 0)
        if header["op"] == "data":
            if number in self.boxes:
                self.boxes[number].write(body)
        elif header["op"] == "close":
            if number in self.boxes:
                self.boxes.pop(number).transport.abort()  # the box then exits
        elif header["op"] == "open":
            ours, theirs = socket.socketpair()
            socket.send_fds(self.runner, [json.dumps(header).encode()], [theirs.fileno()])
            theirs.close()
            reader, self.boxes[number] = await asyncio.open_unix_connection(sock=ours)
            task = asyncio.create_task(self.from_box(number, reader))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        else:
            self.runner.send(json.dumps(header).encode())

    async def from_box(self, number: int, reader: asyncio.StreamReader) -> None:
        """Passes the bytes of a box on to the host, and its end."""
        try:
            while data := await reader.read(_PIECE):
                emit({"op": "data", "id": number}, data)
        except OSError:
            pass  # the box has ended
        if writer := self.boxes.pop(number, None):
            writer.transport.abort()
            emit({"op": "close", "id": number})

    def from_runner(self) -> None:
        """Passes the fork server's messages on to the host."""
        data = self.runner.recv(65536)
        if not data:
            os._exit(1)
        emit(json.loads(data))


def emit(header: dict[str, Any], data: bytes = b"") -> None:
    """Writes one frame to the host."""
    left = memoryview(framing.pack(header, data))
    while left:
        left = left[os.write(1, left) :]


def reap() -> None:
    """Reaps the children that ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        os._exit(1)  # the fork server has ended


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
        python = sys.orig_argv[: sys.orig_argv.index(sys.argv[0])]
        control = ["--control", str(theirs.fileno())]
        os.execv(sys.executable, [*python, runner, *control, *sys.argv[1:]])
    theirs.close()
    asyncio.run(Relay(ours).serve())


if __name__ == "__main__":
    main()
