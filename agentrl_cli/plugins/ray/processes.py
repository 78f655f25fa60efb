"""Workers as processes of this machine: a fresh interpreter each, and a socket pair that carries pickled messages.

Nothing is forked: the process of the run has torch, threads and perhaps a GPU. A worker whose socket closes ends, so
none outlives the run. On the socket go eight bytes of length and a pickle: first the `Setup`, then lists of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, writing
from agentrl_cli.plugins.ray.pool import Save
from agentrl_cli.plugins.ray.remote import Link, WorkerLost
from agentrl_cli.plugins.ray.service import Call, Message, Service, Setup
from agentrl_cli.plugins.ray.settings import ClusterConfig
from agentrl_cli.sandbox.owner import temporary_folder

if TYPE_CHECKING:
    from torch import nn

HEADER = 8
TAIL = 300
"""Characters of a dead worker's last output that are shown."""


def pack(value: object) -> bytes:
    """Return a value as it goes over the socket."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(HEADER, "little") + data


async def unpack(reader: asyncio.StreamReader) -> Any:
    """Return the next value. Raises IncompleteReadError or OSError at the end of the connection."""
    size = int.from_bytes(await reader.readexactly(HEADER), "little")
    return pickle.loads(await reader.readexactly(size))


class ProcessLink:
    """A process and the socket to it; its output goes to `log`."""

    def __init__(self, number: int, log: Path, gpus: Sequence[str] = ()) -> None:
        """`gpus`: the names of the GPUs that it sees."""
        self.number, self.log, self.gpus = number, log, gpus
        self.process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("wb") as log:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)},
                    start_new_session=True,  # a Ctrl-C in the terminal is for the run, which ends its workers
                )
            except OSError as error:
                text = f"worker {self.number} could not be started: {error}"
                raise WorkerLost(text) from error
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        await self._write(setup)

    async def send(self, call: Call) -> None:
        await self._write([call])

    async def receive(self) -> Sequence[Message]:
        assert self._reader is not None
        try:
            messages: list[Message] = await unpack(self._reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerLost(self._end()) from error
        return messages

    async def kill(self) -> str:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self.process is not None:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][-TAIL:] if lines else ""

    async def _write(self, value: object) -> None:
        assert self._writer is not None
        try:
            self._writer.write(pack(value))
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise WorkerLost(self._end()) from error

    def _end(self) -> str:
        """Return how the process ended."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(timeout=1)
            return f"its process {self.process.pid} ended with status {status}"
        return f"its process {self.process.pid} closed the connection"


def write_weights(folder: Path, model: nn.Module, version: str) -> Path:
    """Write trained weights where processes of this machine read them; the last two files stay."""
    from agentrl_cli.models.adapter import trained_weights

    path = folder / f"{version.replace('/', '_')}.safetensors"
    beside = path.with_suffix(".part")
    with writing(str(path)):
        beside.write_bytes(trained_weights(model))
        beside.rename(path)
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    for old in files[:-2]:
        old.unlink()
    return path


def name_gpus(count: int) -> list[str]:
    """Return the names of the first GPUs that this process sees, which CUDA_VISIBLE_DEVICES may choose."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(n) for n in range(count)]


@contextlib.contextmanager
def open_links(config: Config, base: Path) -> Iterator[tuple[list[Callable[[], Link]], Save]]:
    """Yield a function for each worker that makes its link, and one that writes weights for all of them.

    Raises ConfigError if there are too few GPUs.
    """
    cluster = config.section(ClusterConfig)
    each = int(cluster.worker_gpus)
    if each != cluster.worker_gpus:
        text = f"cluster.worker_gpus is {cluster.worker_gpus:g}: a process takes whole GPUs."
        raise ConfigError(text, hint="cluster.kind: ray takes shares.")
    if each:
        import torch

        wanted, found = each * cluster.workers, torch.cuda.device_count()
        if wanted > found:
            raise ConfigError(
                f"{cluster.workers} workers with {each} GPUs each need {wanted}; this machine has {found}.",
                hint="Lower cluster.workers or cluster.worker_gpus.",
            )
    gpus = name_gpus(each * cluster.workers)
    with temporary_folder("workers") as folder:
        links: list[Callable[[], Link]] = [
            partial(ProcessLink, n, folder / f"worker-{n}.log", gpus[n * each : (n + 1) * each])
            for n in range(cluster.workers)
        ]
        yield links, partial(write_weights, folder)


async def serve(end: socket.socket) -> None:
    """Run a worker at its end of the socket, until that closes or the worker ends."""
    reader, writer = await asyncio.open_connection(sock=end)
    service = Service(await unpack(reader))

    async def read() -> None:
        while True:
            for call in await unpack(reader):
                service.take(call)

    async def write() -> None:
        while messages := await service.messages():
            writer.write(pack(messages))
            await writer.drain()

    serving, *moving = (asyncio.ensure_future(one) for one in (service.serve(), read(), write()))
    try:
        done, _ = await asyncio.wait(moving, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the run has ended
                task.result()
    finally:
        for task in (serving, *moving):
            task.cancel()
        await asyncio.gather(serving, *moving, return_exceptions=True)
        writer.close()


def main() -> None:
    """Run `python -m agentrl_cli.plugins.ray.processes FD`."""
    with socket.socket(fileno=int(sys.argv[1])) as end:
        asyncio.run(serve(end))


if __name__ == "__main__":
    main()
