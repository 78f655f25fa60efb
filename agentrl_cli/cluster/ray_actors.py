"""Workers as Ray actors, on any number of nodes. Ray is an extra, imported only here.

The project folder goes to every node as the runtime environment's working directory, without `runs/`; what lies outside
it (a model, other packs) must be where every node sees it. Weights go into the object store once for each version.
A lost actor is not restarted by Ray but made again by the pool, on whatever node has room: also on one that came back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.cluster.protocol import Link, Message, Save, WorkerLost
from agentrl_cli.cluster.service import Service
from agentrl_cli.config import Config
from agentrl_cli.config.cluster import ClusterConfig
from agentrl_cli.errors import ConfigError, EnvironmentProblem, MissingDependency

if TYPE_CHECKING:
    from torch import nn

EXCLUDED = ["runs", ".git", ".venv", "venv", "__pycache__", "node_modules"]
"""What of a project no worker needs."""
REACHABLE = 5.0
"""Seconds in which a cluster's address must accept a connection."""


class RolloutActor:
    """A Service inside an actor, in the actor's event loop."""

    def __init__(self) -> None:
        self._out: list[Message] = []
        self._wake = asyncio.Event()
        self._service = Service(self._emit)
        self._serving: asyncio.Future[None] | None = None

    def _emit(self, message: Message) -> None:
        self._out.append(message)
        self._wake.set()

    async def start(self) -> None:
        """Begin to serve."""
        self._serving = asyncio.ensure_future(self._service.serve())

    async def take(self, messages: list[Message], *weights: bytes) -> None:
        """Messages for the service; `weights` are those of the `load` among them."""
        for message in messages:
            if message[0] == "load" and weights:
                message = ("load", message[1], weights[0])
            elif message[0] == "open":  # the project as it was sent to this node
                message = ("open", replace(message[1], base=Path.cwd()))
            self._service.take(message)

    async def poll(self) -> list[Message]:
        """The next messages of the service, at least one."""
        await self._wake.wait()
        self._wake.clear()
        found, self._out = self._out, []
        return found


class ActorLink:
    """An actor, made when the link is opened."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._actor: Any = None
        self._pending: list[Message] = []
        self._sending = asyncio.Lock()

    async def open(self) -> None:
        with losses():
            self._actor = self._make()
            await self._actor.start.remote()

    async def send(self, message: Message) -> None:
        self._pending.append(message)
        async with self._sending:  # in order, and together with what others want to send meanwhile
            batch, self._pending = self._pending, []
            plain = [("load", one[1], None) if one[0] == "load" else one for one in batch]
            weights = [one[2] for one in batch if one[0] == "load" and one[2] is not None]
            with losses():
                if batch:
                    await self._actor.take.remote(plain, *weights[-1:])

    async def receive(self) -> list[Message]:
        with losses():
            while not (found := list(await self._actor.poll.remote())):
                pass
            return found

    async def kill(self) -> str:
        import ray

        if self._actor is not None:
            with contextlib.suppress(Exception):  # it may be dead, and so may the cluster
                ray.kill(self._actor, no_restart=True)
        return ""


@contextlib.contextmanager
def losses() -> Iterator[None]:
    """Errors of Ray as WorkerLost."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, ConnectionError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise WorkerLost(f"{type(error).__name__}: {' '.join(lines)[:300]}") from error


@contextlib.contextmanager
def open_links(config: Config, base: Path) -> Iterator[tuple[list[Callable[[], Link]], Save]]:
    """Connect to the cluster. Yields what opens a link to each worker, and what makes weights for all of them.

    Raises MissingDependency, ConfigError, EnvironmentProblem.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        text = "cluster.kind is ray, and Ray is not installed."
        raise MissingDependency(text, hint="pip install 'agentrl-cli[ray]'") from error
    connect(config.cluster, base)
    try:
        require_room(config.cluster, ray.cluster_resources())
        actor = ray.remote(RolloutActor).options(**options(config.cluster))
        links: list[Callable[[], Link]] = [partial(ActorLink, actor.remote)] * config.cluster.workers
        yield links, to_object_store
    finally:
        ray.shutdown()


def connect(cluster: ClusterConfig, base: Path) -> None:
    """Join the Ray cluster of the settings. Raises ConfigError, EnvironmentProblem."""
    import ray

    address = None if cluster.address == "local" else cluster.address
    hint = "Start one with `ray start --head`, or set cluster.address; `local` makes one of this machine."
    if address is not None and address != "auto":
        require_answer(address.removeprefix("ray://"), hint)
    try:
        ray.init(
            address=address,
            namespace="agentrl",
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"working_dir": str(base), "excludes": EXCLUDED},
        )
    except Exception as error:  # Ray raises it bare for a node that does not start in time
        ray.shutdown()
        text = " ".join(str(error).split())[:400]
        raise EnvironmentProblem(f"The Ray cluster at {cluster.address} cannot be used: {text}", hint=hint) from error


def require_answer(address: str, hint: str) -> None:
    """Raise EnvironmentProblem if no process answers at host:port, ConfigError if that is not one."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address is {address!r}, not host:port, auto or local.")
    try:
        socket.create_connection((host, int(port)), REACHABLE).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentProblem(f"No Ray cluster answers at {address}: {reason}.", hint=hint) from error


def options(cluster: ClusterConfig) -> dict[str, Any]:
    """What each actor reserves."""
    wanted = dict(cluster.resources) or {"CPU": 1.0}
    return {"num_cpus": wanted.pop("CPU", 0.0), "num_gpus": cluster.worker_gpus, "resources": wanted, "max_restarts": 0}


def require_room(cluster: ClusterConfig, total: dict[str, float]) -> None:
    """Raise ConfigError if the whole cluster has less than the workers reserve together."""
    wanted = {**(cluster.resources or {"CPU": 1.0}), "GPU": cluster.worker_gpus}
    for name, each in wanted.items():
        if each * cluster.workers > total.get(name, 0.0):
            raise ConfigError(
                f"{cluster.workers} workers with {each:g} {name} each need {each * cluster.workers:g}; the Ray cluster"
                f" has {total.get(name, 0.0):g}.",
                hint="Lower cluster.workers, cluster.worker_gpus or cluster.resources, or add nodes.",
            )


def to_object_store(model: nn.Module, version: str) -> Any:
    """The trained weights in Ray's object store; actors get the reference."""
    import ray

    from agentrl_cli.models.trained import trained_weights

    return ray.put(trained_weights(model))
