"""Which ranks the settings or torchrun ask for, and whether they can be had."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, EnvironmentProblem
from agentrl_cli.plugins.ranks.settings import RanksConfig, check

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""torchrun's environment of a rank."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process among the ranks."""

    rank: int
    local: int
    """Number on its machine, and of its GPU."""
    size: int
    host: str
    port: int
    joined: bool = False
    """True if something else started the ranks and keeps the store where they meet (torchrun)."""

    @classmethod
    def given(cls, env: Mapping[str, str]) -> Place | None:
        """Return the place that torchrun's variables name; None without them or for a single rank."""
        if any(name not in env for name in VARIABLES) or env["WORLD_SIZE"] == "1":
            return None
        rank, local, size, host, port = (env[name] for name in VARIABLES)
        joined = "TORCHELASTIC_RUN_ID" in env
        return cls(int(rank), int(local), int(size), host, int(port), joined)

    @property
    def env(self) -> dict[str, str]:
        """torchrun's variables."""
        values = (self.rank, self.local, self.size, self.host, self.port)
        return dict(zip(VARIABLES, map(str, values), strict=True))


def require_possible(config: Config) -> None:
    """Raise ConfigError or EnvironmentProblem if this machine or the other settings exclude these ranks."""
    ranks = config.section(RanksConfig)
    if ranks.gpus is None and ranks.size == 1:
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (ranks.gpus or 0) > found:
        raise EnvironmentProblem(
            f"ranks.gpus is {ranks.gpus}, and torch finds {found} GPUs on this machine.",
            hint=f"`--ranks {ranks.gpus}` trains with so many processes on the CPU; `agentrl doctor` lists GPUs.",
        )
    if ranks.size == 1:
        return
    for wrong, message, hint in _conflicts(config, ranks, found):
        if wrong:
            raise ConfigError(f"{message}.", hint=hint)
    if ranks.nodes > 1:
        _require_host(ranks.rendezvous)


def _conflicts(config: Config, ranks: RanksConfig, gpus: int) -> list[tuple[object, str, str]]:
    """Return each conflict: whether it applies, its description, and the remedy."""
    from agentrl_cli.trainer.compute import find_learner

    device, on_cpu = config.model.device.split(":")[0], ranks.gpus is None
    full = ranks.shard == "full"
    return [
        (
            ranks.gpus and ranks.processes > 1,
            "ranks.gpus and ranks.processes are both set",
            "Choose one.",
        ),
        (
            ranks.nodes > 1 and ":" not in ranks.rendezvous,
            f"ranks.nodes is {ranks.nodes} and ranks.rendezvous names no HOST:PORT",
            "It is an address of the first machine with a free port: --rendezvous node0:29500.",
        ),
        (
            device == "cuda" if on_cpu else device == "cpu",
            f"model.device is {config.model.device}, and the ranks are on the {'CPU' if on_cpu else 'GPU'}",
            "Leave model.device at auto, or choose --gpus or --ranks.",
        ),
        (
            on_cpu and device == "auto" and gpus,
            "ranks.processes asks for processes on the CPU, and model.device: auto means the GPU here",
            "Use --gpus, or set model.device=cpu.",
        ),
        (
            full and config.adapter.enabled,
            "ranks.shard: full cannot spread an adapter's base over ranks",
            "With adapter.enabled every rank has the base: set ranks.shard: none, or train all weights (--full).",
        ),
        (
            full and config.train.optimizer.name != "adamw",
            f"ranks.shard: full cannot spread the state of train.optimizer: {config.train.optimizer.name}",
            "Use train.optimizer: adamw, or ranks.shard: none.",
        ),
        (
            find_learner(config) is not None,
            "the learner that these settings choose works in one process",
            "Leave out --gpus, --ranks and --nodes, or that learner.",
        ),
    ]


def _require_host(rendezvous: str) -> None:
    host, _ = parse_address(rendezvous)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        text = f"The host {host} of ranks.rendezvous cannot be found: {error.strerror}."
        raise EnvironmentProblem(
            text, hint="It is the first machine, by a name that all know."
        ) from error


def count_given(config: Config, given: Place) -> None:
    """Let the settings count the ranks that torchrun started, on GPUs if every rank of this machine has one."""
    import torch

    here = int(os.environ.get("LOCAL_WORLD_SIZE", given.size))
    gpus = (
        config.model.device != "cpu"
        and torch.cuda.is_available()
        and torch.cuda.device_count() >= here
    )
    ranks = config.section(RanksConfig)
    ranks.gpus, ranks.processes = (here, 1) if gpus else (None, here)
    ranks.nodes = given.size // here
    ranks.rendezvous = f"{given.host}:{given.port}"
    try:
        check(config)
    except ValueError as error:
        raise ConfigError(f"torchrun started {given.size} ranks, and {error}.") from error


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{text!r} is not HOST:PORT.", hint="For example --rendezvous node0:29500."
        )
    return host, int(port)
