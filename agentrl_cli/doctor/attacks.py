"""Hostile programs against a sandbox: the self-test of `agentrl doctor --sandbox`, in seconds.

They aim at canaries on the host: an attack that touches one was not contained. The full suite stands in the project's
tests, in the same form; it runs its programs by `attack`, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_cli.errors import SandboxFault
from agentrl_cli.sandbox import Sandbox, Session, owner
from agentrl_cli.sandbox.results import ExecResult, Status

SELF_TEST = Path(__file__).with_name("attacks.txt")
PATIENCE = 15.0
"""Wall limit in seconds of the harmless programs around an attack, and of its second run if the machine was too slow
for the limit that should stop it."""
BOMBS = ("fork-bomb", "shell-fork-bomb")
UNBOUNDED = "not tried: nothing bounds the number of root's processes here; be another user, or let cgroups be made"
MEANING = {
    "files": "reads and writes only its work folder",
    "network": "no network, no socket but a pair of its own",
    "signals": "cannot signal anything outside",
    "processes": "bounded in time and number, none left",
    "memory": "watched, private and shared, all processes together",
    "disk": "bounded in bytes and files",
    "output": "bounded, nothing floods the host",
    "system": "no dangerous system calls",
    "state": "a session survives what its code does",
}
WEAKER = {
    "landlock": {
        "files": "reads and writes only its work folder; names, sizes and times of other files may be seen",
        "disk": "watched in bytes and files, not limited",
    }
}
"""Weaker meanings of some levels."""
_DAEMON = b"sleep\x0098765.25\0"
"""Command line of the daemons that attacks try to leave behind."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile program and the results that count as right for it."""

    name: str
    guarantee: str
    """A key of MEANING."""
    op: str
    """run | cell | bash | grade"""
    right: tuple[str, ...]
    """Names of the statuses that are right."""
    flags: frozenset[str]
    """quick, strong, stays: see attacks.txt."""
    code: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one attack."""

    attack: str
    guarantee: str
    status: str
    problems: tuple[str, ...]
    """Why it was not contained; empty if it was."""
    seconds: float

    @property
    def contained(self) -> bool:
        return not self.problems


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


Execute = Callable[[Session, Attack, Canaries], Awaitable[tuple[ExecResult, list[str]]]]
"""Runs an attack's program in a session: the result, and problems that it does not show."""


def parse_attacks(file: Path = SELF_TEST) -> Iterator[Attack]:
    """Yield the attacks of a file, in its order."""
    for part in file.read_text(encoding="utf-8").split("\n=== ")[1:]:
        head, _, code = part.partition("\n")
        name, guarantee, op, right, flags = (field.strip() for field in head.split("|"))
        words = frozenset(flags.split())
        yield Attack(name, guarantee, op, tuple(right.split()), words, code.strip("\n"))


async def probe(sandbox: Sandbox) -> list[tuple[str, str, bool]]:
    """Attack a sandbox for some seconds: (guarantee, meaning or problem, whether it holds) of each."""
    async with canaries() as targets:
        chosen = [one for one in parse_attacks() if "strong" not in one.flags]
        verdicts = [await attack(sandbox, one, targets, wall=0.5) for one in chosen]
    rows = []
    for name, meaning in {**MEANING, **WEAKER.get(sandbox.level, {})}.items():
        broken = [one for one in verdicts if one.guarantee == name and not one.contained]
        detail = "; ".join(f"{one.attack}: {one.problems[0]}" for one in broken)
        rows.append((name, detail or meaning, not broken))
    return rows


async def run_program(
    session: Session, one: Attack, targets: Canaries
) -> tuple[ExecResult, list[str]]:
    """Run an attack of one session."""
    return await getattr(session, one.op)(targets.aim(one.code)), []


async def attack(
    sandbox: Sandbox,
    one: Attack,
    targets: Canaries,
    wall: float = 1.5,
    execute: Execute = run_program,
) -> Verdict:
    """Run one attack in a session of its own, with `wall` seconds.

    An attack that a limit other than time has to stop runs once more with PATIENCE if time ended it first: a busy
    machine does not fill a disk in half a second.
    """
    if one.name in BOMBS and not sandbox.bounded:
        return Verdict(one.name, one.guarantee, "not run", (UNBOUNDED,), 0.0)
    found = await _attack_once(sandbox, one, targets, wall, execute)
    if found.status == "timeout" and "timeout" not in one.right and len(found.problems) == 1:
        found = await _attack_once(sandbox, one, targets, PATIENCE, execute)
    return found


async def _attack_once(
    sandbox: Sandbox, one: Attack, targets: Canaries, wall: float, execute: Execute
) -> Verdict:
    session = await sandbox.session(wall=wall, cpu=5.0, memory_mb=512)
    before = dict(sandbox.counts)
    problems: list[str] = []
    status, seconds = "fault", 0.0
    try:
        if one.op == "cell":
            await session.cell("kept = 'the state'", wall=PATIENCE)
        result, problems = await execute(session, one, targets)
        status, seconds = str(result.status), result.seconds
        problems += _find_problems(one, result, targets)
        if one.op == "cell" and result.state_kept:
            after = await session.cell("kept", wall=PATIENCE)
            if after.stdout != "'the state'\n" and after.state_kept:
                problems.append("the session lost its state and did not say so")
        following = await session.run("print(6 * 7)", wall=PATIENCE)
        if following.stdout != "42\n":
            problems.append(f"the next execution went wrong: {following.text()[-100:]}")
    except SandboxFault as fault:
        problems.append(fault.message)
    finally:
        await session.close()
    faults = [
        name
        for name, count in sandbox.counts.items()
        if count > before.get(name, 0) and Status(name).infrastructure
    ]
    problems += [f"the sandbox had to restart ({name})" for name in faults]
    problems += [*targets.problems(), *await _find_daemons()]
    return Verdict(one.name, one.guarantee, status, tuple(problems), seconds)


def _find_problems(one: Attack, result: ExecResult, targets: Canaries) -> list[str]:
    """Return the problems that the result itself shows."""
    text = result.stdout + result.stderr
    problems = ["it read a secret"] if targets.secret in text else []
    problems += [line[:120] for line in text.splitlines() if line.startswith("LEAK")]
    if result.status not in one.right:
        said = text[-150:].strip()
        problems.append(f"the result is {result.status}, not {' or '.join(one.right)}: {said}")
    if len(text) > 300_000:
        problems.append(f"{len(text)} characters of output reached the host")
    return problems


async def _find_daemons() -> Sequence[str]:
    """Return a problem if an attack left a daemon running; a namespace takes a moment to end."""
    for _ in range(50):
        running = False
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                running |= path.read_bytes() == _DAEMON
        if not running:
            return []
        await asyncio.sleep(0.02)
    return ["left running: a daemon"]
