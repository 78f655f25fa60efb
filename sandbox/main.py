"""The guest's main process: an interpreter that is warmed up once and forked for every box. Standard library only.

    main.py --control FD --level ns [--uid N] [--imports numpy,…]
    main.py --control FD --level uid --uid FIRST --folder /box --slots N    (in a container, see container.py)

It listens on one socket. `{"op": "open", "id", "limits"}` with a descriptor starts a box that serves that descriptor.
Further descriptors: one lets the box join a cgroup (its `cgroup.procs`), and the rest report the kernel's out-of-memory
kills in it. `{"op": "kill", "id"}` ends a box, and `{"op": "ping"}` is answered. It never reads code, so no box
inherits anything of another, and its environment holds only the host's choice. When the socket closes it exits, and
everything in its pid namespace with it.

`warm_up` imports modules and runs samples once before the first fork, so that no fork has to.
"""

from __future__ import annotations

import _socket as socket
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import site
import sys
import traceback
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from sandbox import processes, worker
from sandbox.filesystem import cleanup
from sandbox.isolation import forks, namespaces, privileges, seccomp
from sandbox.protocol import framing
from sandbox.supervisor import Supervisor

PRELOAD = (
    "abc bisect collections collections.abc copy dataclasses datetime enum functools heapq itertools json "
    "math operator random re string textwrap time typing"
).split()
"""The modules that programs of language models import most; each costs a fork microseconds and saves milliseconds."""

_SAMPLE = b"""
import collections, functools, math
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: float = 1.0
@functools.lru_cache(None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
def words(text):
    counts = collections.Counter(w.lower() for w in text.split() if w)
    return sorted(counts.items(), key=lambda kv: (-kv[1], kv[0]))
try:
    assert fib(12) == 144 and words("a b a")[0] == ("a", 2), "wrong"
    for k, v in {n: n ** 2 for n in range(3)}.items():
        print(f"{k:>3} {v:.2f}", Point(k), math.sqrt(v))
    with open("/dev/null") as f:
        f.read()
    [][1]
except IndexError as error:
    print(error)
"""
_SAMPLES = {
    "numpy": b"""
import numpy as np
a = np.arange(6.0).reshape(2, 3)
b = np.array([[1, 2], [3, 4]])
print((a @ a.T).sum(), b.mean(), np.zeros(2), np.dot(b, b), a[a > 1], np.linalg.norm(a))
"""
}
"""Code that warms up packages that the host may ask for."""


def warm_up(imports: list[str]) -> None:
    """Imports modules and runs samples; leaves stdout, stderr and the namespace as they were."""
    _import_all(imports)
    site.setquit()
    site.sethelper()
    for stream, errors in (
        (sys.stdin, "replace"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    kept = sys.modules["__main__"], sys.argv, sys.stdout, sys.stderr
    samples = [_SAMPLE, *(_SAMPLES[name] for name in imports if name in _SAMPLES)]
    unused, other = framing.pair()
    interpreter = worker.Interpreter(unused)
    try:
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        for source in (*samples, b"1 / 0", b"x = 1\nx", b"def f(:"):
            interpreter.cell("<warm>", source)
        sys.stdout, sys.stderr = kept[2:]
        for source in samples:
            worker.script(source, "<warm>")
        sys.stdout.flush()
    finally:
        sys.modules["__main__"], sys.argv, sys.stdout, sys.stderr = kept
        unused.close()
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _import_all(imports: list[str]) -> None:
    """Imports without at-fork hooks: `random` would reseed in every fork, and a rollback has to keep its sequence."""
    register = os.register_at_fork
    os.register_at_fork = lambda **_: None
    try:
        for name in (*PRELOAD, *imports):
            importlib.import_module(name)
        if "numpy" in sys.modules:  # imported later, it could not be seeded with the session
            importlib.import_module("numpy.random")
    finally:
        os.register_at_fork = register


DEFAULTS = {"--level": "ns", "--uid": "0", "--imports": "", "--packages": "", "--folder": "", "--slots": "0",
            "--grading": "0"}  # fmt: skip
"""Options that the host may leave out, parsed by hand: every imported module makes each fork more expensive.
`--packages`: folders besides the standard library; `--folder`: of the work folders of boxes without namespaces;
`--slots`: boxes at once, each with a file system of its own (level uid); `--grading`: whether the boxes only grade."""


class ForkServer:
    """Forks boxes on request and reaps them when they end."""

    def __init__(
        self, control: socket.socket, level: str, folders: namespaces.Folders, packages: list[str]
    ) -> None:
        self.control, self.level = control, level
        self.boxes: dict[int, int] = {}
        """pid → the host's number of the box."""
        self.base = privileges.virtual_size()
        self.program = seccomp.build(own_ipc=level == "ns")
        self.ids = os.getuid(), os.getgid()
        # Not the whole prefix, which may be a home folder.
        self.readable = [
            *(f"{sys.base_prefix}/{name}" for name in ("bin", "lib", "lib64")),
            *packages,
        ]
        self.folders = folders
        if level != "ns":
            privileges.adopt_orphans()
        self.alarm, self.ring = os.pipe()
        os.set_blocking(self.alarm, False)
        os.set_blocking(self.ring, False)

    def serve(self) -> NoReturn:
        """Answers the host until it closes the socket."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.ring, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.alarm, select.POLLIN)
        self.control.send(json.dumps({"ready": True, "uid": self.ids[0]}).encode())
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self.alarm in ready:
                os.read(self.alarm, 4096)
                self.reap()
            if self.control.fileno() in ready:
                data, fds = framing.take(self.control, 65536, 8)
                if not data:
                    self.end()
                self.handle(json.loads(data), fds)

    def handle(self, request: dict[str, Any], fds: list[int]) -> None:
        """Serves one request of the host."""
        if request["op"] == "open":
            if self.folders.take(request, fds[0]):
                self.open(request, *fds)
                for fd in fds:
                    os.close(fd)
        elif request["op"] == "ping":
            self.control.send(b'{"pong": true}')
        elif request["op"] == "kill":
            for pid, number in self.boxes.items():
                if number == request["id"]:
                    os.kill(pid, signal.SIGKILL)

    def open(self, request: dict[str, Any], fd: int, *group: int) -> None:
        """Forks a box. If the kernel refuses, reports that to the host on the box's own socket."""
        try:
            pid = forks.namespaces_fork() if self.level == "ns" else os.fork()
        except OSError as error:
            sock = socket.socket(fileno=os.dup(fd))
            framing.send(sock, {"status": "host_resources", "detail": str(error)})
            sock.close()
            if self.level != "ns":
                self.folders.clean(request["id"])
            return
        if pid:
            self.boxes[pid] = request["id"]
            return
        try:
            self.become_box(fd, request, group)
        except BaseException as error:  # noqa: BLE001 - last stop of a forked child: it must never return
            if not isinstance(error, SystemExit):
                traceback.print_exc()
        os._exit(1)

    def become_box(self, fd: int, request: dict[str, Any], group: tuple[int, ...]) -> NoReturn:
        """Gives up rights in the child, then serves."""
        if group:
            os.write(group[0], b"0")  # the open file carries the host's right to do this
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        limits, rules = request["limits"], None
        folder, user = self.folders.of(request["id"])
        host = socket.socket(fileno=os.dup(fd))
        after = 3
        for wanted in sorted({host.fileno(), *group[1:]}):
            os.closerange(after, wanted)
            after = wanted + 1
        os.closerange(after, 1024)
        kills = processes.OutOfMemoryKills(
            list(group[1:]), contained=user is not None
        )  # before /proc is restricted
        if self.level == "ns":
            namespaces.enter_namespaces(limits, *self.ids)
        else:
            place = folder, request["id"], self.level, user
            rules = namespaces.enter_folder(*place, self.readable)
        sys.path[0] = namespaces.WORK
        os.setsid()
        if user:
            privileges.install_filter(self.program)
        else:
            privileges.drop(self.program)
        framing.send(host, {"ready": True})
        served = Supervisor(host, limits, self.base, self.level, rules, user, kills)
        served.adopt(limits)  # else every box would draw the same random numbers
        try:
            served.serve()
        except SystemExit:  # the host closed the socket while something ran
            served.end()

    def reap(self) -> None:
        """Reaps boxes that ended."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self.boxes.pop(pid, None)
            ready = self.folders.give_back(pid)
            if number is not None and self.level != "ns":
                own = self.boxes.keys() | self.folders.cleaning.keys()
                for orphan in set(processes.children(os.getpid())) - own:
                    processes.signal_process(orphan, signal.SIGKILL)
                self.folders.clean(number)
                ready += self.folders.give_back(0)
            for request, fd in ready:
                self.open(request, fd)
                os.close(fd)

    def end(self) -> NoReturn:
        """Ends everything once the host has closed the socket."""
        for pid in self.boxes:
            os.kill(pid, signal.SIGKILL)
        if self.level not in ("ns", "uid"):
            # The processes of boxes are orphans that this process adopted.
            processes.ProcessTree(self.level).kill_others(set())
            cleanup.delete(self.folders.base)
        os._exit(0)


def read_all(folders: tuple[str, ...]) -> None:
    """Reads every file of an image, some 80 MB, so that a solution cannot choose which are in the page cache.

    Containers of one image share it, and how long the first read of a file takes is a message.
    """
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    file = os.open(f"{place}/{name}", os.O_RDONLY | os.O_NOFOLLOW)
                    while os.read(file, 1 << 20):
                        pass
                    os.close(file)


def main() -> None:
    """Warms up, gives up root, hides its own modules, serves."""
    options = {**DEFAULTS, **dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))}
    level, folder, uid = options["--level"], options["--folder"], int(options["--uid"])
    control = socket.socket(fileno=int(options["--control"]))
    os.set_inheritable(control.fileno(), False)
    packages = [folder for folder in options["--packages"].split(os.pathsep) if folder]
    sys.path += packages
    os.environ.pop("LD_BIND_NOW", None)
    if level == "uid" and options["--grading"] == "1":
        read_all(("/usr", "/opt", "/lib", "/lib64"))
    warm_up([name for name in options["--imports"].split(",") if name])
    if uid and level == "ns":
        namespaces.mount_proc()
    if uid and level != "uid":
        namespaces.become(uid, uid)
    privileges.set_dumpable(False)
    slots = int(options["--slots"])
    if level not in ("ns", "uid", "landlock", "bare") or (slots > 0) != (level == "uid"):
        raise ValueError(f"level {level!r} with {slots} slots")
    if level in ("landlock", "bare"):
        os.mkdir(folder, 0o700)
    server = ForkServer(control, level, namespaces.Folders(folder, slots, uid), packages)
    # The model's code must find neither these modules nor their folder (`sys.path[0]`, see become_box).
    for name in [name for name in sys.modules if name.partition(".")[0] == "sandbox"]:
        del sys.modules[name]
    privileges.prepare_code_filter(level, grading=options["--grading"] == "1")
    gc.collect()
    gc.freeze()
    server.serve()


if __name__ == "__main__":
    # As importlib.invalidate_caches does, which imports `random`, with its at-fork hook, on Python 3.13.
    sys.path_importer_cache.clear()
    main()
