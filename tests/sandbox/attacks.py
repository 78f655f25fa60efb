"""The attack suite: `python -m tests.sandbox.attacks [LEVEL] [--only NAME …]`, from the project's folder.

All programs of agentrl_cli/doctor/attacks.txt and of the file beside this one. Those of two sessions have a second
program, which listens; a channel that stays open is measured in bits a second, and does not
count as a failure.
"""

import argparse
import asyncio
import math
import secrets
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from agentrl_cli.config import SandboxConfig
from agentrl_cli.doctor.attacks import (
    PATIENCE,
    Attack,
    Canaries,
    Verdict,
    attack,
    canaries,
    parse_attacks,
    run_program,
)
from agentrl_cli.sandbox import ExecResult, Sandbox, Session, grade

# Seconds that one session listens before the other talks.
HEAD_START = 0.15
# Seconds for a program that only time can stop.
ENDLESS = 0.3
# Attacks at the same time: most of their time is waiting for a limit.
BESIDE = 6
# They take the machine, or leave what the check after another attack would find.
ALONE = ("fork-bomb", "shell-fork-bomb", "many-threads", "daemon", "daemon-holds-stdout")


@cache
def attacks() -> tuple[Attack, ...]:
    return (*parse_attacks(), *parse_attacks(Path(__file__).with_suffix(".txt")))


def contained_attacks() -> list[Attack]:
    return [one for one in attacks() if "stays" not in one.flags]


async def attack_all(
    sandbox: Sandbox,
    chosen: Sequence[Attack],
    on_verdict: Callable[[Verdict, float | None], None] | None = None,
    wall: float = 1.5,
) -> list[Verdict]:
    """Run attacks, several at the same time, each in a session of its own; channels one after the other."""
    places = asyncio.Semaphore(BESIDE)

    async def run(one: Attack) -> Verdict:
        rates: list[float] = []

        async def execute(
            session: Session, one: Attack, targets: Canaries
        ) -> tuple[ExecResult, list[str]]:
            if "\n--- meanwhile\n" not in one.code:
                return await run_program(session, one, targets)
            result, problems, rate = await _run_two(sandbox, session, one, targets)
            rates.extend([rate] * ("stays" in one.flags))
            return result, problems

        seconds = min(wall, ENDLESS) if one.right == ("timeout",) else wall
        async with places:
            verdict = await attack(sandbox, one, targets, seconds, execute)
        if on_verdict:
            on_verdict(verdict, rates[-1] if rates else None)
        return verdict

    alone = [one for one in chosen if one.name in ALONE or "stays" in one.flags]
    async with canaries() as targets:
        found = await asyncio.gather(*(run(one) for one in chosen if one not in alone))
        return [*found, *[await run(one) for one in alone]]


async def _run_two(
    sandbox: Sandbox, session: Session, one: Attack, targets: Canaries
) -> tuple[ExecResult, list[str], float]:
    """Run an attack of two sessions: a result, problems, and the bits a second that those that listen learned.

    The least busy runner gets the next session, so with two per runner one listens beside the one that talks.
    """
    word = "w" + secrets.token_hex(6)
    code, _, meanwhile = targets.aim(one.code).partition("\n--- meanwhile\n")
    code = code.replace("@word@", word)
    test = {"call": "tell", "args": [word], "expect": None}
    others = [await sandbox.session(cpu=5.0, memory_mb=512) for _ in range(2 * sandbox.workers - 1)]
    try:
        for other in (session, *others):
            await other.run("0", wall=PATIENCE)
        if one.op == "grade":  # the first box for grading takes longest to start
            await grade(session, "def tell(word): return", [test], wall=PATIENCE)
        listening = [asyncio.ensure_future(other.run(meanwhile, wall=PATIENCE)) for other in others]
        await asyncio.sleep(HEAD_START)
        if one.op == "grade":
            await grade(session, code, [test], wall=PATIENCE)
        else:
            await getattr(session, one.op)(code, wall=PATIENCE)
        results = await asyncio.gather(*listening)
    finally:
        for other in others:
            await other.close()
    heard = [found for found in results if word in found.stdout + found.stderr]
    wrong = [found for found in results if "LEAK" in found.stdout or found.status not in one.right]
    stays = "stays" in one.flags
    rate = max(learned_bits(word, found.stdout) for found in results) if stays else 0.0
    return (
        (heard or wrong or results)[0],
        ["the other session heard what it must not"] if heard and not stays else [],
        rate,
    )


def learned_bits(word: str, said: str) -> float:
    """Return the bits a second that a session learned, which said `WORD SECONDS` each time it received 48 bits.

    The capacity of a channel with so many wrong bits; 0 above a quarter, since chance alone gives a half.
    """
    best = 0.0
    for heard, seconds in (line.split() for line in said.splitlines()):
        wrong = (int(heard[1:], 16) ^ int(word[1:], 16)).bit_count() / 48
        lost = -sum(part * math.log2(part) for part in (wrong, 1 - wrong) if part)
        best = max(best, (1 - lost) * 48 / float(seconds) if wrong <= 0.25 else 0.0)
    return best


def _print(verdict: Verdict, rate: float | None) -> None:
    text = "contained" if rate is None else f"stays open, {rate:.0f} bit/s here"
    text = "; ".join(verdict.problems) or text
    row = f"{verdict.guarantee:10} {verdict.attack:36} {verdict.status:14} {verdict.seconds:6.2f} s"
    print(f"{row}  {text}", flush=True)


async def main(level: str, only: Sequence[str]) -> int:
    chosen = [one for one in attacks() if not only or any(part in one.name for part in only)]
    async with await Sandbox.open(
        SandboxConfig.model_validate({"backend": level, "min_level": level})
    ) as sandbox:
        verdicts = await attack_all(sandbox, chosen, _print)
    held = {one.name for one in contained_attacks()}
    tried = [one for one in verdicts if one.attack in held]
    open_ = len(verdicts) - len(tried)
    contained = sum(one.contained for one in tried)
    print(f"{contained} of {len(tried)} contained at level {level}; {open_} channels stay open")
    return not all(one.contained for one in verdicts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("level", nargs="?", default="ns", choices=("ns", "docker", "landlock"))
    parser.add_argument("--only", nargs="*", default=(), help="attacks whose name contains this")
    asked = parser.parse_args()
    sys.exit(asyncio.run(main(asked.level, asked.only)))
