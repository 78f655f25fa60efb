"""Which isolation starts on this machine, and whether it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from agentrl_cli.config import SandboxConfig
from agentrl_cli.doctor import Check
from agentrl_cli.doctor.attacks import probe
from agentrl_cli.errors import AgentRLError
from agentrl_cli.sandbox import STRENGTH, Sandbox, cgroup

LEVELS: Mapping[str, SandboxConfig] = {
    "ns": SandboxConfig(workers=1),
    "landlock": SandboxConfig(workers=1, backend="landlock", min_level="landlock"),
    "bare": SandboxConfig(workers=1, backend="bare", min_level="bare"),
}
"""Settings that try the strongest level, then weaker ones."""
DELEGATE = "start as root, or: systemd-run --user --scope -p Delegate=yes agentrl train"
STRONGER = "A stronger level holds it: apt-get install bubblewrap, or a Docker engine and `sandbox.backend: docker`."
NOT_HELD = (
    "Run no model's code at this level until it is held; sandbox/README.md says how it should be."
)


def sandbox_level() -> tuple[str | None, str, str]:
    """Return the strongest isolation that starts here (a key of sandbox.STRENGTH), why no stronger one does, and a fix.

    None if not even `bare` starts. Levels weaker than `ns` are only tried here, never chosen for a run.
    """
    reason = fix = ""
    for settings in LEVELS.values():
        try:
            return asyncio.run(start(settings)), reason, fix
        except AgentRLError as error:
            if not reason:  # the reason why the strongest failed is what a user can fix
                reason, fix = error.message, error.hint
    return None, reason, fix


async def start(settings: SandboxConfig) -> str:
    """Return the level that starts with these settings. Raises AgentRLError if none does."""
    async with await Sandbox.open(settings) as sandbox:
        return sandbox.level


def check_isolation(settings: SandboxConfig) -> Check:
    """Return the isolation under a project's settings; if none starts, the reason, and a level that would start."""
    try:
        level = asyncio.run(start(settings.replace(workers=1)))
    except AgentRLError as problem:
        strongest, minimum = sandbox_level()[0], settings.min_level
        if strongest is None:
            return Check("sandbox", "fail", f"none starts: {problem.message}", problem.hint)
        if STRENGTH[strongest] >= STRENGTH[minimum]:  # the settings are the cause, not the machine
            return Check("sandbox", "fail", problem.message, problem.hint)
        accept = f"or accept it: sandbox.min_level: {strongest}"
        accept += " and sandbox.backend: bare" * (strongest == "bare")
        detail = f"only {strongest}, sandbox.min_level is {minimum}: {problem.message}"
        return Check("sandbox", "fail", detail, f"{problem.hint} {accept}")
    if STRENGTH[level] >= STRENGTH["ns"]:
        text = f"{level}; `agentrl doctor --sandbox` attacks it and shows what it guarantees"
        return Check("sandbox", "ok", text)
    what = "bare, which isolates NOTHING" if level == "bare" else f"{level}, weaker than namespaces"
    strongest, why, fix = sandbox_level()
    if strongest is not None and STRENGTH[strongest] > STRENGTH[level]:
        why = f"sandbox.backend is {settings.backend}; {strongest} would start here"
    return Check("sandbox", "warn", f"{what}: {why}", fix)


def check_guarantees(level: str | None = None) -> tuple[str, list[Check]]:
    """Attack the strongest sandbox that starts here, or `level`, for some seconds.

    Returns the level and a check for each guarantee, with a fix if it does not hold. Raises SandboxUnavailable.
    """
    strongest, _, fix = (level, "", "") if level else sandbox_level()
    found = strongest or "ns"
    if found == "bare":
        fix = fix or "`agentrl doctor` names the strongest level here; remove --level bare."
        text = "bare isolates nothing, so it is not attacked"
        return found, [Check("everything", "fail", text, fix)]

    async def test() -> list[tuple[str, str, bool]]:
        given = {"workers": 1, "backend": found, "min_level": found}
        async with await Sandbox.open(SandboxConfig.model_validate(given)) as sandbox:
            return await probe(sandbox)

    rows = asyncio.run(test())
    fix = STRONGER if STRENGTH[found] < STRENGTH["ns"] else NOT_HELD
    checks = [
        Check(name, "ok", text) if held else Check(name, "fail", text, fix)
        for name, text, held in rows
    ]
    in_container = found == "docker"
    how = "a container's limit, and each session watched" if in_container else cgroup.describe()
    hard = in_container or cgroup.place() is not None
    last = ("ok", f"memory is {how}") if hard else ("warn", f"memory is {how}", DELEGATE)
    return found, [*checks, Check("hard limit", *last)]
