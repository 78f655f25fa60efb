"""The loopback server that agents find their model at: one per event loop, started with its first episode.

Every episode has an address of its own, `http://127.0.0.1:PORT/e/KEY`, whose key cannot be guessed and lets in nothing
but calls of that episode. A key whose episode has ended stays known: its stragglers get 409.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from agentrl_cli.agents.emit import MODEL
from agentrl_cli.agents.gateway.app import Gateway, reward_of
from agentrl_cli.agents.gateway.http import PageGuard, answering, json_body, listening
from agentrl_cli.agents.gateway.request import RequestError, bad
from agentrl_cli.agents.gateway.sampling import episode_ended
from agentrl_cli.agents.gateway.session import Session, Trace
from agentrl_cli.agents.gateway.sessions import Sessions
from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import EnvError
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.types import Tokens, Turn

T = TypeVar("T")
HOST = "127.0.0.1"
NAMES = ("localhost",)
"""Values of a request's Host besides an address."""
MOST = 100_000
"""Sessions that are open at once; `rollout.concurrency` is the limit that counts."""


@dataclass(eq=False)
class Door:
    """One episode's place in the server."""

    session: Session
    root: str
    reward: float | None = None
    """The agent's reward, over HTTP or by `emit_reward`; the last one counts."""
    trace: asyncio.Future[Trace] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def emit_reward(self, value: float) -> None:
        """Set the reward, from any thread."""
        self.reward = value

    def snapshot(self) -> tuple[Sequence[Turn], Tokens]:
        """Return the turns so far and their tokens, from any thread."""
        tree = self.session.tree
        tokens = tree.tokens  # first: a turn that is added meanwhile lies beyond them
        return [turn for turn in tree.turns if turn.end <= len(tokens)], tokens


class _Models:
    """An episode has one model, whatever its agent calls it; a call outside of an episode is refused."""

    def policy(self, name: str) -> Policy:
        raise RequestError(
            f"Unknown model {name!r} outside of an episode.", status=404, code="model_not_found"
        )

    def cards(self) -> Sequence[Mapping[str, Any]]:
        return [{"id": MODEL}]


class EpisodeServer:
    """Serves the sessions of running episodes. `here` gives the one of the running event loop."""

    def __init__(self, chat: Chat) -> None:
        self._doors: dict[str, Door] = {}
        self._sessions = Sessions(on_end=self._on_end, most=MOST)
        # Without a token of its own a request that names no episode would be let in, if only to be refused.
        self.gateway = Gateway(
            self._sessions,
            _Models(),
            chat,
            token=secrets.token_urlsafe(24),
            routes=[("/e/{key}/events", self._event, "POST")],
        )
        self._app = PageGuard(self.gateway.app, NAMES, unasked=True)
        self._places: dict[str, tuple[Any, Any]] = {}
        self._opening = asyncio.Lock()

    @classmethod
    def here(cls, chat: Chat) -> EpisodeServer:
        """Return the server of the running event loop, made if there is none."""
        loop = asyncio.get_running_loop()
        if loop not in _SERVERS:
            for old in [one for one in _SERVERS if one.is_closed()]:
                del _SERVERS[old]
            _SERVERS[loop] = cls(chat)
        return _SERVERS[loop]

    @classmethod
    def running(cls) -> EpisodeServer:
        """Return the server of the running event loop, which an episode has made."""
        return _SERVERS[asyncio.get_running_loop()]

    async def open(self, session: Session) -> Door:
        """Serve a session."""
        address = await self.open_place(
            "The server of agents' models", lambda: listening(self._app, HOST, 0)
        )
        self._sessions.open(session)
        door = self._doors[session.key] = Door(session, f"{address}/e/{session.key}")
        return door

    async def close(self, door: Door) -> Trace:
        """End a session; its agent may have done so itself."""
        key = door.session.key
        with contextlib.suppress(RequestError):
            await self._sessions.end(key)
        trace = await door.trace
        self._doors.pop(key, None)
        return trace

    def _on_end(self, session: Session, trace: Trace, reward: float | None) -> None:
        door = self._doors[session.key]
        if reward is not None:
            door.reward = reward
        if not door.trace.done():
            door.trace.set_result(trace)

    async def _event(self, request: Request) -> Response:
        """Return a reward:

        `{"reward": 0.5}`, or, as an event, `{"event_type": "reward", "data": {"value": 0.5}}`.
        """
        body = await json_body(request)
        key = request.path_params["key"]
        session = self._sessions.find(key)
        if session.sealed or key not in self._doors:
            raise episode_ended(key)
        if "event_type" in body:
            data = body.get("data")
            if body["event_type"] != "reward" or not isinstance(data, Mapping):
                form = '{"event_type": "reward", "data": {"value": NUMBER}}'
                raise bad(f"Of events only {form} is taken.")
            body = {"reward": data.get("value")}
        elif "reward" not in body:
            raise bad('An event must be {"reward": NUMBER}.', "reward")
        reward = reward_of(body)
        if reward is not None:
            self._doors[key].reward = reward
        return JSONResponse({"reward": reward})

    # --- listening ---------------------------------------------------------------------------------------------------

    async def socket(self) -> str:
        """Return the unix socket that leads here, for agents in a jail. Made the first time."""
        return await self.open_place("The agents' socket", lambda: _on_socket(self._app))

    async def open_place(
        self, name: str, make: Callable[[], contextlib.AbstractAsyncContextManager[T]]
    ) -> T:
        """Return the value of a server that listens until the event loop ends, started the first time.

        Raises EnvError, which begins with `name`, if it cannot be started.
        """
        async with self._opening:
            if name not in self._places:
                opened: asyncio.Future[T] = asyncio.get_running_loop().create_future()
                task = asyncio.create_task(_hold(make, opened))
                try:
                    self._places[name] = task, await opened
                except Exception as error:
                    message = getattr(error, "message", error)
                    raise EnvError(f"{name}: {message}") from error
        return cast(T, self._places[name][1])


async def _hold(
    make: Callable[[], contextlib.AbstractAsyncContextManager[T]], opened: asyncio.Future[T]
) -> None:
    """Keep a server open until the event loop ends, which cancels its tasks before it closes its generators.

    A server that is left to those is closed by two at once, by the loop and by the generator around it.
    """
    try:
        async with make() as value:
            opened.set_result(value)
            await asyncio.Event().wait()
    except Exception as error:  # of any kind, or the episode that opens it would wait for ever
        if opened.done():
            raise
        opened.set_exception(error)


@contextlib.asynccontextmanager
async def _on_socket(app: ASGIApp) -> AsyncIterator[str]:
    """Answer requests on a unix socket in a folder of its own; yields its path."""
    with (
        tempfile.TemporaryDirectory(prefix="agentrl-model-") as folder,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        path = str(Path(folder, "model.sock"))
        sock.bind(path)
        if (
            os.geteuid() == 0
        ):  # a jail that root starts becomes another user; its keys are what lets a client in
            os.chmod(path, 0o666)
        async with answering(app, sock):
            yield path


_SERVERS: dict[asyncio.AbstractEventLoop, EpisodeServer] = {}
