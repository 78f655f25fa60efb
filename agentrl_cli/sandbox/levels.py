"""Levels of isolation, the kind of runner behind each, and which of them a configuration allows."""

from __future__ import annotations

import os

from agentrl_cli.errors import ConfigError
from agentrl_cli.registry import resolve
from agentrl_cli.sandbox.runner_process import Runner

STRENGTH = {"bare": 0, "landlock": 1, "ns": 2, "docker": 3}
"""Levels, weakest first. `ns` and `docker` hold hostile code; `landlock` holds most of it; `bare` holds nothing."""

AUTO = ("ns", "docker", "landlock")
"""What `backend: auto` tries, in this order: `ns` and `docker` hold the same, and `ns` is faster and needs no daemon
that runs as root. `bare` has to be asked for."""

RUNNERS = {
    "ns": "agentrl_cli.sandbox.runner_process:Process",
    "landlock": "agentrl_cli.sandbox.runner_process:Process",
    "bare": "agentrl_cli.sandbox.runner_process:Process",
    "docker": "agentrl_cli.sandbox.container:Container",
}
"""Level → its kind of runner. A user's own backend is named in the configuration as `module:object`."""

_BARE = "Sandbox level bare isolates NOTHING: the model's code runs as "


def bare_warning() -> str:
    """Return level `bare`'s warning for the current user: a runner that root starts becomes another user."""
    if os.geteuid() == 0:
        return (
            _BARE
            + "an ordinary user of this machine, with all files that are open to everyone, and your network."
        )
    return _BARE + "you, with your files and your network."


def runner_kind(level: str) -> type[Runner]:
    """Return the class of a level's runners."""
    kind: type[Runner] = resolve("sandbox", RUNNERS, level)
    return kind


def kinds_of(backend: str) -> dict[str, type[Runner]]:
    """Return the levels that a backend may run at, in the order to try, with their classes. Raises ConfigError."""
    if backend == "auto":
        return {level: runner_kind(level) for level in AUTO}
    if backend in STRENGTH:
        return {backend: runner_kind(backend)}
    if ":" not in backend:
        raise ConfigError(
            f"Unknown sandbox backend {backend!r}.",
            hint=f"There are: auto, {', '.join(STRENGTH)}, or module:object.",
        )
    kind = resolve("sandbox backends", RUNNERS, backend)
    if not (isinstance(kind, type) and issubclass(kind, Runner)) or kind.level not in STRENGTH:
        raise ConfigError(
            f"{backend} is not a sandbox backend.",
            hint="It has to be a subclass of agentrl_cli.sandbox.runner_process.Runner whose `level` is the level that "
            f"it is as strong as: {', '.join(STRENGTH)}.",
        )
    return {kind.level: kind}
