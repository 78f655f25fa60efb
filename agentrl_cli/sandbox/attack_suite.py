"""Runs the hostile programs of `sandbox/attacks.txt` against a sandbox: canaries on the host, verdicts, guarantees."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentrl_cli.errors import SandboxFault
from agentrl_cli.paths import sandbox_dir
from agentrl_cli.sandbox.canaries import Canaries, canaries
from agentrl_cli.sandbox.grading import grade
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
    stays: bool
    """A channel that stays open (docs/sandbox.md): it is measured, and no problem."""
    code: str
    meanwhile: str
    """The program that runs in another session at the same time; empty for an attack of one session."""


@cache
def attacks() -> tuple[Attack, ...]:
    """Return all of them, in the order of the file."""
    return tuple(_parse((Path(sandbox_dir()) / "attacks.txt").read_text(encoding="utf-8")))


def _parse(text: str) -> Iterator[Attack]:
    for part in text.split("\n=== ")[1:]:
        head, _, code = part.partition("\n")
        name, guarantee, op, right, flags = (field.strip() for field in head.split("|"))
        words = flags.split()
        code, _, other = code.strip("\n").partition("\n--- meanwhile\n")
        flags_of = ("quick" in words, "strong" in words, "stays" in words)
        yield Attack(name, guarantee, op, tuple(right.split()), *flags_of, code, other)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one attack."""

    attack: str
    guarantee: str
    status: str
    problems: tuple[str, ...]
    """Why it was not contained; empty if it was."""
    seconds: float
    rate: float | None = None
    """Bits a second that the other session learned by a channel that stays open; None for others."""

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
    rate = None
    try:
        if one.op == "cell":
            await session.cell("kept = 'the state'", wall=PATIENCE)
        if one.meanwhile:
            word, results = await _two(sandbox, session, one, targets)
            heard = [found for found in results if word in found.stdout + found.stderr]
            wrong = [
                found
                for found in results
                if "LEAK" in found.stdout or found.status not in one.right
            ]
            result = (heard or wrong or results)[0]
            rate = max(learned(word, found.stdout) for found in results) if one.stays else None
            problems += (
                ["the other session heard what it must not"] if heard and not one.stays else []
            )
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
        failures = [
            status
            for status, count in sandbox.counts.items()
            if count and _is_infrastructure(status)
        ]
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
    status = str(result.status) if result else "fault"
    return Verdict(one.name, one.guarantee, status, tuple(problems), seconds, rate)


def learned(word: str, said: str) -> float:
    """Bits a second that a session learned, which said `WORD SECONDS` for each time it received 48 bits.

    The capacity of a channel with so many wrong bits; 0 above a quarter, since chance alone gives a half.
    """
    best = 0.0
    for heard, seconds in (line.split() for line in said.splitlines()):
        wrong = (int(heard[1:], 16) ^ int(word[1:], 16)).bit_count() / 48
        lost = -sum(part * math.log2(part) for part in (wrong, 1 - wrong) if part)
        best = max(best, (1 - lost) * 48 / float(seconds) if wrong <= 0.25 else 0.0)
    return best


def _aimed(code: str, targets: Canaries) -> str:
    """Return an attack's code with the canaries in it."""
    for key, value in targets.values.items():
        code = code.replace(f"@{key}@", str(value))
    return code


async def _two(
    sandbox: Sandbox, session: Session, one: Attack, targets: Canaries
) -> tuple[str, list[ExecResult]]:
    """Return an attack of two sessions: the word that one has to tell, and the results of those that listen.

    The least busy runner gets the next session, so with two per runner one listens beside the one that talks.
    """
    word = "w" + secrets.token_hex(6)
    code, meanwhile = (
        _aimed(one.code, targets).replace("@word@", word),
        _aimed(one.meanwhile, targets),
    )
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
    return word, results


def _read(one: Attack, result: ExecResult, targets: Canaries) -> list[str]:
    """Problems that the result itself shows."""
    problems = []
    text = result.stdout + result.stderr
    if targets.secret in text:
        problems.append("it read a secret")
    problems += [line[:120] for line in text.splitlines() if line.startswith("LEAK")]
    if result.status not in one.right:
        problems.append(
            f"the result is {result.status}, not {' or '.join(one.right)}: {text[-150:].strip()}"
        )
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
        broken = [
            verdict for verdict in verdicts if verdict.guarantee == name and not verdict.contained
        ]
        detail = (
            "; ".join(f"{verdict.attack}: {verdict.problems[0]}" for verdict in broken) or meaning
        )
        rows.append(Guarantee(name, not broken, detail, _fix(sandbox.level) if broken else ""))
    return tuple(rows)


def _fix(level: str) -> str:
    if level in ("ns", "docker"):
        return f"`agentrl sandbox attack --level {level}` shows each attack; run no model's code until it is held."
    return "A stronger level holds it: apt-get install bubblewrap, or a Docker engine and `sandbox.backend: docker`."
