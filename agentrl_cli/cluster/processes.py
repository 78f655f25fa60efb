"""Workers as processes of this machine: a fresh interpreter each, and a socket pair that carries pickled messages.

Nothing is forked: the process of the run has torch, threads and perhaps a GPU. A worker whose socket closes ends, so
none outlives the run. A message is eight bytes of length and a list of messages.
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
from typing import IO, TYPE_CHECKING

from agentrl_cli.cluster.protocol import Link, Message, Save, WorkerLost
from agentrl_cli.cluster.service import Service
from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, writing
from agentrl_cli.sandbox.owner import temporary_folder

if TYPE_CHECKING:
    from torch import nn

HEADER = 8
TAIL = 300
"""Characters of a dead worker's last output that are shown."""


def packed(messages: Sequence[Message]) -> bytes:
    """Messages as they go over the socket."""
    data = pickle.dumps(list(messages), pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(HEADER, "little") + data


async def unpacked(reader: asyncio.StreamReader) -> list[Message]:
    """Return the next messages. Raises IncompleteReadError or OSError at the end of the connection."""
    size = int.from_bytes(await reader.readexactly(HEADER), "little")
    messages: list[Message] = pickle.loads(await reader.readexactly(size))
    return messages


class ProcessLink:
    """A process and the socket to it; its output goes to `log`."""

    def __init__(self, number: int, log: Path, gpus: Sequence[int] = ()) -> None:
        """`gpus`: the GPUs that it sees."""
        self.number = number
        self.log = log
        self.gpus = gpus
        self.process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "agentrl_cli.cluster.processes", str(theirs.fileno())]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))}
        with theirs, self.log.open("wb") as log:
            self.process = self._start(command, theirs, log, environment)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)

    def _start(
        self, command: list[str], end: socket.socket, log: IO[bytes], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                pass_fds=(end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal is for the run, which ends its workers
            )
        except OSError as error:
            raise WorkerLost(f"worker {self.number} could not be started: {error}") from error

    async def send(self, message: Message) -> None:
        assert self._writer is not None
        try:
            self._writer.write(packed([message]))
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise WorkerLost(self._ended()) from error

    async def receive(self) -> list[Message]:
        assert self._reader is not None
        try:
            return await unpacked(self._reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerLost(self._ended()) from error

    async def kill(self) -> str:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self.process is not None:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        return last_line(self.log)

    def _ended(self) -> str:
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(timeout=1)
            return f"its process {self.process.pid} ended with status {status}"
        return f"its process {self.process.pid} closed the connection"


class WeightFiles:
    """Writes trained weights where processes of this machine read them; the last two stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[Path] = []

    def __call__(self, model: nn.Module, version: str) -> Path:
        from agentrl_cli.models.trained import trained_weights

        path = self.folder / f"{version.replace('/', '_')}.safetensors"
        beside = path.with_suffix(".part")
        with writing(str(path)):
            beside.write_bytes(trained_weights(model))
            beside.rename(path)
        self._files = [*(old for old in self._files if old != path), path]
        for old in self._files[:-2]:
            old.unlink(missing_ok=True)
        del self._files[:-2]
        return path


@contextlib.contextmanager
def open_links(config: Config, base: Path) -> Iterator[tuple[list[Callable[[], Link]], Save]]:
    """What starts each worker, and what makes weights for all of them. Raises ConfigError if there are too few GPUs."""
    cluster = config.cluster
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
    shares = [range(number * each, (number + 1) * each) for number in range(cluster.workers)]
    with temporary_folder("workers") as folder:
        logs = [folder / f"worker-{number}.log" for number in range(cluster.workers)]
        given = zip(range(cluster.workers), logs, shares, strict=True)
        yield [partial(ProcessLink, *one) for one in given], WeightFiles(folder)


def last_line(log: Path) -> str:
    """Return the last line of a worker's output; empty if it wrote nothing."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][-TAIL:] if lines else ""


async def serve(end: socket.socket) -> None:
    """A worker at its end of the socket, until that closes."""
    reader, writer = await asyncio.open_connection(sock=end)
    waiting: list[Message] = []
    wake = asyncio.Event()

    def emit(message: Message) -> None:
        waiting.append(message)
        wake.set()

    async def write() -> None:
        while True:
            await wake.wait()
            wake.clear()
            batch, waiting[:] = list(waiting), []
            if batch:
                writer.write(packed(batch))
                await writer.drain()

    async def read() -> None:
        while True:
            for message in await unpacked(reader):
                service.take(message)

    service = Service(emit)
    tasks = [asyncio.ensure_future(work) for work in (service.serve(), read(), write())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the run has ended
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()


def main() -> None:
    """`python -m agentrl_cli.cluster.processes FD`"""
    with socket.socket(fileno=int(sys.argv[1])) as end:
        asyncio.run(serve(end))


if __name__ == "__main__":
    main()
