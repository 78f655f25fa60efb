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
from sandbox.isolation import forks, namespaces, privileges
from sandbox.launcher import Launcher, Stopped
from sandbox.processes import signal_process
from sandbox.protocol import framing


class Cells:
    """Runs the cells and calls of a box's session."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self._out = self._err = (-1, -1)
        self._drained = False
        """Whether the pipes are certainly empty: the process was alone, and was asked nothing since."""
        self._nonce = ""

    def cell(self, header: dict[str, Any], body: bytes) -> Answer:
        """Runs one cell. The state before it is forked first, and takes over if the cell does not end well."""
        box = self.box
        before = box.files.take()
        box.cells += 1
        keep = box.checkpoints.most = int(header.get("keep", 0))
        request = {"op": "cell", "name": f"<cell {box.cells}>", **({"keep": "yes"} if keep else {})}
        limits = box.limits_of(header)
        reason, frame, job, backup = self._ask(request, body, limits)
        reply: dict[str, Any] = {"status": "memory", "detail": "", "kept": True}
        if frame is not None:
            reply["status"], (reply["detail"], _) = (
                exit_status.read_status(frame.header),
                exit_status.texts(frame.header),
            )
            reply = box.attribute_kill(reply, False)
            reason = f"memory:{reply['detail']}"
        if reply["status"] != "memory":
            if reply["status"] == "exit":
                reply["exit"], reply["detail"] = exit_status.number(reply["detail"]), ""
            if keep:
                box.checkpoints.add_running(backup, header, before, box.cells - 1)
            elif box.process:
                box.process.wake_socket = backup
        else:
            reply = self._roll_back(reason, job, backup, limits)
            if keep and reply["kept"]:
                box.checkpoints.add(header, before, None, box.cells - 1)
        reply, output = self._finish(job, reply)
        if reply.get("rolled_back") and reply["kept"]:
            reply["files"] = box.files.restore(before)
        return reply, output

    def calls(self, header: dict[str, Any], body: bytes) -> Answer:
        """Calls of the session's functions, each under the wall limit, all under `budget` seconds.

        The body of the answer holds `[[status, detail, error, length], ...]` as JSON, `answers` bytes, then the
        values one after the other.
        """
        box = self.box
        todo = json.loads(body)
        limits = box.limits_of(header)
        end = time.monotonic() + header["budget"]
        answers: list[list[Any]] = []
        data = bytearray()
        while len(answers) < len(todo):
            part = json.dumps(todo[len(answers) :]).encode()
            reason, frame, job, backup = self._ask({"op": "calls"}, part, limits)
            assert box.process is not None
            expected = 0
            while frame is not None and "done" not in frame.header and len(answers) < len(todo):
                if frame.header.get("i") != str(expected) or len(data) > 16 * framing.MAX_ANSWER:
                    break
                expected += 1
                answer = self._call_answer(frame)
                if answer[0] == "host_resources":
                    self._roll_back("invalid", job, backup, limits)
                    return self._finish(job, {"status": answer[0], "detail": answer[1]})
                answers.append(answer)
                data += frame.body
                job.restart(end)
                reason, frame = self._answer(job, box.process)
            if frame is not None and "done" in frame.header:
                box.process.wake_socket = backup
                break
            reason = reason if frame is None else "invalid"
            failed = self._roll_back(reason, job, backup, limits)
            if failed["status"] == "host_resources":
                return self._finish(job, failed)
            box.tree.kill_others(box.list_protected())  # the next call finds nothing of this one
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
        box = self.box
        found = box.checkpoints.take(int(header["call"]))
        if found is None or found.files is None or (found.process and not found.process.answers()):
            return {"status": "missing"}, b""
        if found.process:
            if box.process:
                signal_process(box.process.pid, signal.SIGKILL)
                box.process.close()
            box.process = found.process
        box.cells = found.cells
        box.tree.kill_others(box.list_protected())
        return {"status": "missing" if box.files.restore(found.files) == "left" else "ok"}, b""

    def _start(self) -> SessionProcess:
        """Forks the process that runs cells, with pipes that stay for the session."""
        box = self.box
        if self._out[0] >= 0:
            for fd in (*self._out, *self._err):
                os.close(fd)
        self._out, self._err = os.pipe(), os.pipe()
        ours, theirs = framing.pair()
        pid = forks.bare_fork()
        if pid == 0:
            try:
                os.setsid()
                fds = launcher.standard_input(b""), self._out[1], self._err[1], theirs.fileno()
                launcher.take_descriptors(fds, box.user, box.rules)
                privileges.apply_limits(
                    box.limits, box.base, box.own_processes() + box.checkpoints.most, cpu=False
                )
                privileges.install_code_filter()
                worker.Interpreter(socket.socket(fileno=3)).serve()
            except BaseException as error:  # noqa: BLE001 - last stop of a forked child: it must never return
                os.write(2, f"the session ended: {error!r}\n".encode())
            os._exit(70)
        theirs.close()
        os.set_blocking(self._out[0], False)
        os.set_blocking(self._err[0], False)
        box.tree.settle()
        return SessionProcess(pid, ours)

    def _ask(
        self,
        request: dict[str, str],
        body: bytes,
        limits: dict[str, Any],
        job: Execution | None = None,
    ) -> tuple[str, framing.Frame | None, Execution, socket.socket]:
        """Sends a request to the session process, with a socket for its checkpoint if it has none, and waits.

        Returns reason, answer, execution and the checkpoint's socket. `job`: the execution of the first attempt.
        """
        box = self.box
        process = box.process = box.process or self._start()
        box.tree.mark()
        box.kills.mark()
        if process.stopped:
            signal_process(process.pid, signal.SIGCONT)
            process.stopped = False
        pipes = box.captures(self._out[0], self._err[0], limits)
        job = job or Execution(box.host, process.pid, process.pidfd, pipes, limits, box.tree)
        if not self._drained:
            job.drain(discard=True)
        self._drained = False
        backup, fds = process.lend()
        try:
            self._nonce = request["nonce"] = os.urandom(8).hex()
            until = min(time.monotonic() + FRAME, job.deadline + LATE)
            framing.say(process.control, request, body, fds, until)
        except OSError:
            return "invalid", None, job, backup
        finally:
            for fd in fds:
                os.close(fd)
        reason, frame = self._answer(job, process)
        if frame is not None and "socket" in frame.header and not fds:
            backup.close()
            return self._ask(request, body, limits, job)
        return reason, frame, job, backup

    def _answer(self, job: Execution, process: SessionProcess) -> tuple[str, framing.Frame | None]:
        """Return the process's next answer; one written before the question breaks the protocol."""
        reason, frame = supervise(job, process.control, process.events(self.box.host))
        if frame is not None and frame.header.get("nonce") != self._nonce:
            return "invalid", None
        if frame is not None and self.box.level != "ns":
            self.box.tree.checkpoint = exit_status.number(
                frame.header.get("checkpoint", ""), 1 << 31
            )
        return reason, frame

    def _finish(self, job: Execution, reply: dict[str, Any]) -> Answer:
        """Ends an execution's processes and its checkpoint, and stops the session process."""
        box = self.box
        alone = (
            box.process is not None
            and not reply.get("rolled_back")
            and box.tree.started_nothing(box.list_protected())
        )  # fmt: skip
        if box.process:
            if not alone:
                # Threads of a cell would continue and take time from others.
                signal_process(box.process.pid, signal.SIGSTOP)
                box.process.stopped = True
            if box.process.has_ended():  # right after its answer
                box.process.close()
                box.process = None
                reply.update(status="state_lost", kept=False, detail="the process ended")
        stopped = 0 if alone and box.process else box.tree.kill_others(box.list_protected())
        job.drain()
        self._drained = alone
        return job.reply({**reply, "stopped": stopped, "cell": box.cells})

    def _roll_back(
        self, reason: str, job: Execution, backup: socket.socket, limits: dict[str, Any]
    ) -> dict[str, Any]:
        """Replaces a session process that died, or has to, by the checkpoint it forked before the cell."""
        box = self.box
        process = box.process
        assert process is not None
        status, used = 0, job.cpu(box.tree.pids()) if reason == "exited" else 0.0
        if reason != "exited":
            signal_process(process.pid, signal.SIGKILL)
        peak = 0
        try:
            _, status, usage = os.wait4(process.pid, 0)
            peak = usage.ru_maxrss
        except ChildProcessError:
            status = 9  # a checkpoint that took over, whose parent is not the box
        over = box.over_memory(reason, status, peak, limits)
        reply = box.attribute_kill(exit_status.result(reason, status, used, limits, ""), over)
        process.close()
        box.process = checkpoints.adopt(backup)
        reply["kept"], reply["rolled_back"] = box.process is not None, True
        if box.process is None and reply["status"] != "host_resources":
            reply["detail"] = reply["status"] + (" " + reply.get("detail", "")).rstrip()
            reply["status"] = "state_lost"
            box.checkpoints.clear()
        return reply

    def _call_answer(self, frame: framing.Frame) -> list[Any]:
        """Return one call's answer; a failed one may be due to an out-of-memory kill."""
        status, (detail, error) = (
            exit_status.read_status(frame.header),
            exit_status.texts(frame.header),
        )
        if status != "ok":
            reply = self.box.attribute_kill({"status": status, "detail": detail}, False)
            status, detail = reply["status"], reply["detail"]
        return [status, detail, error, len(frame.body)]


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
                    with namespaces.acting_as(box.user):
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
