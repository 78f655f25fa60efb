"""The warm runner: an interpreter that is warmed up once and forked for every box. Standard library only.

    runner.py --control FD --level ns [--uid N] [--imports numpy,…]
    runner.py --control FD --level uid --uid FIRST --folder /box --slots N    (in a container, see contained.py)

It listens on one socket. `{"op": "open", "id", "limits"}` with a descriptor starts a box that serves that descriptor;
the next one makes the box join a cgroup (its `cgroup.procs`), and those that follow are read to learn what the kernel
killed in it. `{"op": "kill", "id"}` ends a box, and `{"op": "ping"}` is answered. It never reads code, so no box
inherits anything of another, and its environment holds nothing but what the host chose. When the socket closes it
exits, and everything in its pid namespace with it.
"""

from __future__ import annotations

import _socket as socket
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import box
import confine
import folders
import memory
import pages
import seccomp
import users
import warm
import watch
import wire

DEFAULTS = {"--level": "ns", "--uid": "0", "--imports": "", "--packages": "", "--folder": "", "--slots": "0"}
"""What the host may leave out, read by hand: every module here makes each fork dearer. `--packages`: folders besides
the standard library; `--folder`: of the work folders where boxes have no namespaces; `--slots`: boxes at once, each
with a file system of its own (level uid)."""


class Runner:
    """Starts boxes on request and collects them when they end."""

    def __init__(self, control: socket.socket, level: str, folder: str, packages: list[str]) -> None:
        self.control, self.level = control, level
        self.boxes: dict[int, int] = {}
        """pid → the host's number of the box"""
        self.base = confine.virtual_size()
        self.program = seccomp.build(own_ipc=level == "ns")
        self.ids = os.getuid(), os.getgid()
        self.folder = folder
        # Not all of the prefix, which may be a home.
        self.readable = [*(f"{sys.base_prefix}/{name}" for name in ("bin", "lib", "lib64")), *packages]
        self.slots: users.Slots | None = None
        if level != "ns":
            confine.adopt_orphans()
            if level != "uid":
                os.mkdir(folder, 0o700)
        self.alarm, self.ring = os.pipe()
        os.set_blocking(self.alarm, False)
        os.set_blocking(self.ring, False)

    def serve(self) -> NoReturn:
        """Answers the host until it is gone."""
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
                self.collect()
            if self.control.fileno() in ready:
                data, fds = wire.take(self.control, 65536, 8)
                if not data:
                    self.end()
                self.handle(json.loads(data), fds)

    def handle(self, request: dict[str, Any], fds: list[int]) -> None:
        """One request of the host."""
        if request["op"] == "open":
            if self.slots is None or self.slots.take(request, fds[0]):
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
        """Forks a box. Where the kernel refuses, the host is told on the box's own socket."""
        try:
            pid = confine.clone_namespaces() if self.level == "ns" else os.fork()
        except OSError as error:
            sock = socket.socket(fileno=os.dup(fd))
            wire.send(sock, {"status": "host_resources", "detail": str(error)})
            sock.close()
            if self.slots:
                self.slots.clean(request["id"])
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
        """In the child: take rights away, then serve."""
        if group:
            os.write(group[0], b"0")  # the host's right to move us rides on its open file
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        limits, rules, user = request["limits"], None, None
        if self.level == "ns":
            confine.enter_namespaces(limits, *self.ids)
            os.chdir(confine.WORK)
        elif self.slots:
            user = self.slots.user(request["id"])
            confine.enter_slot(self.slots.folder(request["id"]), request["id"], user)
        else:
            rules = confine.enter_folder(self.folder, request["id"], self.level, self.readable)
            os.chdir(confine.WORK)
        sys.path[0] = confine.WORK
        os.setsid()
        host = socket.socket(fileno=os.dup(fd))
        after = 3
        for wanted in sorted({host.fileno(), rules or host.fileno(), *group[1:]}):
            os.closerange(after, wanted)
            after = wanted + 1
        os.closerange(after, 1024)
        if user:
            confine.install_filter(self.program)
        else:
            confine.drop(self.program)
        wire.send(host, {"ready": True})
        kills = memory.Kills(list(group[1:]), contained=bool(user))
        served = box.Box(host, limits, self.base, self.level, rules, user, kills)
        served.adopt(limits)  # else every box would draw the same random numbers
        try:
            served.serve()
        except SystemExit:  # the host went away while something ran
            served.end()

    def collect(self) -> None:
        """Reaps boxes that ended."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self.boxes.pop(pid, None)
            if self.slots is None:
                self._clean(number)
                continue
            if number is not None:
                self.slots.clean(number)
            for request, fd in self.slots.freed(pid):
                self.open(request, fd)
                os.close(fd)

    def _clean(self, number: int | None) -> None:
        """Without namespaces the end of a box leaves a folder, and what its init had no time to end."""
        if self.level == "ns" or number is None:
            return
        for orphan in set(watch.children(os.getpid())) - self.boxes.keys():
            watch.signal_process(orphan, signal.SIGKILL)
        folders.delete(f"{self.folder}/{number}")

    def end(self) -> NoReturn:
        """The host is gone: so is everything here."""
        for pid in self.boxes:
            os.kill(pid, signal.SIGKILL)
        if self.level not in ("ns", "uid"):
            # What a box had started is ours now.
            watch.Tree(self.level).kill_others(set())
            folders.delete(self.folder)
        os._exit(0)


def main() -> None:
    """Warms up, gives up root, forgets the way in, serves."""
    options = {**DEFAULTS, **dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))}
    level, folder, uid = options["--level"], options["--folder"], int(options["--uid"])
    control = socket.socket(fileno=int(options["--control"]))
    os.set_inheritable(control.fileno(), False)
    packages = [folder for folder in options["--packages"].split(os.pathsep) if folder]
    sys.path += packages
    os.environ.pop("LD_BIND_NOW", None)
    warm.up([name for name in options["--imports"].split(",") if name])
    if uid and level == "ns":
        confine.mount_proc()
    if uid and level != "uid":
        confine.become(uid, uid)
    pages.merge()
    pages.enlarge()
    confine.prctl(4, 0)  # PR_SET_DUMPABLE
    runner = Runner(control, level, folder, packages)
    if level == "uid":
        runner.slots = users.Slots(folder, int(options["--slots"]), uid)
    # The code that runs here later must find neither our modules nor our folder (`sys.path[0]`, see become_box).
    ours = (
        "box confine ends files folders heads landlock memory pages plain programs seccomp snapshot start users warm "
        "watch wire worker"
    )
    for name in ours.split():
        sys.modules.pop(name, None)
    confine.know_limits()
    confine.know_code_filter(level)
    gc.collect()
    pages.fill()
    gc.freeze()
    runner.serve()


if __name__ == "__main__":
    importlib.invalidate_caches()
    main()
