"""Which ranks the settings or torchrun ask for, and whether they can be had."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, EnvironmentProblem


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
        """What torchrun's variables name; None without them or for a single rank."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in env for name in names) or env["WORLD_SIZE"] == "1":
            return None
        rank, local, size = (int(env[name]) for name in names[:3])
        return cls(
            rank,
            local,
            size,
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            "TORCHELASTIC_RUN_ID" in env,
        )

    @property
    def env(self) -> dict[str, str]:
        """torchrun's variables."""
        numbers = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local,
            "WORLD_SIZE": self.size,
            "MASTER_PORT": self.port,
        }
        return {**{name: str(value) for name, value in numbers.items()}, "MASTER_ADDR": self.host}


def require_possible(config: Config) -> None:
    """Raise ConfigError or EnvironmentProblem if this machine or the other settings exclude what `cluster` asks for."""
    cluster = config.cluster
    if cluster.gpus is not None:
        import torch

        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if cluster.gpus > found:
            raise EnvironmentProblem(
                f"cluster.gpus is {cluster.gpus}, and torch finds {found} GPUs on this machine.",
                hint=f"`--ranks {cluster.gpus}` trains with so many processes on the CPU; `agentrl doctor` lists GPUs.",
            )
    if cluster.size == 1:
        return
    import torch

    device, on_cpu = config.model.device.split(":")[0], cluster.gpus is None
    wrong = [
        (
            cluster.gpus and cluster.ranks > 1,
            "cluster.gpus and cluster.ranks are both set",
            "Choose one.",
        ),
        (
            cluster.nodes > 1 and ":" not in cluster.rendezvous,
            f"cluster.nodes is {cluster.nodes} and cluster.rendezvous names no HOST:PORT",
            "It is an address of the first machine with a free port: --rendezvous node0:29500.",
        ),
        (
            device == "cuda" if on_cpu else device == "cpu",
            f"model.device is {config.model.device}, and the ranks are on the {'CPU' if on_cpu else 'GPU'}",
            "Leave model.device at auto, or choose --gpus or --ranks.",
        ),
        (
            on_cpu and device == "auto" and torch.cuda.is_available(),
            "cluster.ranks asks for processes on the CPU, and model.device: auto means the GPU here",
            "Use --gpus, or set model.device=cpu.",
        ),
        (
            cluster.shard == "full" and config.adapter.enabled,
            "cluster.shard: full cannot spread an adapter's base over ranks",
            "With adapter.enabled every rank has the base: set cluster.shard: none, or train all weights (--full).",
        ),
        (
            cluster.shard == "full" and config.train.optimizer != "adamw",
            f"cluster.shard: full cannot spread the state of train.optimizer: {config.train.optimizer}",
            "Use train.optimizer: adamw, or cluster.shard: none.",
        ),
    ]
    for found_wrong, message, hint in wrong:
        if found_wrong:
            raise ConfigError(f"{message}.", hint=hint)
    if cluster.nodes > 1:
        _require_host(cluster.rendezvous)


def _require_host(rendezvous: str) -> None:
    host, _ = address(rendezvous)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        text = f"The host {host} of cluster.rendezvous cannot be found: {error.strerror}."
        raise EnvironmentProblem(
            text, hint="It is the first machine, by a name that all know."
        ) from error


def count_given(config: Config, given: Place) -> None:
    """Let `cluster` count the ranks that torchrun started, on GPUs if every rank of this machine has one."""
    import torch

    here = int(os.environ.get("LOCAL_WORLD_SIZE", given.size))
    gpus = (
        config.model.device != "cpu"
        and torch.cuda.is_available()
        and torch.cuda.device_count() >= here
    )
    config.cluster.gpus, config.cluster.ranks = (here, 1) if gpus else (None, here)
    config.cluster.nodes = given.size // here
    config.cluster.rendezvous = f"{given.host}:{given.port}"
    alone = {
        "algo.ref_ema": bool(config.algo.ref_ema),
        "trainer.kind: trl": config.trainer.kind == "trl",
    }
    for name, on in alone.items():
        if on and given.size > 1:
            raise ConfigError(
                f"{name} works in one process, and torchrun started {given.size}.",
                hint="Leave it out.",
            )


def address(text: str) -> tuple[str, int]:
    """HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{text!r} is not HOST:PORT.", hint="For example --rendezvous node0:29500."
        )
    return host, int(port)
