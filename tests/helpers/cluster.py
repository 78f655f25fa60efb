"""Workers in this process, for tests and measurements: a service behind a link, or answers from a function."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable

from agentrl_cli.cluster.protocol import Hello, Message, Order, Status, WorkerLost
from agentrl_cli.cluster.relay import Relay
from agentrl_cli.cluster.service import Service
from agentrl_cli.rollout.attempt import new_episode
from agentrl_cli.types import Episode

Play = Callable[[Order, Relay], Episode | None]
"""Records an episode and returns it as it ended; None: the worker dies."""


class ScriptedLink:
    """A worker that answers each order at once, with what `play` records."""

    def __init__(
        self, play: Play, delay: float = 0.0, pack: Callable[[list[Message]], list[Message]] = list
    ) -> None:
        """`delay`: seconds an episode takes; `pack`: what the messages go through on their way."""
        self.play = play
        self.delay = delay
        self.pack = pack
        self.status = Status()
        self._out: list[Message] = []
        self._wake = asyncio.Event()
        self._dead = False

    async def open(self) -> None:
        return None

    async def send(self, message: Message) -> None:
        if message[0] == "open":
            self._emit(("ready", Hello("node", 1, "3.11", {}, 0.0, {})))
        elif message[0] == "load":
            self.status.version = message[1]
            self._emit(("loaded", message[1], ""))
        elif message[0] == "hold":
            self._emit(("held",))
        elif message[0] == "run":
            asyncio.get_running_loop().call_later(self.delay, self._play, message[1])
        elif message[0] == "close":
            self._die()

    async def receive(self) -> list[Message]:
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

    def _play(self, order: Order) -> None:
        ended = self.play(order, Relay(order.number, self._emit))
        if ended is None:
            self._die()
        else:
            self._emit(("end", order.number, "", 0.0, ""))

    def _die(self) -> None:
        self._dead = True
        self._wake.set()


def copy_of(episode: Episode) -> Play:
    """Records an episode like this one for each order."""

    def play(order: Order, relay: Relay) -> Episode:
        begun = new_episode(order.job, order.version)
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
    """A worker in this process; messages are pickled on their way."""

    def __init__(self) -> None:
        self._out: asyncio.Queue[Message] = asyncio.Queue()
        self._service = Service(self._out.put_nowait)
        self._serving: asyncio.Future[None] | None = None

    async def open(self) -> None:
        self._serving = asyncio.ensure_future(self._service.serve())
        self._serving.add_done_callback(lambda _: self._out.put_nowait(("ended",)))

    async def send(self, message: Message) -> None:
        self._service.take(pickle.loads(pickle.dumps(message)))

    async def receive(self) -> list[Message]:
        found = await self._out.get()
        if found[0] == "ended":
            raise WorkerLost("it ended")
        return [found]

    async def kill(self) -> str:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        return ""
