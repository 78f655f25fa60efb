"""Agents that are programs: any language, a session of their own, nothing of this process's environment.

The program finds the model's address in the variables that OpenAI's and Anthropic's clients read, and its task in
AGENTRL_TASK. The last line of its stdout may give the reward: `{"reward": 0.5}`, or a number alone if the pack
has no rewards of its own.

Each program runs below a small process that ends everything the program started. That process adopts orphans (a
subreaper), so it also finds what left the program's group or session: a daemon, say. It ends the rest when the program
has ended, when `end_supervised` asks for it, and when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any

from agentrl_cli.agents.emit import EVENT_URL, KEY, AgentCall, reward_value
from agentrl_cli.agents.runners.base import Ended, printed_names
from agentrl_cli.errors import ConfigError
from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.sandbox.results import signal_name
from agentrl_cli.tasks import AgentSpec
from agentrl_cli.types.plain import parse_json

_SCRIPT = """\
import ctypes, os, select, signal, sys, time

def reap(flags):
    global status
    try:
        while (ended := os.waitpid(-1, flags))[0]:
            if ended[0] == program:
                status = ended[1]
    except ChildProcessError:
        return False
    return True

def children():
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return file.read().split()
    except OSError:
        return [program] * (status is None)

leash, *command = sys.argv[1:]
leash, status = int(leash), None
try:
    libc = ctypes.CDLL(None)
    libc.prctl(4, 0, 0, 0, 0)  # no core file when it ends by its program's signal
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
except (AttributeError, OSError):
    pass  # not Linux: the program's own process is ended, and its group by the host
os.set_inheritable(leash, False)
bell, ring = os.pipe()
os.set_blocking(ring, False)
signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
signal.signal(signal.SIGCHLD, lambda *_: None)
program = os.fork()
if not program:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} could not be started: {error.strerror}\\n".encode())
        os._exit(127)
while status is None and leash not in (ready := select.select([leash, bell], [], [])[0]):
    os.read(bell, 4096)
    reap(os.WNOHANG)
end = time.monotonic() + 5
while reap(os.WNOHANG) and time.monotonic() < end:  # killing a process gives this one its children
    for child in children():
        try:
            os.kill(int(child), signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.001)
if status is not None and os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(1 if status is None else os.waitstatus_to_exitcode(status))
"""

_LEASHES: dict[int, int] = {}
"""Pid of a process started here → the end of a pipe; closing it ends the program and everything it started."""


def start_supervised(
    command: list[str], pass_fds: tuple[int, ...] = (), **given: Any
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with the arguments of Popen. Raises OSError.

    The exit status is the program's; 127 with a line on stderr if there is no such program.
    """
    theirs, ours = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SCRIPT, str(theirs), *command],
            pass_fds=(theirs, *pass_fds), start_new_session=True, **given,
        )  # fmt: skip
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    _LEASHES[process.pid] = ours
    return process


def end_supervised(process: subprocess.Popen[bytes]) -> None:
    """Ask for the end of a program and of everything it started; the process ends after them."""
    leash = _LEASHES.pop(process.pid, None)
    if leash is not None:
        os.close(leash)


def _forget() -> None:
    """Close the pipes in a forked child, which must not hold them open."""
    for leash in _LEASHES.values():
        os.close(leash)
    _LEASHES.clear()


os.register_at_fork(after_in_child=_forget)


PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "TERM",
    "SYSTEMROOT",
)
"""Variables of this process that a program gets; others may hold secrets."""
TAIL = 64 * 1024
"""Bytes of stdout and of stderr that are kept, from the end."""
SIGNALS = 128
"""Exit statuses above it are a shell's names for signals."""
PATIENCE = 10.0
"""Seconds to wait for the end of everything that a program started; its process group is killed then at the latest."""
LAST = 1.0
"""Seconds to wait for the end of a stream that a process outside the group still holds."""


class CommandRunner:
    """Starts a program for each episode and ends everything it started after it."""

    start_seconds = 0.0

    def __init__(self, spec: AgentSpec) -> None:
        """Raise ConfigError if its folder is missing."""
        self._spec = spec
        self._cwd = (spec.folder / spec.cwd).resolve()
        if not self._cwd.is_dir():
            raise ConfigError(f"agent.cwd: no such folder: {self._cwd}.")
        self._errors = Tail()

    @property
    def stderr(self) -> str:
        """The last output of an agent that was stopped."""
        return self._errors.text

    async def run(self, call: AgentCall) -> Ended:
        """Return the program's exit status and reward."""
        try:
            process = self.start(call)
        except OSError as error:
            return Ended(error=f"{self._spec.command[0]} could not be started: {error.strerror}.")
        output = Tail()
        assert process.stdout is not None and process.stderr is not None
        streams = [asyncio.ensure_future(_read(process.stdout, output))]
        streams += [asyncio.ensure_future(_read(process.stderr, self._errors))]
        waiting = asyncio.ensure_future(in_thread(process.wait))
        try:
            status = await asyncio.shield(waiting)
        finally:
            end_supervised(process)
            await asyncio.wait([waiting], timeout=PATIENCE)
            # The rest of its group, if the program killed the process that would have ended it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await waiting
            await asyncio.wait(streams, timeout=LAST)
            for stream in streams:
                stream.cancel()
        self.check()
        return _read_end(status, output.text, self._errors.text)

    def start(self, call: AgentCall) -> subprocess.Popen[bytes]:
        """Start the program, with rights of this process. Raises OSError."""
        if self._spec.sandbox:
            raise ConfigError("A command with `sandbox: true` is never started outside of it.")
        return start_program(
            command_of(self._spec), cwd=self._cwd, env=environment(call, self._spec)
        )

    def check(self) -> None:
        """Raise SandboxFault if something other than the program ended."""


def command_of(spec: AgentSpec) -> list[str]:
    """Return the command; `python` is the interpreter of this environment, whatever PATH has first."""
    first, *rest = spec.command
    return [sys.executable if first in ("python", "python3") else first, *rest]


def start_program(command: list[str], **given: Any) -> subprocess.Popen[bytes]:
    """Return a program in a session of its own whose output is read. Raises OSError."""
    return start_supervised(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given
    )


def environment(call: AgentCall, spec: AgentSpec) -> dict[str, str]:
    """Return the variables of a program: a few of this process's, the model's address, its task, and those of
    the pack.
    """
    own = {name: os.environ[name] for name in PASSED if name in os.environ}
    given = {
        "OPENAI_BASE_URL": call.base_url,
        "OPENAI_API_BASE": call.base_url,
        "OPENAI_API_KEY": call.api_key,
        "ANTHROPIC_BASE_URL": call.root,
        "ANTHROPIC_API_KEY": call.api_key,
        "AGL_OPENAI_BASE_URL": call.base_url,
        EVENT_URL: call.event_url,
        KEY: call.api_key,
        "AGENTRL_MODEL": call.model,
        "AGENTRL_TASK": json.dumps(task_of(call, spec), ensure_ascii=False),
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONUNBUFFERED": "1",
    }
    added = {
        name: os.environ.get(name) if text is None else text for name, text in spec.env.items()
    }
    return own | given | {name: text for name, text in added.items() if text is not None}


def task_of(call: AgentCall, spec: AgentSpec) -> Mapping[str, Any]:
    """Return the task, with only those other fields of its row that the pack names: the rest may hold the answer."""
    task = call.task
    row = {name: task.data[name] for name in spec.fields if name in task.data}
    return {
        "id": task.id,
        "family": task.family,
        "split": task.split,
        "messages": list(task.prompt),
        **row,
    }


def _read_end(status: int, output: str, errors: str) -> Ended:
    reward, problem, alone = last_reward(output)
    # A signal that ends a program, or its status in a shell, is not the model's doing.
    how = (f"exit status {status}", *printed_names(errors)) if 0 < status <= SIGNALS else ()
    if status:
        name = signal_name(-status) if status < 0 else f"exit status {status}"
        said = errors.strip().splitlines()
        problem = f"The agent ended with {name}" + (f": {said[-1][:500]}" if said else ".")
    return Ended(reward, problem, errors, how, alone=alone)


def last_reward(output: str) -> tuple[float | None, str, bool]:
    """Return (reward, problem, whether it is a number alone) of the last line that is JSON."""
    for line in reversed(output.splitlines()):
        try:
            value = parse_json(line.encode("utf-8", "replace"))
        except ValueError:
            continue
        alone = not isinstance(value, dict)
        if not alone:
            value = value.get("reward")
        if value is None:
            break
        try:
            return reward_value(value), "", alone
        except ValueError as error:
            return None, "" if alone else f"The agent's last line: {error}.", alone
    return None, "", False


class Tail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def add(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * TAIL:
            del self._kept[:-TAIL]

    @property
    def text(self) -> str:
        return self._kept[-TAIL:].decode("utf-8", "replace")


async def _read(pipe: IO[bytes], tail: Tail) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while data := await reader.read(TAIL):
            tail.add(data)
    finally:
        transport.close()
