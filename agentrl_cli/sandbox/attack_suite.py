"""Running the hostile programs against a sandbox: canaries on the host, a verdict each, a matrix of guarantees."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_cli.errors import SandboxFault
from agentrl_cli.sandbox import owner
from agentrl_cli.sandbox.attacks import Attack, attacks
from agentrl_cli.sandbox.launch import CANARY
from agentrl_cli.sandbox.pool import Sandbox
from agentrl_cli.sandbox.results import ExecResult
from agentrl_cli.sandbox.session import Session

_MARK = "98765.25"
"""Argument of the daemons that attacks try to leave behind."""
_HEAD_START = 0.15
"""Seconds after which one session talks while the other listens."""
PATIENCE = 15.0
"""Seconds of the wall limit for an attack that another limit has to stop, where the machine was too slow for it, and
for the harmless programs around an attack."""

BOMBS = ("fork-bomb", "shell-fork-bomb")
UNBOUNDED = "not tried: nothing bounds the number of root's processes here; be another user, or let cgroups be made"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one attack."""

    attack: str
    guarantee: str
    status: str
    problems: tuple[str, ...]
    """Why it was not contained; empty where it was."""
    seconds: float

    @property
    def contained(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One line of the matrix that `agentrl doctor` prints: held here, or not, found out by attacking."""

    name: str
    held: bool
    detail: str
    fix: str = ""
    """What to do where it is not held."""


@dataclass(slots=True)
class Canaries:
    """What the attacks aim at: a file, a folder, a port, an abstract socket, a socket in the folder, and a process."""

    secret: str
    folder: Path
    port: int
    name: str
    process: subprocess.Popen[bytes]
    touched: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        """What the attacks' placeholders stand for."""
        file = self.folder / "secret"
        return {
            "secret_file": file, "folder": self.folder, "port": self.port, "name": self.name, "pid": self.process.pid,
        }  # fmt: skip

    def problems(self) -> list[str]:
        """What was touched since the last look."""
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
    """Sets them up, readable for everyone, and takes them away."""
    secret = f"canary-{secrets.token_hex(12)}"
    folder = Path(tempfile.mkdtemp(prefix=f"{CANARY}{owner.name()}-"))
    folder.chmod(0o777)
    (folder / "secret").write_text(secret)
    program = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
    process = subprocess.Popen(program, env={"CANARY": secret}, cwd=folder)  # where a sweep finds it if we are killed
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
    datagrams = _datagrams(folder / "datagrams", lambda: touched.append("the canary's datagram socket was reached"))
    servers = [
        await asyncio.start_server(serve("port"), "127.0.0.1", 0),
        await asyncio.start_unix_server(serve("abstract socket"), sock=abstract),
    ]
    os.environ["SECRET_CANARY"] = secret
    try:
        yield Canaries(secret, folder, servers[0].sockets[0].getsockname()[1], name, process, touched)
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
    """A datagram socket in the file system, open to everyone, such as the journal's."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(path))
    listening.setblocking(False)
    path.chmod(0o777)

    def heard() -> None:
        listening.recv(4096)
        reached()

    asyncio.get_running_loop().add_reader(listening, heard)
    return listening


async def attack(
    sandbox: Sandbox,
    chosen: Sequence[Attack] | None = None,
    on_verdict: Callable[[Verdict], None] | None = None,
    wall: float = 1.5,
) -> tuple[Verdict, ...]:
    """Runs attacks (default: all) one after the other, each in a session of its own.

    `wall`: seconds for each. One that another limit than time has to stop runs once more with PATIENCE where time came
    first: a busy machine fills no disk in half a second.
    """
    verdicts: list[Verdict] = []
    async with canaries() as targets:
        for one in attacks() if chosen is None else chosen:
            if one.name in BOMBS and not sandbox.bounded:
                verdict = Verdict(one.name, one.guarantee, "not run", (UNBOUNDED,), 0.0)
            else:
                verdict = await _one(sandbox, one, targets, wall)
            if _only_slow(one, verdict):
                verdict = await _one(sandbox, one, targets, PATIENCE)
            verdicts.append(verdict)
            if on_verdict:
                on_verdict(verdict)
    return tuple(verdicts)


def _only_slow(one: Attack, verdict: Verdict) -> bool:
    """Whether nothing went wrong but that the wall limit came before the one that the attack runs into."""
    return verdict.status == "timeout" and "timeout" not in one.right and len(verdict.problems) == 1


async def _one(sandbox: Sandbox, one: Attack, targets: Canaries, wall: float) -> Verdict:
    session = await sandbox.session(wall=wall, cpu=5.0, memory_mb=512)
    faults = sandbox.counts.total()
    problems: list[str] = []
    result: ExecResult | None = None
    try:
        if one.op == "cell":
            await session.cell("kept = 'the state'", wall=PATIENCE)
        if one.meanwhile:
            result, heard = await _two(sandbox, session, one, targets)
            problems += ["the other session heard what it must not"] if heard else []
        else:
            result = await getattr(session, one.op)(_aimed(one.code, targets))
        problems += _read(one, result, targets)
        if one.op == "cell" and result.state_kept:
            after = await session.cell("kept", wall=PATIENCE)
            if after.stdout != "'the state'\n" and after.state_kept:
                problems.append("the session lost its state and did not say so")
        following = await session.run("print(6 * 7)", wall=PATIENCE)
        if following.stdout != "42\n":
            problems.append(f"the next execution went wrong: {following.text()[-100:]}")
        ours = sum(count for status, count in sandbox.counts.items() if _is_ours(status))
        if ours and sandbox.counts.total() > faults:
            problems += [f"the sandbox had to restart ({status})" for status in sandbox.counts if _is_ours(status)]
            for status in [status for status in sandbox.counts if _is_ours(status)]:
                del sandbox.counts[status]
    except SandboxFault as fault:
        problems.append(fault.message)
    finally:
        await session.close()
    problems += targets.problems()
    problems += await _left()
    seconds = result.seconds if result else 0.0
    return Verdict(one.name, one.guarantee, str(result.status) if result else "fault", tuple(problems), seconds)


def _aimed(code: str, targets: Canaries) -> str:
    """An attack's code with the canaries in it."""
    for key, value in targets.values.items():
        code = code.replace(f"@{key}@", str(value))
    return code


async def _two(sandbox: Sandbox, session: Session, one: Attack, targets: Canaries) -> tuple[ExecResult, bool]:
    """An attack of two sessions: the result of the one that listens, and whether it heard the word.

    The least busy runner takes the next session, so with two for each one listens beside the one that talks.
    """
    word = "w" + secrets.token_hex(6)
    code, meanwhile = _aimed(one.code, targets).replace("@word@", word), _aimed(one.meanwhile, targets)
    test = {"call": "tell", "args": [word], "expect": None}
    others = [await sandbox.session(cpu=5.0, memory_mb=512) for _ in range(2 * sandbox.workers - 1)]
    try:
        for other in (session, *others):
            await other.run("0", wall=PATIENCE)
        if one.op == "grade":  # the box that it gets takes longest to come where nothing was graded before
            await session.grade("def tell(word): return", [test], wall=PATIENCE)
        listening = [asyncio.ensure_future(other.run(meanwhile, wall=PATIENCE)) for other in others]
        await asyncio.sleep(_HEAD_START)
        if one.op == "grade":
            await session.grade(code, [test], wall=PATIENCE)
        else:
            await getattr(session, one.op)(code, wall=PATIENCE)
        results = await asyncio.gather(*listening)
    finally:
        for other in others:
            await other.close()
    heard = [result for result in results if word in result.stdout + result.stderr]
    wrong = [result for result in results if "LEAK" in result.stdout or result.status not in one.right]
    return (heard or wrong or results)[0], bool(heard)


def _read(one: Attack, result: ExecResult, targets: Canaries) -> list[str]:
    """What the result itself gives away."""
    problems = []
    text = result.stdout + result.stderr
    if targets.secret in text:
        problems.append("it read a secret")
    problems += [line[:120] for line in text.splitlines() if line.startswith("LEAK")]
    if result.status not in one.right:
        problems.append(f"the result is {result.status}, not {' or '.join(one.right)}: {text[-150:].strip()}")
    if len(text) > 300_000:
        problems.append(f"{len(text)} characters of output reached the host")
    return problems


def _is_ours(status: str) -> bool:
    from agentrl_cli.sandbox.results import Status

    return Status(status).ours


async def _left() -> list[str]:
    """Daemons of an attack that are still there; a namespace takes a moment to end."""
    for _ in range(50):
        if not _daemons():
            return []
        await asyncio.sleep(0.02)
    return [f"left running: {line}" for line in _daemons()]


def _daemons() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            continue
        if line == f"sleep {_MARK}":
            found.append(line)
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


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
"""What a level holds of it, where that is less."""


async def probe(sandbox: Sandbox) -> tuple[Guarantee, ...]:
    """What this sandbox guarantees here, found out by running the quick attacks (about 5 s)."""
    verdicts = await attack(sandbox, [one for one in attacks() if one.quick], wall=0.5)
    rows = []
    for name, meaning in {**MEANING, **WEAKER.get(sandbox.level, {})}.items():
        broken = [verdict for verdict in verdicts if verdict.guarantee == name and not verdict.contained]
        detail = "; ".join(f"{verdict.attack}: {verdict.problems[0]}" for verdict in broken) or meaning
        rows.append(Guarantee(name, not broken, detail, _fix(sandbox.level) if broken else ""))
    return tuple(rows)


def _fix(level: str) -> str:
    if level in ("ns", "docker"):
        return f"`agentrl sandbox attack --level {level}` shows each attack; run no model's code until it is held."
    return "A stronger level holds it: apt-get install bubblewrap, or a Docker engine and `sandbox.backend: docker`."
