"""The init process of one box: it starts a session's processes, supervises them, and answers the host.

At levels with pid namespaces a box is pid 1 of its own, so its end is the end of everything it started. It never runs
the model's code, and takes from a worker's answer no more than the choice among results that are the model's fault.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from sandbox import checkpoints, exit_status
from sandbox.box import Answer, Box
from sandbox.cells import Cells
from sandbox.execution import Execution, supervise
from sandbox.filesystem import files
from sandbox.isolation import users
from sandbox.launcher import Launcher, Stopped
from sandbox.protocol import framing

_NOT_STARTED = {"status": "timeout", "detail": "wall", "kept": True, "out": 0, "cut": False}
"""The result of a program that did not start within its wall limit."""


class Supervisor:
    """Serves one box."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.cells = Cells(box)
        self.launcher = Launcher(box.host, box.level, box.base, box.user, box.rules, box.tree)

    def serve(self) -> NoReturn:
        """Answers requests until the host closes the socket; then everything in the box ends."""
        box = self.box
        handlers = {"cell": self.cells.cell, "calls": self.cells.calls, "back": self.cells.back}
        handlers |= {"run": self.run, "bash": self.run, "ping": lambda *_: ({"status": "ok"}, b"")}
        for header, body in self._requests():
            op = header["op"]
            if op == "adopt":
                self.adopt(header["limits"])
                continue
            try:
                if op in handlers:
                    reply, data = handlers[op](header, body)
                else:
                    if header.get("keep"):
                        box.checkpoints.add(header, box.files.take(), None, box.cells)
                    with users.acting_as(box.user):
                        reply, data = files.handle(header, body)
            except OSError as error:  # the host's fault: the box itself could not do it
                reply, data = {"status": "host_resources", "detail": f"{op}: {error}"}, b""
            framing.send(box.host, {"id": header.get("id"), **reply}, data)
        self.end()

    def _requests(self) -> Iterator[framing.Frame]:
        """Yield the host's requests, usually one per read, until it closes the socket."""
        box, reader = self.box, framing.Reader()
        while data := checkpoints.receive(
            box.host, box.process, lambda: box.tree.quiesce(box.list_protected())
        ):
            yield from reader.feed(data)

    def adopt(self, limits: dict[str, Any]) -> None:
        """Gives a box that was started in advance to a session. Sends no answer."""
        self.box.limits = limits
        self.launcher.end_template()
        seed = limits.get("seed")
        sys.modules["random"].seed(
            seed
        )  # not imported here: before the warm-up it would hook every fork
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(None if seed is None else seed % (1 << 32))

    def end(self) -> NoReturn:
        """Kills the box's processes. In a pid namespace the exit of pid 1 does that."""
        if self.box.level != "ns":
            self.box.tree.kill_others(set())
        os._exit(0)

    def run(self, header: dict[str, Any], body: bytes) -> Answer:
        """Runs one program in a process of its own: Python (`run`) or a shell command (`bash`)."""
        box = self.box
        limits = box.limits_of(header)
        before = box.files.take() if header.get("keep") or header.get("reset") else None
        if header.get("keep"):
            box.checkpoints.add(header, before, None, box.cells)
        out, err, note = pipes = os.pipe(), os.pipe(), os.pipe()
        began = time.monotonic()
        try:
            split = header.get("split", len(body))
            fds = out[1], err[1], note[1]
            program = header["op"], body[:split], body[split:]
            pid = self.launcher.start(*program, limits, box.own_processes(), fds)
        except BaseException as error:
            for pipe in pipes:
                os.close(pipe[0])
            if not isinstance(error, Stopped):
                raise
            killed = box.tree.kill_others(box.list_protected())
            return {**_NOT_STARTED, "seconds": limits["wall"], "stopped": killed}, b""
        finally:
            for pipe in pipes:
                os.close(pipe[1])
        for fd in (out[0], err[0], note[0]):
            os.set_blocking(fd, False)
        box.kills.mark()
        captures = box.captures(out[0], err[0], limits)
        job = Execution(box.host, pid, os.pidfd_open(pid), captures, limits, box.tree, began)
        try:
            reply, killed = self._supervise(header["op"], job, note[0])
        finally:
            for fd in (job.pidfd, out[0], err[0], note[0]):
                os.close(fd)
        if header.get("reset"):
            reply["files"] = box.files.restore(before)
        return job.reply({**reply, "stopped": killed, "kept": True})

    def _supervise(self, op: str, job: Execution, note: int) -> tuple[dict[str, Any], int]:
        """Waits for a program and ends its leftovers. Returns its result, and how many processes it left running."""
        box = self.box
        reason, _ = supervise(job, None)
        paused = reason != "exited" and box.tree.pause()
        if reason != "exited":
            os.kill(job.pid, signal.SIGKILL)
        alone = self.launcher.quiet = reason == "exited" and box.tree.alone(job.pid)
        _, status, usage = os.wait4(job.pid, 0)
        over = box.over_memory(reason, status, usage.ru_maxrss, job.limits)
        killed = 0 if alone else box.tree.kill_others(box.list_protected())
        box.checkpoints.restore_paused(box.process, paused)
        job.drain()
        used = usage.ru_utime + usage.ru_stime
        reply = exit_status.result(reason, status, used, job.limits, exit_status.read_note(note))
        if op == "bash":
            reply = exit_status.of_shell(reply, job.captures[1].text())
        return box.attribute_kill(reply, over), killed
