"""Programs of agents in a jail: bubblewrap's namespaces, a network that leads to the model's server and nowhere else.

The program sees the system's programs, this environment's packages, and its own folder at /agent without `data`,
`runs` and hidden files, all read-only; it writes to /work and /tmp, which are limited and end with it. Only the
sandbox's level `ns` can do that: a container or Landlock would let the network in, or keep the model out.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl_cli import paths
from agentrl_cli.agents.emit import AgentCall
from agentrl_cli.agents.runners.base import Ended
from agentrl_cli.agents.runners.command import CommandRunner, command_of, environment, start_program
from agentrl_cli.config.models import LimitsConfig
from agentrl_cli.errors import ConfigError, SandboxFault, SandboxUnavailable
from agentrl_cli.sandbox import launch
from agentrl_cli.tasks import AgentSpec

INSIDE = "/agent"
"""The program's folder in the jail."""
SOCKET = "/opt/agentrl/model.sock"
HIDDEN = ("data", "runs")
"""Entries of the folder that a program does not see: rows may hold the answers."""
_FIRST_UID, _UIDS = 70_000, 20_000
_NUMBERS = itertools.count()


class JailedRunner(CommandRunner):
    """A CommandRunner whose program is isolated. `limits`: those of the sandbox, for each of its processes."""

    def __init__(self, spec: AgentSpec, config: Any) -> None:
        """Raise ConfigError for a backend without such a jail, SandboxUnavailable if none starts here."""
        super().__init__(spec)
        if config.backend not in ("auto", "ns") or config.min_level == "docker":
            raise ConfigError(
                f"agent.sandbox: at sandbox.backend {config.backend} and min_level {config.min_level} an agent could "
                "not reach its model, or would reach more than it.",
                hint="Level ns alone has a network of its own: sandbox.backend: ns. Or let the agent's tools alone run "
                "code in the sandbox.",
            )
        if problem := unavailable():
            raise SandboxUnavailable(
                f"agent.sandbox: no jail starts here: {problem}", hint=launch.explain("ns", problem)
            )
        self._limits: LimitsConfig = config.limits
        self._ready = -1

    def start(self, call: AgentCall) -> subprocess.Popen[bytes]:
        """Start the program in a jail of its own. Raises OSError."""
        folder = self._spec.folder.resolve()
        root = folder if self._cwd.is_relative_to(folder) else self._cwd
        own = launch.Launch("ns")
        inner = {**environment(call, self._spec), **launch.environment(own.prefix)}
        del inner["LD_BIND_NOW"], inner["PYTHONHASHSEED"]
        inner["PATH"] = f"{Path(sys.prefix, 'bin')}:{inner['PATH']}"
        inner["PYTHONPATH"] = str(Path(paths.__file__).parent.parent)
        uid = _FIRST_UID + (os.getpid() * 64 + next(_NUMBERS)) % _UIDS if os.geteuid() == 0 else 0
        mounts = [*_mounts(root, self._limits.disk_mb), "--ro-bind", call.socket, SOCKET]
        limits = {
            name: getattr(self._limits, name)
            for name in ("memory_mb", "file_mb", "open_files", "processes")
        }
        place = str(Path(INSIDE) / self._cwd.relative_to(root))
        port = str(urlsplit(call.root).port)
        read, write = os.pipe()
        given = [
            str(uid),
            port,
            SOCKET,
            str(write),
            place,
            json.dumps(limits),
            *command_of(self._spec),
        ]
        try:
            process = start_program(
                [
                    *launch.jail(own, root=bool(uid), further=mounts, tmp=""),
                    "--",
                    *(own.python, "-I", "-S", "-B", f"{launch.INSIDE}/agent.py"),
                    *given,
                ],
                env=inner
                | {name: text for name, text in self._spec.env.items() if text is not None},
                pass_fds=(write,),
            )
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._ready = read
        return process

    async def run(self, call: AgentCall) -> Ended:
        """Return the program's exit status and reward. Raises SandboxFault."""
        try:
            return await super().run(call)
        finally:  # also of a program that was stopped
            ready, self._ready = self._ready, -1
            if ready >= 0:
                os.close(ready)

    def check(self) -> None:
        """Raise SandboxFault if the jail ended before the program began."""
        if not os.read(self._ready, 1):
            raise SandboxFault(f"The agent's jail did not start: {self.stderr.strip()[-500:]}")


def _mounts(folder: Path, disk: int) -> Iterator[str]:
    """Yield bwrap's options for the program's folder and this environment's packages."""
    for path in ("/work", "/tmp"):  # a real folder: packages may lie below /tmp
        yield from ("--perms", "1777", "--size", str(disk << 20), "--tmpfs", path)
    packages = {
        path for path in sys.path if Path(path).name.endswith("-packages") and Path(path).is_dir()
    }
    venv = {sys.prefix} if sys.prefix != sys.base_prefix else set()
    for path in sorted({*packages, *venv, str(Path(paths.__file__).parent)}):
        for parent in reversed(Path(path).parents):
            if str(parent) not in ("/", "/usr"):
                yield from ("--dir", str(parent))
        yield from ("--ro-bind", path, path)
    yield from ("--dir", INSIDE)
    for entry in sorted(folder.iterdir()):
        if entry.name not in HIDDEN and not entry.name.startswith("."):
            yield from ("--ro-bind", str(entry.resolve()), f"{INSIDE}/{entry.name}")


@cache
def unavailable() -> str:
    """Return why no jail starts here; empty if one does. Tried once."""
    own = launch.Launch("ns")
    command = [*launch.jail(own, root=os.geteuid() == 0), "--", "/bin/true"]
    try:
        done = subprocess.run(
            command, env=launch.environment(own.prefix), capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
