"""Canaries on the host, at which attacks aim: an attack that touches one was not contained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_cli.sandbox import owner


@dataclass(slots=True)
class Canaries:
    """Targets of the attacks: a file, a folder, a port, an abstract socket, a socket in the folder, and a process."""

    secret: str
    folder: Path
    port: int
    name: str
    process: subprocess.Popen[bytes]
    touched: list[str] = field(default_factory=list)

    def aim(self, code: str) -> str:
        """Return an attack's code with the canaries in it."""
        values = {
            "secret_file": self.folder / "secret",
            "folder": self.folder,
            "port": self.port,
            "name": self.name,
            "pid": self.process.pid,
        }
        for key, value in values.items():
            code = code.replace(f"@{key}@", str(value))
        return code

    def problems(self) -> list[str]:
        """Return the canaries touched since the last call."""
        found, self.touched = self.touched, []
        names = {path.name for path in self.folder.iterdir()}
        if (self.folder / "secret").read_text() != self.secret or names != {"secret", "datagrams"}:
            found.append("the canary's folder was changed")
        if self.process.poll() is not None:
            found.append("the canary process was killed")
        elif _state(self.process.pid) == "T":
            found.append("the canary process was stopped")
        return found


@contextlib.asynccontextmanager
async def canaries() -> AsyncIterator[Canaries]:
    """Set up the canaries, readable for every user, and remove them."""
    secret = f"canary-{secrets.token_hex(12)}"
    folder = owner.new_folder("canary")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "secret").write_text(secret)
    program = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
    # In that folder a sweep finds it if this process is killed.
    process = subprocess.Popen(program, env={"CANARY": secret}, cwd=folder)
    name = f"agentrl-{secrets.token_hex(8)}"
    touched: list[str] = []

    def serve(what: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            touched.append(f"the canary's {what} was reached")
            writer.write(secret.encode())
            writer.close()

        return answer

    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + name)
    datagrams = _datagrams(
        folder / "datagrams", lambda: touched.append("the canary's datagram socket was reached")
    )
    servers = [
        await asyncio.start_server(serve("port"), "127.0.0.1", 0),
        await asyncio.start_unix_server(serve("abstract socket"), sock=abstract),
    ]
    # a sandbox that passed this process's environment on would show it to the attack
    os.environ["SECRET_CANARY"] = secret
    try:
        yield Canaries(
            secret, folder, servers[0].sockets[0].getsockname()[1], name, process, touched
        )
    finally:
        os.environ.pop("SECRET_CANARY", None)
        for server in servers:
            server.close()
        asyncio.get_running_loop().remove_reader(datagrams)
        datagrams.close()
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _datagrams(path: Path, reached: Callable[[], None]) -> socket.socket:
    """Return a datagram socket in the file system, open to every user, such as the journal's."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(path))
    listening.setblocking(False)
    path.chmod(0o777)

    def heard() -> None:
        listening.recv(4096)
        reached()

    asyncio.get_running_loop().add_reader(listening, heard)
    return listening


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
