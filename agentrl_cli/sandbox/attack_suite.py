"""Runs the hostile programs of `sandbox/attacks.txt` against a sandbox: canaries on the host, verdicts, guarantees."""

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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from agentrl_cli.errors import SandboxFault
from agentrl_cli.paths import sandbox_dir
from agentrl_cli.sandbox import owner
from agentrl_cli.sandbox.grading import grade
from agentrl_cli.sandbox.launch import CANARY
from agentrl_cli.sandbox.results import ExecResult
from agentrl_cli.sandbox.sandbox import Sandbox
from agentrl_cli.sandbox.session import Session

_MARK = "98765.25"
"""Argument of the daemons that attacks try to leave behind."""
_HEAD_START = 0.15
"""Seconds that one session listens before the other talks."""
PATIENCE = 15.0
"""Wall limit in seconds of the harmless programs around an attack, and of its second run if the machine was too slow
for the limit that should stop it."""

BOMBS = ("fork-bomb", "shell-fork-bomb")
UNBOUNDED = "not tried: nothing bounds the number of root's processes here; be another user, or let cgroups be made"


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile program and the results that count as right for it."""

    name: str
    guarantee: str
    """files | network | signals | processes | memory | disk | output | system | state"""
    op: str
    """run | cell | bash | grade"""
    right: tuple[str, ...]
    """Names of the statuses that are right."""
    quick: bool
    """Part of the probe that `agentrl doctor` runs."""
    strong: bool
    """Promised only by the levels that hold hostile code (ns, docker)."""
    code: str
    meanwhile: str
    """The program that runs in another session at the same time; empty for an attack of one session."""


@cache
def attacks() -> tuple[Attack, ...]:
    """All of them, in the order of the file."""
    return tuple(_parse((Path(sandbox_dir()) / "attacks.txt").read_text(encoding="utf-8")))


def _parse(text: str) -> Iterator[Attack]:
    for part in text.split("\n=== ")[1:]:
        head, _, code = part.partition("\n")
        name, guarantee, op, right, flags = (field.strip() for field in head.split("|"))
        words = flags.split()
        code, _, other = code.strip("\n").partition("\n--- meanwhile\n")
        yield Attack(name, guarantee, op, tuple(right.split()), "quick" in words, "strong" in words, code, other)


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


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One line of the matrix that `agentrl doctor` prints: whether a guarantee holds here, tested by attacks."""

    name: str
    held: bool
    detail: str
    fix: str = ""
    """What to do if it does not hold."""


@dataclass(slots=True)
class Canaries:
    """Targets of the attacks: a file, a folder, a port, an abstract socket, a socket in the folder, and a process."""

    secret: str
    folder: Path
    port: int
    name: str
    process: subprocess.Popen[bytes]
    touched: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        """Values of the attacks' placeholders."""
        file = self.folder / "secret"
        return {
            "secret_file": file, "folder": self.folder, "port": self.port, "name": self.name, "pid": self.process.pid,
        }  # fmt: skip

    def problems(self) -> list[str]:
        """The canaries touched since the last call."""
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
    """Sets them up, readable for every user, and removes them."""
    secret = f"canary-{secrets.token_hex(12)}"
    folder = Path(tempfile.mkdtemp(prefix=f"{CANARY}{owner.name()}-"))
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
    """A datagram socket in the file system, open to every user, such as the journal's."""
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

    `wall`: seconds for each. An attack that a limit other than time has to stop runs once more with PATIENCE if time
    ended it first: a busy machine does not fill a disk in half a second.
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
    """Whether the only problem is that the wall limit came before the limit that the attack should meet."""
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
        failures = [status for status, count in sandbox.counts.items() if count and _is_infrastructure(status)]
        if failures and sandbox.counts.total() > faults:
            problems += [f"the sandbox had to restart ({status})" for status in failures]
            for status in failures:
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
    """An attack of two sessions: the result of the listening one, and whether it received the word.

    The least busy runner gets the next session, so with two per runner one listens beside the one that talks.
    """
    word = "w" + secrets.token_hex(6)
    code, meanwhile = _aimed(one.code, targets).replace("@word@", word), _aimed(one.meanwhile, targets)
    test = {"call": "tell", "args": [word], "expect": None}
    others = [await sandbox.session(cpu=5.0, memory_mb=512) for _ in range(2 * sandbox.workers - 1)]
    try:
        for other in (session, *others):
            await other.run("0", wall=PATIENCE)
        if one.op == "grade":  # the first box for grading takes longest to start
            await grade(session, "def tell(word): return", [test], wall=PATIENCE)
        listening = [asyncio.ensure_future(other.run(meanwhile, wall=PATIENCE)) for other in others]
        await asyncio.sleep(_HEAD_START)
        if one.op == "grade":
            await grade(session, code, [test], wall=PATIENCE)
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
    """Problems that the result itself shows."""
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


def _is_infrastructure(status: str) -> bool:
    from agentrl_cli.sandbox.results import Status

    return Status(status).infrastructure


async def _left() -> list[str]:
    """Daemons that an attack left running; a namespace takes a moment to end."""
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
"""Weaker meanings of some levels."""


async def probe(sandbox: Sandbox) -> tuple[Guarantee, ...]:
    """What this sandbox guarantees here, tested by the quick attacks (about 5 s)."""
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
