"""Workers in this process, for tests and measurements: a service behind a link, or answers from a function."""

import asyncio
import contextlib
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_cli import Config, Episode
from agentrl_cli.plugins.ray.processes import write_weights
from agentrl_cli.plugins.ray.remote import WorkerLost
from agentrl_cli.plugins.ray.service import Call, Hello, Message, Relay, Service, Setup
from agentrl_cli.plugins.ray.settings import ClusterConfig
from agentrl_cli.rollout import Job
from agentrl_cli.rollout.attempt import new_episode

# Records an episode and returns it as it ended; None: the worker dies.
Play = Callable[[Job, Relay], Episode | None]


class ScriptedLink:
    """A worker that answers each attempt at once, with what `play` records."""

    def __init__(
        self, play: Play, delay: float = 0.0, pack: Callable[[list[Message]], list[Message]] = list
    ) -> None:
        """`delay`: seconds an episode takes; `pack`: what the messages go through on their way."""
        self.play, self.delay, self.pack = play, delay, pack
        self._out: list[Message] = []
        self._wake = asyncio.Event()
        self._dead = False

    async def open(self, setup: Setup) -> None:
        return None

    async def send(self, call: Call) -> None:
        number, method, arguments = call
        if method == "attempt":
            asyncio.get_running_loop().call_later(self.delay, self._play, number, arguments[0])
        elif method == "close":
            self._die()
        elif method in ("hello", "load", "hold"):
            self._emit((number, "done", Hello("node", 1, {}) if method == "hello" else None))

    async def receive(self) -> Sequence[Message]:
        await self._wake.wait()
        found, self._out = self._out, []
        if self._dead and not found:  # what it wrote before it died arrives
            raise WorkerLost("it died")
        if not self._dead:
            self._wake.clear()
        return self.pack(found)

    async def kill(self) -> str:
        return ""

    def _emit(self, message: Message) -> None:
        self._out.append(message)
        self._wake.set()

    def _play(self, number: int, job: Job) -> None:
        if self.play(job, Relay(number, self._emit)) is None:
            self._die()
        else:
            self._emit((number, "done", ("", 0.0, "")))

    def _die(self) -> None:
        self._dead = True
        self._wake.set()


def copy_of(episode: Episode) -> Play:
    """Return a function that records an episode like this one for each job."""

    def play(job: Job, relay: Relay) -> Episode:
        begun = new_episode(job, "v0")
        relay.start(begun, "train", "")
        for turn in episode.turns:
            relay.turn(begun.id, turn, episode.tokens.slice(turn.start, turn.end))
        ended = begun.with_(
            turns=episode.turns,
            tokens=episode.tokens,
            reward_parts=episode.reward_parts,
            outcome=episode.outcome,
            ended=begun.started + 1.0,
        )
        relay.finish(ended)
        return ended

    return play


class ServiceLink:
    """A worker in this process; calls and messages are pickled on their way."""

    async def open(self, setup: Setup) -> None:
        self._service = Service(replace(setup, threads=0))
        self._serving = asyncio.ensure_future(self._service.serve())

    async def send(self, call: Call) -> None:
        self._service.take(pickle.loads(pickle.dumps(call)))

    async def receive(self) -> Sequence[Message]:
        found: list[Message] = pickle.loads(pickle.dumps(await self._service.messages()))
        if not found:
            raise WorkerLost("it ended")
        return found

    async def kill(self) -> str:
        self._serving.cancel()
        await asyncio.wait([self._serving])
        return ""


# A kind of worker, as a stranger's package registers one under `agentrl.workers`.
SERVICES = "tests.plugins.ray.links:open_services"


@contextlib.contextmanager
def open_services(config: Config, base: Path) -> Iterator[tuple[list[Any], Any]]:
    """Yield the links of workers in this process, and a function that writes weights for them."""
    with tempfile.TemporaryDirectory() as folder:
        links = [ServiceLink] * config.section(ClusterConfig).workers
        yield links, partial(write_weights, Path(folder))
