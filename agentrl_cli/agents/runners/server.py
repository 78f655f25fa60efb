"""The loopback server that agents find their model at: one per event loop, started with its first episode.

Every episode has an address of its own, `http://127.0.0.1:PORT/e/KEY`, whose key cannot be guessed and lets in nothing
but calls of that episode. A key whose episode has ended stays known: its stragglers get 409.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl_cli.agents.gateway.app import Gateway, error_body, reward_of
from agentrl_cli.agents.gateway.http import json_body
from agentrl_cli.agents.gateway.request import RequestError, bad
from agentrl_cli.agents.gateway.sampling import ended
from agentrl_cli.agents.gateway.session import Session, Trace
from agentrl_cli.agents.gateway.sessions import Sessions
from agentrl_cli.agents.runners.base import MODEL
from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import EnvError
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.types import Tokens, Turn

HOST = "127.0.0.1"
BACKLOG = 1024
"""Connections that may wait to be accepted: every episode of a step may call at once."""
MOST = 100_000
"""Sessions that are open at once; `rollout.concurrency` is the limit that counts."""


def new_key() -> str:
    """A key that cannot be guessed, and is an API key to clients."""
    return f"ep-{secrets.token_urlsafe(24)}"


@dataclass(eq=False)
class Door:
    """One episode's place in the server."""

    session: Session
    root: str
    reward: float | None = None
    """What the agent gave over HTTP or by `emit_reward`; the last one counts."""
    trace: asyncio.Future[Trace] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def emit_reward(self, value: float) -> None:
        """Set the reward, from any thread."""
        self.reward = value

    def recorded(self) -> tuple[Sequence[Turn], Tokens]:
        """The turns so far and their tokens, from any thread."""
        tree = self.session.tree
        tokens = tree.tokens  # first: a turn that is added meanwhile lies beyond them
        return [turn for turn in tree.turns if turn.end <= len(tokens)], tokens


class _Models:
    """An episode has one model, whatever its agent calls it; there is no call outside of an episode."""

    def policy(self, name: str) -> Policy:
        raise RequestError(f"There is no model {name!r} outside of an episode.", status=404, code="model_not_found")

    def cards(self) -> Sequence[Mapping[str, Any]]:
        return [{"id": MODEL}]


class EpisodeServer:
    """Serves the sessions of running episodes. `here` gives the one of the running event loop."""

    def __init__(self, chat: Chat) -> None:
        self._doors: dict[str, Door] = {}
        self._sessions = Sessions(on_end=self._ended, most=MOST)
        events = Route("/e/{key}/events", self._event, methods=["POST"])
        # Without a token of its own a request that names no episode would be let in, if only to be refused.
        self.gateway = Gateway(self._sessions, _Models(), chat, token=secrets.token_urlsafe(24), routes=[events])
        self._address: asyncio.Future[str] | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def here(cls, chat: Chat) -> EpisodeServer:
        """The server of the running event loop, made if there is none."""
        loop = asyncio.get_running_loop()
        if loop not in _SERVERS:
            _SERVERS[loop] = cls(chat)
        return _SERVERS[loop]

    async def open(self, session: Session) -> Door:
        """Serve a session."""
        address = await self._started()
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

    def _ended(self, session: Session, trace: Trace, reward: float | None) -> None:
        door = self._doors[session.key]
        if reward is not None:
            door.reward = reward
        if not door.trace.done():
            door.trace.set_result(trace)

    async def _event(self, request: Request) -> Response:
        """A reward: `{"reward": 0.5}`, or Agent-Lightning's `{"event_type": "reward", "data": {"value": 0.5}}`."""
        try:
            body = await json_body(request)
            key = request.path_params["key"]
            session = self._sessions.find(key)
            if session.sealed or key not in self._doors:
                raise ended(key)
            reward = reward_of(_reward_body(body))
            if reward is not None:
                self._doors[key].reward = reward
        except RequestError as error:
            return JSONResponse(error_body(f"{error.message} {error.hint}".rstrip(), error.status), error.status)
        return JSONResponse({"reward": reward})

    # --- listening ---------------------------------------------------------------------------------------------------

    async def _started(self) -> str:
        """The server's address. Starts it the first time."""
        if self._address is None:
            self._address = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._serve(self._address))
        return await asyncio.shield(self._address)

    async def _serve(self, address: asyncio.Future[str]) -> None:
        """Listen until the event loop ends, which cancels this."""
        try:
            await self._listen(address)
        finally:
            _SERVERS.pop(asyncio.get_running_loop(), None)
            if not address.done():
                address.set_exception(EnvError("The server that agents find their model at could not be started."))

    async def _listen(self, address: asyncio.Future[str]) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind((HOST, 0))
            config = uvicorn.Config(
                self.gateway.app,
                log_level="critical",
                access_log=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=1,
            )
            server = _Uvicorn(config, lambda: address.set_result(f"http://{HOST}:{sock.getsockname()[1]}"))
            try:
                await server.serve(sockets=[sock])
            except asyncio.CancelledError:
                server.force_exit = True
                await server.shutdown(sockets=[sock])
                raise


class _Uvicorn(uvicorn.Server):
    """Signals are the command's, and its start is reported."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _reward_body(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body as `{"reward": …}`. Raises RequestError for an event of another kind."""
    if "event_type" not in body:
        if "reward" not in body:
            raise bad('An event must be {"reward": NUMBER}.', "reward")
        return body
    data = body.get("data")
    if body["event_type"] != "reward" or not isinstance(data, Mapping):
        raise bad('Of Agent-Lightning\'s events only {"event_type": "reward", "data": {"value": NUMBER}} is taken.')
    return {"reward": data.get("value")}


_SERVERS: dict[asyncio.AbstractEventLoop, EpisodeServer] = {}
