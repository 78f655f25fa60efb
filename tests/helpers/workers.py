"""Workers of pytest-xdist that are forked from the server of the trainings, which has imported torch and the like once.

xdist starts a worker as `PYTHON -u -c CODE` and takes the words for PYTHON from us: they run this file, which passes
its standard streams and CODE on, and lives as long as the worker does.
"""

import os
import signal
import socket
import sys
from pathlib import Path

# What many test modules import, besides what a training does.
PRELOADED = ["mcp", "textual.app", "textual.pilot", "agentrl_cli.tui.app"]


def pass_on(address: str, code: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [code.encode()], [0, 1, 2])
        os.close(0)  # the worker's alone: xdist sees by their ends that it has ended
        os.close(1)
        connection.recv(1)


def run_worker(connection: socket.socket) -> None:
    """Become `python -c CODE` in a process that was forked."""
    import multiprocessing
    import types
    from multiprocessing import forkserver

    from tests.helpers.train import as_program

    code, streams, _, _ = socket.recv_fds(connection, 65536, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    multiprocessing.set_start_method(None, force=True)  # the default
    # As its docstring says; but Python would start another server in a process that a server has forked.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    with as_program():
        exec(code, vars(main))


def fork_workers(folder: str) -> str:
    """Serve processes that run this file, and return the words that run it; the socket is made in `folder`."""
    import multiprocessing
    import shlex
    import threading

    from tests.helpers import train

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*train.PRELOADED[:-1], *PRELOADED, train.PRELOADED[-1]])
    address = os.path.join(folder, "workers")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                context.Process(target=run_worker, args=(connection,)).start()

    threading.Thread(target=serve, daemon=True).start()
    return shlex.join([sys.executable, "-IS", __file__, address])


def import_share(root: Path, number: int, workers: int) -> None:
    """Import one of so many parts of the test modules before the others.

    pytest rewrites the asserts of each: what one worker has rewritten, the others read as bytecode.
    """
    import contextlib
    import importlib

    import pytest

    for path in sorted(root.glob("tests/**/test_*.py"))[number::workers]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collection reports them
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


if __name__ == "__main__":
    pass_on(sys.argv[1], sys.argv[-1])
