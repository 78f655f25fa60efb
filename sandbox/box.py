"""The init process of one box: it starts what a session asks for, watches it, and answers the host.

A box is pid 1 of its own pid namespace where there are any, so its end is the end of everything it started. It never
runs the model's code and never believes what a worker says beyond the choice of a result that is the model's fault.
"""

from __future__ import annotations

import _socket as socket
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import confine
import ends
import files
import heads
import memory
import snapshot
import start
import wire
import worker
from heads import Head
from programs import Programs, Stopped
from watch import FRAME, LATE, Capture, Job, Tree, signal_process, watch

Answer = tuple[dict[str, Any], bytes]
"""Header and body."""
_LATE = {"status": "timeout", "detail": "wall", "kept": True, "out": 0, "cut": False}
"""Of a program that was not started in its time."""


class Box:
    """Serves one session. `base`: address space of the empty interpreter."""

    def __init__(
        self,
        host: socket.socket,
        limits: dict[str, Any],
        base: int,
        level: str,
        rules: int | None = None,
        user: tuple[int, int] | None = None,
        kills: memory.Kills | None = None,
    ) -> None:
        self.host, self.limits, self.base, self.level, self.rules = host, limits, base, level, rules
        self.user = user
        """Who runs the code, where that is another user than this process (`uid`)."""
        self.others = 0 if level in ("ns", "uid") else confine.count_processes()
        self.tree = Tree(level, user)
        self.programs = Programs(host, level, base, user, rules, self.tree)
        self.kills = kills or memory.Kills([])
        self.head: Head | None = None
        self.files = snapshot.Files(limits["disk_mb"] << 20, user)
        self.kept = heads.Kept(self.files.limit, self.tree.ended)
        self.cells = 0
        self.out = self.err = (-1, -1)
        self.drained = False
        """Whether nothing can be in them: the head was alone, and has been asked nothing since."""
        self.nonce = ""

    def serve(self) -> NoReturn:
        """Answers requests until the host closes the socket; then everything in the box ends."""
        handlers = {"cell": self.cell, "run": self.run, "bash": self.run, "calls": self.calls, "back": self.back}
        handlers |= {"ping": lambda *_: ({"status": "ok"}, b"")}
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
                        self.kept.add(header, self.files.take(), None, self.cells)
                    with confine.acting_as(self.user):
                        reply, data = files.handle(header, body)
            except OSError as error:  # ours: the box itself could not do it
                reply, data = {"status": "host_resources", "detail": f"{op}: {error}"}, b""
            wire.send(self.host, {"id": header.get("id"), **reply}, data)
        self.end()

    def _requests(self) -> Iterator[wire.Frame]:
        """The host's requests, whole ones at one read each, until it closes the socket."""
        reader = wire.Reader()
        while data := heads.hear(self.host, self.head, lambda: self.tree.still(self.protected())):
            yield from reader.feed(data)

    def adopt(self, limits: dict[str, Any]) -> None:
        """A session takes a box that was started before it was known. Nothing is answered."""
        self.limits = limits
        self.programs.forget()
        seed = limits.get("seed")
        sys.modules["random"].seed(seed)  # not imported here: before warming up it would hook every fork
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(None if seed is None else seed % (1 << 32))

    def end(self) -> NoReturn:
        """Kills what the box started. In a pid namespace the exit of pid 1 does that."""
        if self.level != "ns":
            self.tree.kill_others(set())
        os._exit(0)

    def protected(self) -> set[int]:
        """The processes that outlive an execution."""
        pids = self.kept.pids()
        return pids | {self.head.pid} if self.head else pids

    # scripts and commands

    def run(self, header: dict[str, Any], body: bytes) -> Answer:
        """One program in a process of its own: Python (`run`) or a shell command (`bash`)."""
        split = header.get("split", len(body))
        limits = {**self.limits, **header.get("limits", {})}
        before = self.files.take() if header.get("keep") or header.get("reset") else None
        if header.get("keep"):
            self.kept.add(header, before, None, self.cells)
        out, err, note = pipes = os.pipe(), os.pipe(), os.pipe()
        began = time.monotonic()
        try:
            fds = out[1], err[1], note[1]
            pid = self.programs.start(header["op"], body[:split], body[split:], limits, self._others(), fds)
        except BaseException as error:
            for pipe in pipes:
                os.close(pipe[0])
            if not isinstance(error, Stopped):
                raise
            killed = self.tree.kill_others(self.protected())
            return {**_LATE, "seconds": limits["wall"], "stopped": killed}, b""
        finally:
            for pipe in pipes:
                os.close(pipe[1])
        for fd in (out[0], err[0], note[0]):
            os.set_blocking(fd, False)
        self.kills.mark()
        job = Job(self.host, pid, os.pidfd_open(pid), self._captures(out[0], err[0], limits), limits, self.tree, began)
        try:
            reason, _ = watch(job, None)
            halted = reason != "exited" and self.tree.halt()
            if reason != "exited":
                os.kill(pid, signal.SIGKILL)
            alone = self.programs.calm = reason == "exited" and self.tree.alone(pid)
            _, status, usage = os.wait4(pid, 0)
            over = self._over(reason, status, usage.ru_maxrss, limits)
            killed = 0 if alone else self.tree.kill_others(self.protected())
            self.kept.calm(self.head, halted)
            job.drain()
            reply = ends.ended(reason, status, usage.ru_utime + usage.ru_stime, limits, ends.read_note(note[0]))
            if header["op"] == "bash":
                reply = ends.of_shell(reply, job.captures[1].text())
            reply = self._whose_memory(reply, over)
        finally:
            for fd in (job.pidfd, out[0], err[0], note[0]):
                os.close(fd)
        if header.get("reset"):
            reply["files"] = self.files.restore(before)
        return job.reply({**reply, "stopped": killed, "kept": True})

    def _over(self, reason: str, status: int, peak: int, limits: dict[str, Any]) -> bool:
        """Whether what ended and what is left held more than the limit; asked where no cgroup tells. `peak`: KiB."""
        if self.kills.exact or reason != "exited" or status == 0:
            return False
        return self.tree.exceeds((limits["memory_mb"] << 20) - (peak << 10), self.tree.pids(), time.monotonic() + 1.0)

    def _whose_memory(self, reply: dict[str, Any], over: bool) -> dict[str, Any]:
        """The result, where the kernel killed something for want of memory: the code's own, or another's and so ours.

        `over`: whether the box held more than its limit, as far as that is known.
        """
        if reply["status"] == "timeout":
            return reply
        killed = signal.SIGKILL in (reply.get("signal"), reply.get("exit", 0) - 128)
        whose = self.kills.since(over, killed)
        if whose == "others":
            return {**reply, "status": "host_resources", "detail": "memory ran out outside of this box"}
        if whose == "own" and reply["status"] not in ("ok", "state_lost"):
            return {**reply, "status": "memory", "detail": "processes together"}
        return reply

    def _others(self) -> int:
        """Processes that count against the limit of an execution and are not its own."""
        return self.others + 2 + len(self.kept) + (2 if self.head else 0)

    def _captures(self, out: int, err: int, limits: dict[str, Any]) -> tuple[Capture, Capture]:
        return Capture(out, limits["output_kb"] << 10), Capture(err, limits["output_kb"] << 10)

    # the session

    def _start_head(self) -> Head:
        """Forks the process that runs cells, with pipes that stay for the session."""
        if self.out[0] >= 0:
            for fd in (*self.out, *self.err):
                os.close(fd)
        self.out, self.err = os.pipe(), os.pipe()
        ours, theirs = wire.pair()
        pid = confine.bare_fork()
        if pid == 0:
            try:
                os.setsid()
                fds = start.standard_input(b""), self.out[1], self.err[1], theirs.fileno()
                start.descriptors(fds, self.user, self.rules)
                confine.limit(self.limits, self.base, self._others() + self.kept.most, cpu=False)
                confine.install_code_filter()
                worker.Session(socket.socket(fileno=3)).serve()
            except BaseException as error:  # noqa: BLE001 - last stop of a forked child: it must never return
                os.write(2, f"the session ended: {error!r}\n".encode())
            os._exit(70)
        theirs.close()
        os.set_blocking(self.out[0], False)
        os.set_blocking(self.err[0], False)
        self.tree.look()
        return Head(pid, ours)

    def cell(self, header: dict[str, Any], body: bytes) -> Answer:
        """One cell. The state before it is forked first and takes over where the cell does not end well."""
        before = self.files.take()
        self.cells += 1
        keep = self.kept.most = int(header.get("keep", 0))
        request = {"op": "cell", "name": f"<cell {self.cells}>", **({"keep": "yes"} if keep else {})}
        limits = {**self.limits, **header.get("limits", {})}
        reason, frame, job, backup = self._ask(request, body, limits)
        reply: dict[str, Any] = {"status": "memory", "detail": "", "kept": True}
        if frame is not None:
            reply["status"], (reply["detail"], _) = ends.claimed(frame.header), ends.texts(frame.header)
            reply = self._whose_memory(reply, False)
            reason = f"memory:{reply['detail']}"
        if reply["status"] != "memory":
            if reply["status"] == "exit":
                reply["exit"], reply["detail"] = ends.number(reply["detail"]), ""
            if keep:
                self.kept.add_running(backup, header, before, self.cells - 1)
            elif self.head:
                self.head.line = backup
        else:
            reply = self._roll_back(reason, job, backup, limits)
            if keep and reply["kept"]:
                self.kept.add(header, before, None, self.cells - 1)
        reply, output = self._settle(job, reply)
        if reply.get("rolled_back") and reply["kept"]:
            reply["files"] = self.files.restore(before)
        return reply, output

    def _ask(
        self, request: dict[str, str], body: bytes, limits: dict[str, Any], job: Job | None = None
    ) -> tuple[str, wire.Frame | None, Job, socket.socket]:
        """Sends a request to the head, if need be with a line to its checkpoint, and waits. `job`: of the first try."""
        head = self.head = self.head or self._start_head()
        self.tree.mark()
        self.kills.mark()
        if head.stopped:
            signal_process(head.pid, signal.SIGCONT)
            head.stopped = False
        pipes = self._captures(self.out[0], self.err[0], limits)
        job = job or Job(self.host, head.pid, head.pidfd, pipes, limits, self.tree)
        if not self.drained:
            job.drain(discard=True)
        self.drained = False
        line, fds = head.lend()
        try:
            self.nonce = request["nonce"] = os.urandom(8).hex()
            wire.say(head.control, request, body, fds, min(time.monotonic() + FRAME, job.deadline + LATE))
        except OSError:
            return "deaf", None, job, line
        finally:
            for fd in fds:
                os.close(fd)
        reason, frame = self._answer(job, head)
        if frame is not None and "line" in frame.header and not fds:
            line.close()
            return self._ask(request, body, limits, job)
        return reason, frame, job, line

    def _answer(self, job: Job, head: Head) -> tuple[str, wire.Frame | None]:
        """The head's next answer; one that was written before the question counts as nonsense."""
        reason, frame = watch(job, head.control, head.events(self.host))
        if frame is not None and frame.header.get("nonce") != self.nonce:
            return "deaf", None
        if frame is not None and self.level != "ns":
            self.tree.checkpoint = ends.number(frame.header.get("checkpoint", ""), 1 << 31)
        return reason, frame

    def _settle(self, job: Job, reply: dict[str, Any]) -> Answer:
        """After an execution of the session: nothing it started goes on, no checkpoint either, and the head sleeps."""
        quiet = self.head is not None and not reply.get("rolled_back") and self.tree.quiet(self.protected())
        if self.head:
            if not quiet:
                # Threads of a cell would go on and take time from others.
                signal_process(self.head.pid, signal.SIGSTOP)
                self.head.stopped = True
            if self.head.ended():  # right after it had answered
                self.head.close()
                self.head = None
                reply.update(status="state_lost", kept=False, detail="the process ended")
        stopped = 0 if quiet and self.head else self.tree.kill_others(self.protected())
        job.drain()
        self.drained = quiet
        return job.reply({**reply, "stopped": stopped, "cell": self.cells})

    def _roll_back(self, reason: str, job: Job, backup: socket.socket, limits: dict[str, Any]) -> dict[str, Any]:
        """The head died or has to: what it forked before the cell becomes the head."""
        head = self.head
        assert head is not None
        status, used = 0, job.cpu(self.tree.pids()) if reason == "exited" else 0.0
        if reason != "exited":
            signal_process(head.pid, signal.SIGKILL)
        peak = 0
        try:
            _, status, usage = os.wait4(head.pid, 0)
            peak = usage.ru_maxrss
        except ChildProcessError:
            status = 9  # a promoted checkpoint whose parent had not been reaped by us
        over = self._over(reason, status, peak, limits)
        reply = self._whose_memory(ends.ended(reason, status, used, limits, ""), over)
        head.close()
        self.head = heads.adopt(backup)
        reply["kept"], reply["rolled_back"] = self.head is not None, True
        if self.head is None and reply["status"] != "host_resources":
            reply["detail"] = reply["status"] + (" " + reply.get("detail", "")).rstrip()
            reply["status"] = "state_lost"
            self.kept.clear()
        return reply

    def back(self, header: dict[str, Any], _: bytes) -> Answer:
        """Goes back to the state before request number `call`; status `gone` where it is not kept."""
        found = self.kept.back(int(header["call"]))
        if found is None or found.files is None or (found.head and not found.head.answers()):
            return {"status": "gone"}, b""
        if found.head:
            if self.head:
                signal_process(self.head.pid, signal.SIGKILL)
                self.head.close()
            self.head = found.head
        self.cells = found.cells
        self.tree.kill_others(self.protected())
        return {"status": "gone" if self.files.restore(found.files) == "left" else "ok"}, b""

    # grading

    def _answered(self, frame: wire.Frame) -> list[Any]:
        """One call's answer; one that went wrong may be what the kernel's killing for want of memory came to."""
        status, (detail, error) = ends.claimed(frame.header), ends.texts(frame.header)
        if status != "ok":
            told = self._whose_memory({"status": status, "detail": detail}, False)
            status, detail = told["status"], told["detail"]
        return [status, detail, error, len(frame.body)]

    def calls(self, header: dict[str, Any], body: bytes) -> Answer:
        """Calls of functions of the session, each under the wall limit, all under `budget` seconds.

        Answers the `answers` bytes of `[[status, detail, error, length], ...]`, then the values, one after the other.
        """
        todo = json.loads(body)
        limits = {**self.limits, **header.get("limits", {})}
        end = time.monotonic() + header["budget"]
        answers: list[list[Any]] = []
        data = bytearray()
        while len(answers) < len(todo):
            part = json.dumps(todo[len(answers) :]).encode()
            reason, frame, job, backup = self._ask({"op": "calls"}, part, limits)
            assert self.head is not None
            expected = 0
            while frame is not None and "done" not in frame.header and len(answers) < len(todo):
                if frame.header.get("i") != str(expected) or len(data) > 16 * wire.MAX_ANSWER:
                    break
                expected += 1
                answer = self._answered(frame)
                if answer[0] == "host_resources":
                    self._roll_back("deaf", job, backup, limits)
                    return self._settle(job, {"status": answer[0], "detail": answer[1]})
                answers.append(answer)
                data += frame.body
                job.restart(end)
                reason, frame = self._answer(job, self.head)
            if frame is not None and "done" in frame.header:
                self.head.line = backup
                break
            failed = self._roll_back("deaf" if frame is not None else reason, job, backup, limits)
            if failed["status"] == "host_resources":
                return self._settle(job, failed)
            self.tree.kill_others(self.protected())  # the next call finds nothing of this one
            if len(answers) < len(todo):  # or it died after its last answer, which stands
                over = time.monotonic() >= end and failed["status"] == "timeout"
                answers.append([failed["status"], "budget" if over else failed.get("detail", ""), "", 0])
            if failed["status"] == "state_lost" or time.monotonic() > end:
                break
        answers += [ends.unanswered(answers, time.monotonic() > end)] * (len(todo) - len(answers))
        told = json.dumps(answers, ensure_ascii=False).encode()  # too much for a header, where many say what went wrong
        reply, _ = self._settle(job, {"status": "ok", "answers": len(told)})
        return reply, told + data
