"""Runs the program of an agent inside its jail, where a port of the loopback leads to the model's server.

    agent.py UID PORT SOCKET READY CWD LIMITS COMMAND…

The jail's network has nothing but a loopback of its own. Connections to PORT there are forwarded to SOCKET, a unix
socket of the host that was bound into the jail, so the program uses the same address as outside. A byte on the
descriptor READY reports that the jail stands; its exit status is the program's, 128 + n after signal n.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import threading
from typing import NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from sandbox.isolation import namespaces, privileges, seccomp

_CHUNK = 65536


def forward(listener: socket.socket, path: str) -> NoReturn:
    """Connects every client to the model's socket."""
    while True:
        client, _ = listener.accept()
        model = socket.socket(socket.AF_UNIX)
        try:
            model.connect(path)
        except OSError:
            client.close()
            model.close()
            continue
        for pair in ((client, model), (model, client)):
            threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Forwards the bytes of one side until it ends, or the other side has left."""
    try:
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            end.close()


def become_program(command: list[str], ready: int, folder: str, limits: dict[str, int]) -> NoReturn:
    """Sets the limits in the child, then runs the program.

    Address space is not one of them: some runtimes reserve much of it.
    """
    pairs = [
        (resource.RLIMIT_DATA, limits["memory_mb"] << 20),
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CORE, 0),
    ]
    try:
        os.chdir(folder)
        privileges.set_limits((which, value, value) for which, value in pairs)
        os.write(ready, b"1")
        os.close(ready)
        os.execvp(command[0], command)
    except OSError as error:
        print(
            f"{command[0]} could not be started in the sandbox: {error.strerror}",
            file=sys.stderr,
            flush=True,
        )
    os._exit(127)


def main() -> NoReturn:
    """Gives up root and rights, opens the port, runs the program."""
    uid, port, path, ready, folder, limits, *command = sys.argv[1:]
    if int(uid):
        namespaces.mount_proc()
        namespaces.become(int(uid), int(uid))
    for name in ("/.tmp", "/.shm"):
        os.mkdir(namespaces.WORK + name, 0o700)
    privileges.drop(seccomp.build(network=True))
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=128)
    child = os.fork()
    if not child:
        listener.close()
        become_program(command, int(ready), folder, json.loads(limits))
    os.close(int(ready))
    threading.Thread(target=forward, args=(listener, path), daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
