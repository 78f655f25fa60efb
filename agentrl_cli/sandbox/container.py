"""Level `docker`: a warm container for every worker, whose fork server is root with nearly no capabilities.

One stream, the container's stdin and stdout, carries the frames of all boxes in frames of its own; the guest's
`container.py` is the other end. No program of a model is ever started by `docker run` or `docker exec`. When this
process dies, the stream ends and the container removes itself; `sweep` removes containers that a dead engine kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import struct
import time
from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from typing import Any, Self

from agentrl_cli.config.models import LimitsConfig
from agentrl_cli.errors import ConfigError, SandboxUnavailable
from agentrl_cli.sandbox import image, owner
from agentrl_cli.sandbox.channel import START, BoxLost, Channel, guest_module
from agentrl_cli.sandbox.launch import INSIDE, PACKAGES, Launch, environment, guest_command
from agentrl_cli.sandbox.runner_process import Runner, bound_runner_memory

SLOTS = 64
"""Boxes at once in one container."""
LABEL = "agentrl.sandbox"
_STREAM = struct.Struct("!BxxxI")
"""What the engine puts before a piece of output: 1 stdout, 2 stderr; bytes."""
_MASKED = (
    *"acpi asound kcore keys latency_stats sched_debug scsi timer_list timer_stats".split(),
    *"buddyinfo diskstats interrupts loadavg locks meminfo pagetypeinfo pressure schedstat".split(),
    *"slabinfo softirqs stat swaps sys/fs sys/kernel/pty uptime vmstat zoneinfo".split(),
)
"""Entries of /proc that the engine hides: its own list, and counts of the whole machine, which show
what other boxes do."""
_UID_RANGES = range(10_000, 60_000, 2_000)


def connect() -> Any:
    """Return a docker.APIClient of the engine named by the environment. Raises SandboxUnavailable."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError:
        raise SandboxUnavailable(
            "The docker package is not installed.", hint="pip install docker"
        ) from None
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    try:
        if host.startswith("unix://"):  # else the docker package leaves its socket open
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(host.removeprefix("unix://"))
        return docker.from_env(version="auto", timeout=30).api
    except (DockerException, OSError) as error:
        raise SandboxUnavailable(
            f"No Docker engine answers: {_short(error)}.",
            hint="Install and start one (Debian: `apt-get install docker.io && service docker start`), and make sure "
            "that you may use it (`docker info`).",
        ) from None


def own_labels() -> dict[str, str]:
    """Return the labels by which `sweep` finds a container once this process has ended."""
    return {LABEL: _machine(), "agentrl.process": owner.name()}


def sweep(api: Any) -> int:
    """Removes containers whose process on this machine has ended; returns how many."""
    removed = 0
    for container in api.containers(all=True, filters={"label": f"{LABEL}={_machine()}"}):
        if owner.has_ended(container["Labels"].get("agentrl.process", "")):
            removed += _remove(api, container["Id"])
    return removed


def _remove(api: Any, container: str) -> bool:
    """Removes a container and waits until the engine has forgotten it; returns whether this call removed it."""
    from docker.errors import APIError, NotFound

    try:
        api.remove_container(container, force=True)
        removed = True
    except APIError as error:
        if error.status_code not in (404, 409):
            raise
        removed = False  # already being removed, by itself or by another process
    end = time.monotonic() + 10.0  # an engine on a busy machine is slow
    while time.monotonic() < end:
        try:
            api.inspect_container(container)
        except NotFound:
            break
        time.sleep(0.02)
    return removed


@cache
def _machine() -> str:
    """Return an id of this machine since its boot, among those that use the same engine."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else platform.node()


class BoxTransport(asyncio.Transport):
    """The transport of one box's channel: its share of the container's stream."""

    def __init__(self, container: Container, number: int) -> None:
        super().__init__()
        self._container, self._number = container, number

    def write(self, data: Any) -> None:
        self._container.send({"op": "data", "id": self._number}, bytes(data))

    def abort(self) -> None:
        self._container.send({"op": "close", "id": self._number})


class Container(Runner, asyncio.Protocol):
    """One running container and the boxes in it."""

    def __init__(self, api: Any, launch: Launch, limits: LimitsConfig) -> None:
        super().__init__(launch, limits)
        self.api = api
        self.id = ""
        self.stderr = ""
        self._framing = guest_module("protocol/framing")
        self._frames = self._framing.Reader(self._framing.MAX_WRAPPED)
        self._stream = bytearray()
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, launch: Launch, number: int, limits: LimitsConfig) -> Self:
        from docker.errors import DockerException

        api = await asyncio.to_thread(connect)
        container = cls(api, launch, limits)
        try:
            sock = await _whole(asyncio.to_thread(container._create, number))
            await asyncio.get_running_loop().create_connection(lambda: container, sock=sock)
            await asyncio.to_thread(api.start, container.id)
            await asyncio.wait_for(asyncio.shield(container._ready), START)
        except (DockerException, OSError, BoxLost) as error:
            await container.close()
            raise container.unavailable(_short(error) or "it did not come up") from None
        except BaseException:
            await container.close()
            raise
        return container

    def _create(self, number: int) -> socket.socket:
        """Makes the container and returns the socket of its stream. Runs in a thread."""
        name = image.tag(self.launch.imports)
        if not image.exists(self.api, name):
            raise SandboxUnavailable(
                f"The engine has no image {name}.",
                hint=f"`{_build_command(self.launch)}` makes it (seconds, no registry).",
            )
        sweep(self.api)
        first = _UID_RANGES[(os.getpid() * 7 + number) % len(_UID_RANGES)]
        options = {"level": "uid", "uid": str(first), "folder": "/box", "slots": str(SLOTS)}
        options |= {"packages": PACKAGES} if self.launch.imports else {}
        program = f"{INSIDE}/container.py"
        command = guest_command("/usr/local/bin/python3", program, self.launch, **options)
        made = self.api.create_container(
            name, command, environment=environment("/usr/local"), working_dir="/", stdin_open=True,
            hostname="sandbox", network_disabled=True, host_config=self._host_config(),
            labels=own_labels(),
        )  # fmt: skip
        self.id = made["Id"]
        raw = self.api.attach_socket(self.id, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        sock = socket.socket(fileno=os.dup(raw.fileno()))
        # The HTTP library would keep the connection open.
        raw._response.close()
        raw.close()
        sock.setblocking(False)
        return sock

    def _host_config(self) -> Any:
        """Return the container's isolation and limits, besides the rights that each box gives up."""
        memory = _memory(self.limits)
        groups = self._framing.FIRST_GROUP
        size = f"nosuid,nodev,size={self.limits.disk_mb}m,nr_inodes={self.limits.inodes + 4},mode=1770,uid=0"
        made = self.api.create_host_config(
            network_mode="none",
            ipc_mode="none",
            read_only=True,
            cap_drop=["ALL"],
            cap_add=["SETUID", "SETGID", "KILL"],
            security_opt=["no-new-privileges"],
            tmpfs={f"/box/{slot}": f"{size},gid={groups + slot}" for slot in range(SLOTS)},
            pids_limit=SLOTS * (self.limits.processes + 8) + 64,
            mem_limit=memory,
            memswap_limit=memory,
            auto_remove=True,
            log_config={"Type": "none"},
        )
        return {**made, "MaskedPaths": [*(f"/proc/{name}" for name in _MASKED), "/sys/firmware"]}

    # the stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._stream += data
        while len(self._stream) >= _STREAM.size:
            kind, size = _STREAM.unpack_from(self._stream)
            end = _STREAM.size + size
            if len(self._stream) < end:
                return  # the engine may cut a piece of output anywhere
            piece = bytes(self._stream[_STREAM.size : end])
            del self._stream[:end]
            if kind == 2:
                self.stderr = (self.stderr + piece.decode("utf-8", "replace"))[-4096:]
                continue
            try:
                for header, body, _ in self._frames.feed(piece):
                    self._frame(header, body)
            except self._framing.Broken as error:
                self._lose(BoxLost("protocol_error", str(error)))
                return

    def _frame(self, header: dict[str, Any], body: bytes) -> None:
        if "id" not in header:
            if not self._ready.done() and header.get("ready"):
                self._ready.set_result(None)
            self.pong()
        elif channel := self.boxes.get(header["id"]):
            if header["op"] == "data":
                channel.data_received(body)
            else:
                channel.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(BoxLost("sandbox_restarted", "the container ended"))

    def _lose(self, reason: BoxLost) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        if not self._ready.done():
            self._ready.set_exception(reason)
            self._ready.exception()  # possibly no one waits for it
        for channel in list(self.boxes.values()):
            channel.connection_lost(reason)

    def send(self, header: dict[str, Any], data: bytes = b"") -> None:
        """Sends one frame; has no effect once the container has ended."""
        if self.alive and self._transport is not None:
            self._transport.write(self._framing.pack(header, data))

    # for the pool and the sessions

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def full(self) -> bool:
        return len(self.boxes) >= SLOTS and not self.spares

    def unavailable(self, what: str) -> SandboxUnavailable:
        wrote = self.stderr.strip().splitlines()
        again = f"docker rmi -f {image.tag(self.launch.imports)} && {_build_command(self.launch)}"
        return SandboxUnavailable(
            f"Sandbox level docker does not work here: {wrote[-1] if wrote else what}.",
            hint=f"`docker info` shows whether the engine is well; `{again}` makes the image again.",
        )

    def fits(self, limits: LimitsConfig) -> bool:
        return super().fits(limits) and limits.memory_mb << 20 <= _memory(self.limits)

    async def connect(self, channel: Channel, limits: dict[str, Any]) -> None:
        if limits["disk_mb"] > self.limits.disk_mb or limits["inodes"] > self.limits.inodes:
            raise ConfigError(
                "A session asks for more disk than its container has.",
                hint="Set sandbox.limits.disk_mb and sandbox.limits.inodes to the largest values that a pack needs.",
            )
        if limits["memory_mb"] << 20 > _memory(self.limits):
            raise ConfigError(
                f"A session asks for {limits['memory_mb']} MiB of memory, and its container has "
                f"{_memory(self.limits) >> 20} MiB for all of them.",
                hint="Set sandbox.limits.memory_mb to the largest value that a pack needs, or give that pack less.",
            )
        if not self.alive:
            raise BoxLost("sandbox_restarted", "the container ended")
        less = limits["disk_mb"] < self.limits.disk_mb or limits["inodes"] < self.limits.inodes
        channel.connection_made(BoxTransport(self, channel.number))
        self.send({"op": "open", "id": channel.number, "limits": {**limits, "watch_disk": less}})

    def kill(self, channel: Channel) -> None:
        self.send({"op": "kill", "id": channel.number})

    def condemn(self) -> None:
        self._lose(BoxLost("sandbox_restarted", "the container stopped answering"))

    def ping(self) -> None:
        self.send({"op": "ping"})

    async def close(self) -> None:
        from docker.errors import DockerException

        self._drop_all()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        if self.id:
            with contextlib.suppress(DockerException):
                await asyncio.to_thread(_remove, self.api, self.id)
        self.api.close()


async def _whole(creating: Coroutine[Any, Any, socket.socket]) -> socket.socket:
    """Return a container's stream. If cancelled, waits for the thread, which makes the container nevertheless."""
    task = asyncio.ensure_future(creating)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if task.exception() is None:
            task.result().close()
        raise


def _build_command(launch: Launch) -> str:
    """Return the command that makes the image of a launch; it leaves one that is there as it is."""
    return "agentrl sandbox build-image" + "".join(f" --import {name}" for name in launch.imports)


def _memory(limits: LimitsConfig) -> int:
    """Return the bytes of a container: several sessions at their limit at once, but never most of the machine's."""
    return bound_runner_memory(limits.memory_mb << 20)


def _short(error: BaseException) -> str:
    return (
        str(getattr(error, "explanation", None) or error).splitlines()[0][:300].rstrip(".")
        if str(error)
        else ""
    )
