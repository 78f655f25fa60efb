"""Workers as Ray actors, on any number of nodes. Ray is an extra, imported only here.

The project folder goes to every node as the runtime environment's working directory, without `runs/`; files outside
it (a model, other packs) must be where every node sees it. Weights go into the object store once for each version.
One placement group reserves room for all workers before any starts. A lost actor is not restarted by Ray but made again
by the pool; if its node is lost, Ray moves its bundle to whatever node has room: also to one that came back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, EnvironmentProblem, needs_extra
from agentrl_cli.plugins.ray.pool import Save
from agentrl_cli.plugins.ray.remote import Link, WorkerLost
from agentrl_cli.plugins.ray.service import Call, Message, Service, Setup
from agentrl_cli.plugins.ray.settings import ClusterConfig

if TYPE_CHECKING:
    from torch import nn

EXCLUDED = ["runs", ".git", ".venv", "venv", "__pycache__", "node_modules"]
"""Parts of a project that no worker needs."""
REACHABLE = 10.0
"""Seconds in which a cluster's address must answer."""
RESERVED = 30.0
"""Seconds in which other runs must leave room for the workers."""
SHOWN = 8
"""Nodes that a message names."""
HINTS = {
    "Version mismatch": "Install the same versions on every node.",
    "exceeds the maximum size": "Move large files out of the project, or list them in its .rayignore.",
}
"""Part of an error of Ray to what a user can do."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""How a gRPC connection begins: the preface of HTTP/2, and empty SETTINGS. https://www.rfc-editor.org/rfc/rfc9113"""


class RolloutActor:
    """A Service inside an actor, in the actor's event loop."""

    async def start(self, setup: Setup) -> None:
        """Begin to serve, with the project as it was sent to this node."""
        self._service = Service(replace(setup, base=Path.cwd()))
        self._serving = asyncio.ensure_future(self._service.serve())

    async def take(self, calls: list[Call]) -> None:
        """Take calls for the service, with weights instead of references to them."""
        import ray

        for number, method, arguments in calls:
            fetched = [await one if isinstance(one, ray.ObjectRef) else one for one in arguments]
            self._service.take((number, method, tuple(fetched)))

    async def poll(self) -> list[Message]:
        """Return the next messages of the service; empty once it has ended."""
        return await self._service.messages()


class ActorLink:
    """An actor, made when the link is opened."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._actor: Any = None
        self._waiting: list[Call] = []
        self._sending = asyncio.Lock()

    async def open(self, setup: Setup) -> None:
        with raise_lost():
            self._actor = self._make()
            await self._actor.start.remote(setup)

    async def send(self, call: Call) -> None:
        self._waiting.append(call)
        async with self._sending:  # in order, and together with what others want to send meanwhile
            calls, self._waiting = self._waiting, []
            if calls:
                with raise_lost():
                    await self._actor.take.remote(calls)

    async def receive(self) -> Sequence[Message]:
        with raise_lost():
            messages: list[Message] = await self._actor.poll.remote()
        if not messages:
            raise WorkerLost("its service ended")
        return messages

    async def kill(self) -> str:
        import ray

        if self._actor is not None:
            with contextlib.suppress(Exception):  # it may be dead, and so may the cluster
                ray.kill(self._actor, no_restart=True)
        return ""


@contextlib.contextmanager
def raise_lost() -> Iterator[None]:
    """Raise errors of Ray as WorkerLost, with their cause instead of the fields of the actor."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except (RayError, ConnectionError) as error:
        found = error.cause if isinstance(error, RayTaskError) else error
        lines = [
            line.strip()
            for line in str(found).splitlines()
            if line.strip() and not line.startswith("\t")
        ]
        text = " ".join(lines).rpartition("Worker exit detail: ")[2]
        raise WorkerLost(f"{type(found).__name__}: {text[:300]}") from error


@contextlib.contextmanager
def open_links(config: Config, base: Path) -> Iterator[tuple[list[Callable[[], Link]], Save]]:
    """Connect to the cluster; yield a function for each worker that makes its link, and one that stores weights.

    Raises MissingDependency, ConfigError, EnvironmentProblem.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with needs_extra("cluster.kind is ray, and Ray is not installed.", "ray"):
        import ray
    require_inside(config)
    cluster = config.section(ClusterConfig)
    connect(cluster, base)
    try:
        each = resources_of(cluster)
        require_room(cluster.workers, each, [n["Resources"] for n in ray.nodes() if n["Alive"]])
        cpus, gpus = each.pop("CPU", 0.0), each.pop("GPU", 0.0)
        actor = ray.remote(num_cpus=cpus, num_gpus=gpus, resources=each)(RolloutActor)
        made = [
            actor.options(scheduling_strategy=place).remote for place in reserve_places(cluster)
        ]
        yield [partial(ActorLink, make) for make in made], to_object_store
    finally:
        ray.shutdown()


def require_inside(config: Config) -> None:
    """Raise ConfigError for paths outside the project folder, which is all that workers get."""
    named = {"task.packs": config.task.packs, "model.name": [config.model.name]}
    for key, names in named.items():
        for name in names:
            if os.path.normpath(name).split(os.sep)[0] == os.pardir:
                raise ConfigError(
                    f"{key} names {name}, outside the project folder, which is all that Ray brings to workers.",
                    hint="Move it into the project, or give an absolute path at which every node has it.",
                )


def name_interpreter(path: str) -> dict[str, str]:
    """Return the part of a runtime environment that names an interpreter, if a shell would split its path.

    Ray puts the path into a shell's command as it stands, so that no worker would ever start. Without a blank each
    node uses its own interpreter.
    """
    quoted = shlex.quote(path)
    return {} if quoted == path else {"py_executable": quoted}


def connect(cluster: ClusterConfig, base: Path) -> None:
    """Join the Ray cluster of the settings. Raises ConfigError, EnvironmentProblem."""
    import ray
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )

    address = cluster.address
    noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray/ray_current_cluster")
    if address == "auto":  # the cluster that `ray start` noted on this machine
        known = os.environ.get("RAY_ADDRESS") or (
            noted.read_text().strip() if noted.is_file() else ""
        )
    else:
        known = address
    hint = "Start one with `ray start --head`, or set cluster.address; `local` makes one of this machine."
    if known and address != "local":
        require_answer(known.removeprefix("ray://"), hint)
        logging.getLogger("ray").setLevel(logging.ERROR)
        # Ray looks for its token file by itself only with `auto`.
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(
            address=address,
            namespace="agentrl",
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={
                "working_dir": str(base),
                "excludes": EXCLUDED,
                **name_interpreter(sys.executable),
            },
        )
    except Exception as error:  # Ray raises it bare for a node that does not start in time
        ray.shutdown()
        text = " ".join(str(error).split())[:400]
        hint = next((better for part, better in HINTS.items() if part in text), hint)
        raise EnvironmentProblem(
            f"The Ray cluster at {address} cannot be used: {text}", hint=hint
        ) from error


def require_answer(address: str, hint: str, within: float = REACHABLE) -> None:
    """Raise EnvironmentProblem if no gRPC server answers at host:port, ConfigError if that is not one.

    Ray itself waits for minutes at a port that accepts connections and never answers.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address is {address!r}, not host:port, auto or local.")
    try:
        with socket.create_connection((host, int(port)), within) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(PREFACE)
                if (
                    connection.recv(4)[3:] != b"\x04"
                ):  # the type of its first frame, which must be SETTINGS
                    raise ConnectionError("what answers there is not Ray")
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentProblem(
            f"No Ray cluster answers at {address}: {reason}.", hint=hint
        ) from error


def resources_of(cluster: ClusterConfig) -> dict[str, float]:
    """Return the resources that each actor reserves."""
    wanted = {**(cluster.resources or {"CPU": 1.0}), "GPU": cluster.worker_gpus}
    return {name: each for name, each in wanted.items() if each}


def require_room(
    workers: int, each: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> None:
    """Raise ConfigError if the nodes together have no room for the workers, even with nothing else on them."""
    shares = [[node.get(name, 0.0) / size for name, size in each.items()] for node in nodes]
    if sum(int(min(share, default=workers) + 1e-6) for share in shares) < workers:
        have = [amounts({name: node.get(name, 0.0) for name in each}, ", ") for node in nodes]
        raise ConfigError(
            f"{workers} workers with {amounts(each)} each do not fit on the Ray cluster; its nodes have"
            f" {'; '.join(have[:SHOWN])}{'; …' * (len(have) > SHOWN)}.",
            hint="Lower cluster.workers, cluster.worker_gpus or cluster.resources, or add nodes.",
        )


def amounts(each: Mapping[str, float], between: str = " and ") -> str:
    """Return amounts of resources for people."""
    return between.join(f"{size:g} {name}" for name, size in each.items())


def reserve_places(cluster: ClusterConfig) -> list[Any]:
    """Reserve room for each actor and return where it goes. Raises EnvironmentProblem if other runs leave none."""
    import ray
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    each = resources_of(cluster)
    if not each:
        return ["SPREAD"] * cluster.workers
    group = placement_group([each] * cluster.workers, strategy="SPREAD")
    if not group.wait(RESERVED):
        free = ray.available_resources()
        raise EnvironmentProblem(
            f"{cluster.workers} workers with {amounts(each)} each found no room on the Ray cluster"
            f" within {RESERVED:g} s: other runs left {amounts({name: free.get(name, 0.0) for name in each})}.",
            hint="End them, lower cluster.workers, or add nodes; `ray status` shows what is in use.",
        )
    return [PlacementGroupSchedulingStrategy(group, number) for number in range(cluster.workers)]


def to_object_store(model: nn.Module, version: str) -> Any:
    """Return the trained weights in Ray's object store; actors get the reference."""
    import ray

    from agentrl_cli.models.adapter import trained_weights

    return ray.put(trained_weights(model))
