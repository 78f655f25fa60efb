"""The processes of the ranks: which the settings or torchrun ask for; started, watched by heartbeats, and ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, EnvironmentProblem, RunFailed
from agentrl_cli.plugins.ranks.settings import RanksConfig, check
from agentrl_cli.sandbox.results import signal_name

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
        host, _ = parse_address(ranks.rendezvous)
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise EnvironmentProblem(
                f"The host {host} of ranks.rendezvous cannot be found: {error.strerror}.",
                hint="It is the first machine, by a name that all know.",
            ) from error


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


BEAT = 2.0
"""Seconds between two heartbeats."""
SILENT = 40.0
"""Seconds without one after which a rank counts as lost."""
STARTUP = 600.0
"""Seconds until all ranks must have come."""
GRACE = 10.0
"""Seconds that the run has to end by itself once a rank is lost."""
RESUME = "Resume it: agentrl train --resume last"


def client(place: Place) -> Any:
    """Return a connection of its own to the store: one that waits blocks all other calls on it."""
    return store_at(place.host, place.port, timeout=timedelta(seconds=STARTUP))


def store_at(host: str, port: int, **options: Any) -> Any:
    """torch's key-value store, or a connection to it."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, wait_for_workers=False, **options)  # type: ignore[attr-defined]  # not in its __all__


class Child:
    """A rank that this process started."""

    def __init__(self, place: Place, log: Path, threads: int, found: Sequence[Path]) -> None:
        self.place = place
        self.log = log
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), **place.env}
        if place.host == "127.0.0.1" and sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agentrl_cli.plugins.ranks.team", *map(str, found)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # Ctrl-C is for rank 0, which ends the others
            )

    def ended(self) -> str:
        """Return how it ended, with its last words; empty while it runs."""
        status = self.process.poll()
        if status is None:
            return ""
        if status < 0:
            return f"Rank {self.place.rank} was killed by {signal_name(-status)}."
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"Rank {self.place.rank} ended with exit status {status}" + (
            f": {lines[-1]}" if lines else "."
        )

    def end(self, patience: float) -> None:
        """Wait so many seconds for its end, then kill it. A log without a word in it is deleted."""
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.returncode == 0:
            self.log.unlink(missing_ok=True)


def spawn(
    places: Sequence[Place], logs: Path, here: int, found: Sequence[Path] = ()
) -> list[Child]:
    """Start ranks of this machine, which share the threads of this process; `found`: its project and store."""
    import torch

    if not places:
        return []
    logs.mkdir(parents=True, exist_ok=True)
    threads = max(1, torch.get_num_threads() // here)
    return [
        Child(place, logs / f"rank-{place.rank}-{os.getpid()}.log", threads, found)
        for place in places
    ]


class Watch(threading.Thread):
    """Reports this rank's heartbeat and notices another one that was lost."""

    def __init__(
        self,
        place: Place,
        store: Any,
        children: Sequence[Child] = (),
    ) -> None:
        super().__init__(daemon=True, name="ranks")
        self.place, self.store, self.children = place, store, children
        self._stopped = threading.Event()
        self._lost = threading.Event()
        self._text = ""

    def problem(self, wait: float) -> RunFailed | None:
        """Return the error of the lost rank."""
        found = self._lost.wait(wait) if wait else self._lost.is_set()
        return RunFailed(self._text, hint=RESUME) if found else None

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        others = range(1, self.place.size) if self.place.rank == 0 else (0,)
        seen = {rank: (b"", time.monotonic()) for rank in others}
        beats, due = 0, 0.0
        while not self._stopped.wait(0.2):
            text = next((text for child in self.children if (text := child.ended())), "")
            if not text and time.monotonic() >= due:
                beats, due = beats + 1, time.monotonic() + BEAT
                text = self._exchange(beats, seen)
            if text:
                self._end(text)
                return

    def _exchange(self, beats: int, seen: dict[int, tuple[bytes, float]]) -> str:
        """Report this heartbeat and look at the others'. Returns which rank is lost."""
        try:
            self.store.set(f"beat/{self.place.rank}", str(beats))
            for rank, (before, since) in seen.items():
                key = f"beat/{rank}"
                now = self.store.get(key) if self.store.check([key]) else b""
                if now != before:
                    seen[rank] = (now, time.monotonic())
                elif time.monotonic() - since > SILENT:
                    return f"Rank {rank} has not answered for {SILENT:g} s."
        except RuntimeError as error:  # torch's DistNetworkError and its kin
            return (
                ""
                if self._stopped.is_set()
                else f"Rank 0 cannot be reached: {str(error).splitlines()[0]}"
            )
        return ""

    def _end(self, text: str) -> None:
        self._text = text
        self._lost.set()
        for child in self.children:
            child.process.kill()  # breaks the connections that this process may wait on
        leads = self.place.rank == 0
        if not self._stopped.wait(GRACE if leads else 0.0):
            print(f"Error: {text} {RESUME}" if leads else text, file=sys.stderr, flush=True)
            os._exit(1)
