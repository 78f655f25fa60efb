"""The init process of one box: it starts a session's processes, supervises them, and answers the host.

At levels with pid namespaces a box is pid 1 of its own, so its end is the end of everything it started. It never runs
the model's code, and takes from a worker's answer no more than the choice among results that are the model's fault.

Cells and calls are executions in the process that keeps a session's variables, with rollback to its checkpoint.
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

from sandbox import checkpoints, exit_status, launcher, worker
from sandbox.checkpoints import Answer, Box, SessionProcess
from sandbox.execution import FRAME, LATE, Execution, supervise
from sandbox.filesystem import files
from sandbox.isolation import namespaces
from sandbox.processes import signal_process
from sandbox.protocol import framing


class Cells(Box):
    """A box that runs the cells and calls of its session."""

    _out = _err = (-1, -1)
    _nonce = ""

    def cell(self, header: dict[str, Any], body: bytes) -> Answer:
        """Runs one cell. The state before it is forked first, and takes over if the cell does not end well."""
        before = self.files.take()
        self.cells += 1
        keep = self.checkpoints.most = int(header.get("keep", 0))
        limits = self.limits_of(header)
        request = {"op": "cell", "name": f"<cell {self.cells}>"}
        reason, frame, job, backup = self._ask(request, body, limits)
        reply: dict[str, Any] = {"status": "memory", "detail": "", "kept": True}
        if frame is not None:
            reply["status"], (reply["detail"], _) = (
                exit_status.read_status(frame.header),
                exit_status.texts(frame.header),
            )
            reply = self.attribute_kill(reply, False)
            reason = f"memory:{reply['detail']}"
        if reply["status"] != "memory":
            if reply["status"] == "exit":
                reply["exit"], reply["detail"] = exit_status.number(reply["detail"]), ""
            if keep:
                self.checkpoints.add_running(backup, header, before, self.cells - 1)
            else:
                backup.close()
        else:
            reply = self._roll_back(reason, job, backup, limits)
            if keep and reply["kept"]:
                self.checkpoints.add(header, before, None, self.cells - 1)
        reply, output = self._finish(job, reply)
        if reply.get("rolled_back") and reply["kept"]:
            reply["files"] = self.files.restore(before)
        return reply, output

    def calls(self, header: dict[str, Any], body: bytes) -> Answer:
        """Calls of the session's functions, each under the wall limit, all under `budget` seconds.

        The body of the answer holds `[[status, detail, error, length], ...]` as JSON, `answers` bytes, then the
        values one after the other.
        """
        todo = json.loads(body)
        limits = self.limits_of(header)
        end = time.monotonic() + header["budget"]
        answers: list[list[Any]] = []
        data = bytearray()
        while len(answers) < len(todo):
            part = json.dumps(todo[len(answers) :]).encode()
            reason, frame, job, backup = self._ask({"op": "calls"}, part, limits)
            assert self.process is not None
            expected = 0
            while frame is not None and "done" not in frame.header and len(answers) < len(todo):
                if frame.header.get("i") != expected or len(data) > 16 * framing.MAX_ANSWER:
                    break
                expected += 1
                answer = self._call_answer(frame)
                if answer[0] == "host_resources":
                    self._roll_back("invalid", job, backup, limits)
                    return self._finish(job, {"status": answer[0], "detail": answer[1]})
                answers.append(answer)
                data += frame.body
                job.restart(end)
                reason, frame = self._answer(job, self.process)
            if frame is not None and "done" in frame.header:
                backup.close()
                break
            reason = reason if frame is None else "invalid"
            failed = self._roll_back(reason, job, backup, limits)
            if failed["status"] == "host_resources":
                return self._finish(job, failed)
            self.tree.kill_others(self.list_protected())  # the next call finds nothing of this one
            if len(answers) < len(todo):  # else it died after its last answer, which stands
                over = time.monotonic() >= end + job.forgiven and failed["status"] == "timeout"
                detail = "budget" if over else failed.get("detail", "")
                answers.append([failed["status"], detail, "", 0])
            end += job.forgiven
            if failed["status"] == "state_lost" or time.monotonic() > end:
                break
        silence = exit_status.explain_silence(answers, time.monotonic() > end)
        answers += [silence] * (len(todo) - len(answers))
        # With many errors it is too large for a header.
        listed = json.dumps(answers, ensure_ascii=False).encode()
        reply, _ = self._finish(job, {"status": "ok", "answers": len(listed)})
        return reply, listed + data

    def back(self, header: dict[str, Any], _: bytes) -> Answer:
        """Restores the state before request number `call`; status `missing` if it was not kept."""
        found = self.checkpoints.take(int(header["call"]))
        if found is None or found.files is None or (found.process and not found.process.answers()):
            return {"status": "missing"}, b""
        if found.process:
            if self.process:
                signal_process(self.process.pid, signal.SIGKILL)
                self.process.close()
            self.process = found.process
        self.cells = found.cells
        self.tree.kill_others(self.list_protected())
        return {"status": "missing" if self.files.restore(found.files) == "left" else "ok"}, b""

    def _start(self) -> SessionProcess:
        """Forks the process that runs cells, with pipes that stay for the session."""
        if self._out[0] >= 0:
            for fd in (*self._out, *self._err):
                os.close(fd)
        self._out, self._err = os.pipe(), os.pipe()
        ours, theirs = framing.pair()
        fds = self._out[1], self._err[1], theirs.fileno()
        pid = launcher.fork(
            self, worker.serve_session, fds, self.limits, reserve=self.checkpoints.most, cpu=False
        )
        theirs.close()
        os.set_blocking(self._out[0], False)
        os.set_blocking(self._err[0], False)
        return SessionProcess(pid, ours)

    def _ask(
        self, request: dict[str, Any], body: bytes, limits: dict[str, Any]
    ) -> tuple[str, framing.Frame | None, Execution, socket.socket]:
        """Sends a request to the session process, with a socket for its checkpoint, and waits.

        Returns reason, answer, execution and the checkpoint's socket.
        """
        process = self.process = self.process or self._start()
        self.kills.mark()
        signal_process(process.pid, signal.SIGCONT)
        for capture in self.captures(self._out[0], self._err[0], limits):
            capture.drain()  # what was written since the last answer is no one's
        pipes = self.captures(self._out[0], self._err[0], limits)
        job = Execution(self.host, process.pid, process.pidfd, pipes, limits, self.tree)
        backup, theirs = framing.pair()
        try:
            self._nonce = request["nonce"] = os.urandom(8).hex()
            until = min(time.monotonic() + FRAME, job.deadline + LATE)
            framing.send(process.control, request, body, [theirs.fileno()], until)
        except OSError:
            return "invalid", None, job, backup
        finally:
            theirs.close()
        return *self._answer(job, process), job, backup

    def _answer(self, job: Execution, process: SessionProcess) -> tuple[str, framing.Frame | None]:
        """Return the process's next answer; one written before the question breaks the protocol."""
        reason, frame = supervise(job, process.control)
        if frame is not None and frame.header.get("nonce") != self._nonce:
            return "invalid", None
        if frame is not None:
            claim = frame.header.get("checkpoint")
            self.tree.checkpoint = exit_status.number(claim, 1 << 31)
        return reason, frame

    def _finish(self, job: Execution, reply: dict[str, Any]) -> Answer:
        """Ends an execution's processes and its checkpoint, and stops the session process."""
        self.stop_protected()
        if self.process and self.process.has_ended():  # right after its answer
            self.process.close()
            self.process = None
            reply.update(status="state_lost", kept=False, detail="the process ended")
        stopped = self.tree.kill_others(self.list_protected())
        for capture in job.captures:
            capture.drain()
        return job.reply({**reply, "stopped": stopped, "cell": self.cells})

    def _roll_back(
        self, reason: str, job: Execution, backup: socket.socket, limits: dict[str, Any]
    ) -> dict[str, Any]:
        """Replaces a session process that died, or has to, by the checkpoint it forked before the cell."""
        process = self.process
        assert process is not None
        status, used = 0, job.cpu(self.tree.pids()) if reason == "exited" else 0.0
        if reason != "exited":
            signal_process(process.pid, signal.SIGKILL)
        peak = 0
        try:
            _, status, usage = os.wait4(process.pid, 0)
            peak = usage.ru_maxrss
        except ChildProcessError:
            status = 9  # a checkpoint that took over, whose parent is not the box
        over = self.over_memory(reason, status, peak, limits)
        reply = self.attribute_kill(exit_status.result(reason, status, used, limits, ""), over)
        process.close()
        self.process = checkpoints.adopt(backup)
        reply["kept"], reply["rolled_back"] = self.process is not None, True
        if self.process is None and reply["status"] != "host_resources":
            reply["detail"] = reply["status"] + (" " + reply.get("detail", "")).rstrip()
            reply["status"] = "state_lost"
            self.checkpoints.clear()
        return reply

    def _call_answer(self, frame: framing.Frame) -> list[Any]:
        """Return one call's answer; a failed one may be due to an out-of-memory kill."""
        status, (detail, error) = (
            exit_status.read_status(frame.header),
            exit_status.texts(frame.header),
        )
        if status != "ok":
            reply = self.attribute_kill({"status": status, "detail": detail}, False)
            status, detail = reply["status"], reply["detail"]
        return [status, detail, error, len(frame.body)]


class Supervisor(Cells):
    """A box that serves the host's requests."""

    def serve(self) -> NoReturn:
        """Answers requests until the host closes the socket; then everything in the box ends."""
        handlers = {"cell": self.cell, "calls": self.calls, "back": self.back}
        handlers |= {"run": self.run, "bash": self.run, "ping": lambda *_: ({"status": "ok"}, b"")}
        for header, body, _ in self._requests():
            op = header["op"]
            if op == "adopt":
                self.adopt(header["limits"])
                continue
            try:
                if op in handlers:
                    reply, data = handlers[op](header, body)
                else:
                    if header.get("keep"):
                        self.checkpoints.add(header, self.files.take(), None, self.cells)
                    with namespaces.acting_as(self.user):
                        reply, data = files.handle(header, body)
            except OSError as error:  # the host's fault: the box itself could not do it
                reply, data = {"status": "host_resources", "detail": f"{op}: {error}"}, b""
            framing.send(self.host, {"id": header.get("id"), **reply}, data)
        self.end()

    def _requests(self) -> Iterator[framing.Frame]:
        """Yield the host's requests, usually one per read, until it closes the socket."""
        reader = framing.Reader()
        while data := self.host.recv(1 << 16):  # a larger buffer would be mapped every time
            yield from reader.feed(data)

    def adopt(self, limits: dict[str, Any]) -> None:
        """Gives a box that was started in advance to a session. Sends no answer."""
        self.limits = limits
        seed = limits.get("seed")
        sys.modules["random"].seed(
            seed
        )  # not imported here: before the warm-up it would hook every fork
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(None if seed is None else seed % (1 << 32))

    def end(self) -> NoReturn:
        """Kills the box's processes. In a pid namespace the exit of pid 1 does that."""
        if self.level != "ns":
            self.tree.kill_others(set())
        os._exit(0)

    def run(self, header: dict[str, Any], body: bytes) -> Answer:
        """Runs one program in a process of its own: Python (`run`) or a shell command (`bash`)."""
        limits = self.limits_of(header)
        before = self.files.take() if header.get("keep") or header.get("reset") else None
        if header.get("keep"):
            self.checkpoints.add(header, before, None, self.cells)
        out, err, note = pipes = os.pipe(), os.pipe(), os.pipe()
        began = time.monotonic()
        try:
            split = header.get("split", len(body))
            fds = out[1], err[1], note[1]
            program = header["op"], body[:split], body[split:]
            pid = launcher.start_program(self, *program, limits, fds)
        except BaseException:
            for pipe in pipes:
                os.close(pipe[0])
            raise
        finally:
            for pipe in pipes:
                os.close(pipe[1])
        for fd in (out[0], err[0], note[0]):
            os.set_blocking(fd, False)
        self.kills.mark()
        captures = self.captures(out[0], err[0], limits)
        job = Execution(self.host, pid, os.pidfd_open(pid), captures, limits, self.tree, began)
        try:
            reply, killed = self._supervise(header["op"], job, note[0])
        finally:
            for fd in (job.pidfd, out[0], err[0], note[0]):
                os.close(fd)
        if header.get("reset"):
            reply["files"] = self.files.restore(before)
        return job.reply({**reply, "stopped": killed, "kept": True})

    def _supervise(self, op: str, job: Execution, note: int) -> tuple[dict[str, Any], int]:
        """Waits for a program and ends its leftovers. Returns its result, and how many processes it left running."""
        reason, _ = supervise(job, None)
        if reason != "exited":
            self.tree.signal_all(signal.SIGSTOP)
            os.kill(job.pid, signal.SIGKILL)
        _, status, usage = os.wait4(job.pid, 0)
        over = self.over_memory(reason, status, usage.ru_maxrss, job.limits)
        self.stop_protected()
        killed = self.tree.kill_others(self.list_protected())
        for capture in job.captures:
            capture.drain()
        used = usage.ru_utime + usage.ru_stime
        reply = exit_status.result(reason, status, used, job.limits, exit_status.read_note(note))
        if op == "bash":
            reply = exit_status.of_shell(reply, job.captures[1].text())
        return self.attribute_kill(reply, over), killed
