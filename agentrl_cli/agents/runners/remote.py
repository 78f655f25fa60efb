"""Agents that run elsewhere and ask for tasks: `agent: {remote: HOST:PORT, lease: 60}`.

    POST /tasks/claim {"wait": 20}              a task with base_url, api_key and model, or 204 if there is none so long
    POST /tasks/{lease}/heartbeat               the agent lives: its lease begins again
    POST /tasks/{lease}/end {"reward": 0.5}     its end; also {"error": "…"}, or {} if the reward was given before

The model's server is below the same address. A lease that ends without a word is a dead agent: its episode begins again
with another one. A lease that is over is answered with 409. Off the loopback AGENTRL_TOKEN is the bearer token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from agentrl_cli.agents.emit import AgentCall
from agentrl_cli.agents.gateway.app import answer_error, reward_of
from agentrl_cli.agents.gateway.http import (
    PageGuard,
    bearer,
    is_loopback,
    is_token,
    json_body,
    listening,
)
from agentrl_cli.agents.gateway.request import RequestError, bad
from agentrl_cli.agents.runners.base import AgentLost, Ended, printed_names
from agentrl_cli.agents.runners.command import task_of
from agentrl_cli.agents.runners.server import EpisodeServer
from agentrl_cli.errors import ConfigError, EnvError
from agentrl_cli.tasks import AgentSpec

LONGEST_WAIT = 60.0
"""Seconds that a claim may wait for a task."""
TOKEN = "AGENTRL_TOKEN"
_OVER = 100_000
"""Leases that are over and still answered with 409."""


@dataclass(eq=False)
class Offer:
    """A task to be claimed, and how its agent ended."""

    call: AgentCall
    spec: AgentSpec
    done: asyncio.Future[Ended] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once an agent has it."""
    alarm: asyncio.TimerHandle | None = None
    """Rings when the lease ends; None before it is claimed."""

    def renew(self) -> None:
        """Begin the lease, or begin it again."""
        if self.alarm is not None:
            self.alarm.cancel()
        self.alarm = asyncio.get_running_loop().call_later(self.spec.lease, self._expire)

    def _expire(self) -> None:
        if not self.done.done():
            self.done.set_exception(AgentLost(f"the agent said nothing for {self.spec.lease:g} s"))


class RemoteRunner:
    """Offers each episode to the agents that ask at `spec.remote`, and waits until it has ended."""

    stderr = ""
    start_seconds = 0.0

    def __init__(self, spec: AgentSpec) -> None:
        """Raise ConfigError for an address off the loopback without a token."""
        self._spec = spec
        host = spec.remote.rpartition(":")[0].strip("[]")
        if not is_loopback(host) and not os.environ.get(TOKEN):
            raise ConfigError(
                f"agent.remote: {host} can be reached from other machines.", hint=f"Set {TOKEN}."
            )
        self.claimed = asyncio.Event()
        """Set once an agent has the task."""
        self.patience: float | None = None
        """Seconds to wait for an agent while none is at work; None: any time."""

    async def run(self, call: AgentCall) -> Ended:
        """Return how the agent that claimed the task ended. Raises AgentLost if it died, EnvError if none asks for it
        while none is at work, or none can ask.
        """
        self.claimed.clear()
        board = await Board.here(self._spec.remote)
        offer = Offer(call, self._spec, claimed=self.claimed)
        board.offer(offer)
        try:
            while not self.claimed.is_set():
                before = board.claims
                try:
                    await asyncio.wait_for(self.claimed.wait(), self.patience)
                except TimeoutError:
                    if not board.leases and board.claims == before:
                        text = f"No agent asked for the task in {self.patience:g} s."
                        raise EnvError(text, hint="Start one.") from None
            return await offer.done
        finally:
            if offer.alarm is not None:
                offer.alarm.cancel()
            board.withdraw(offer)


class Board:
    """The tasks that wait for an agent, and the leases of those that have one; one per event loop and address."""

    def __init__(self, model: ASGIApp) -> None:
        self._token = os.environ.get(TOKEN, "")
        self._waiting: deque[Offer] = deque()
        self.leases: dict[str, Offer] = {}
        self.claims = 0
        """Tasks that agents got so far."""
        self._over: deque[str] = deque(maxlen=_OVER)
        self._offered = asyncio.Event()
        routes = [
            Route("/tasks/claim", self._claim, methods=["POST"]),
            Route("/tasks/{lease}/heartbeat", self._heartbeat, methods=["POST"]),
            Route("/tasks/{lease}/end", self._end, methods=["POST"]),
            Mount("/", model),
        ]
        self.app = Starlette(routes=routes, exception_handlers={RequestError: answer_error})

    @classmethod
    async def here(cls, address: str) -> Board:
        """Return the board of an address in the running event loop, with the server of its episodes below it."""
        server = EpisodeServer.running()
        return await server.open_place(
            f"agent.remote: {address}", lambda: cls._listen(address, server.gateway.app)
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def _listen(cls, address: str, model: ASGIApp) -> AsyncIterator[Board]:
        board = cls(model)
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        async with listening(PageGuard(board.app, {"localhost", host}), host, int(port)):
            yield board

    def offer(self, offer: Offer) -> None:
        """Let an agent have it."""
        self._waiting.append(offer)
        self._offered.set()

    def withdraw(self, offer: Offer) -> None:
        """End the lease of an episode that is over, if it has one."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(offer)
        for lease in [lease for lease, other in self.leases.items() if other is offer]:
            del self.leases[lease]
            self._over.append(lease)

    # --- what agents ask ---------------------------------------------------------------------------------------------

    async def _claim(self, request: Request) -> Response:
        self._require_token(request)
        body = await json_body(request, optional=True)
        wait = body.get("wait", 0)
        if (
            isinstance(wait, bool)
            or not isinstance(wait, (int, float))
            or not 0 <= wait <= LONGEST_WAIT
        ):
            raise bad(f"wait must be seconds from 0 to {LONGEST_WAIT:g}.", "wait")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                while not self._waiting:
                    self._offered.clear()
                    await self._offered.wait()
        if (
            await request.is_disconnected() or not self._waiting
        ):  # in this order: another may be quicker
            return Response(status_code=204)
        offer, lease = self._waiting.popleft(), secrets.token_urlsafe(24)
        self.leases[lease] = offer
        self.claims += 1
        offer.claimed.set()
        offer.renew()
        key = offer.call.api_key
        call = replace(offer.call, root=f"{request.url.scheme}://{request.url.netloc}/e/{key}")
        return JSONResponse(
            {
                "lease": lease,
                "lease_seconds": offer.spec.lease,
                "task": task_of(call, offer.spec),
                "base_url": call.base_url,
                "api_key": call.api_key,
                "model": call.model,
                "event_url": call.event_url,
            }
        )

    async def _heartbeat(self, request: Request) -> Response:
        offer = self._find_lease(request)
        offer.renew()
        return JSONResponse({"lease_seconds": offer.spec.lease})

    async def _end(self, request: Request) -> Response:
        offer = self._find_lease(request)
        body = await json_body(request, optional=True)
        error = body.get("error") or ""
        if not isinstance(error, str):
            raise bad("error must be a text.", "error")
        value = reward_of(body)
        # A line for the exception and for each of its causes, as the worker that ships writes them.
        causes = (name for line in error.splitlines() for name in printed_names(line))
        raised = ("error", *causes) if error else ()
        if not offer.done.done():
            offer.done.set_result(Ended(value, error[:2000], raised=raised))
        self.withdraw(offer)
        return JSONResponse({"reward": value})

    def _find_lease(self, request: Request) -> Offer:
        self._require_token(request)
        lease = request.path_params["lease"]
        if (offer := self.leases.get(lease)) is None:
            over = lease in self._over
            raise RequestError(
                "The lease is over: the task was given to another agent, or has ended."
                if over
                else "Unknown lease.",
                status=409 if over else 404,
            )
        return offer

    def _require_token(self, request: Request) -> None:
        if self._token and not is_token(
            self._token, bearer(request.headers.get("authorization", ""))
        ):
            raise RequestError("The token is missing or wrong.", status=401)
