"""A LightningStore over HTTP: a server around a store, and a client that is a store.

    POST /v1/agl/{method} {"arguments": …}      200 {"result": …}, or 4xx {"error": TYPE, "message": …}

Arguments and results travel as the annotations of the method say, so that both sides have the same; values that JSON
cannot hold are refused. Off the loopback AGENTRL_TOKEN is the bearer token of both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_type_hints

import httpx2
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl_cli.agents.gateway.http import (
    PageGuard,
    bearer,
    is_loopback,
    is_token,
    json_body,
    listening,
)
from agentrl_cli.agents.gateway.request import RequestError
from agentrl_cli.plugins.lightning import types, work_queue
from agentrl_cli.plugins.lightning.store import LightningStore
from agentrl_cli.plugins.lightning.store_rules import given_only

TOKEN = "AGENTRL_TOKEN"
PORT = 4747
PATH = "/v1/agl"
CONNECTING = (0.1, 0.4, 1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to reach the server. A request that was sent is not repeated: it may have taken effect."""
MOST = 64 * 2**20
"""Bytes of a request."""
LOCAL = {"add_otel_span", "close"}
"""Methods that a client runs itself."""
METHODS = {
    name: inspect.signature(method)
    for name, method in inspect.getmembers(LightningStore, inspect.iscoroutinefunction)
    if name[0] != "_" and name not in LOCAL
}
ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
    "TypeError": TypeError,
}
KINDS = {**vars(types), **vars(work_queue), "Unset": None, "LightningStoreStatistics": Any}
"""Names in the annotations of a store's methods. An argument that is unset is not sent."""


@cache
def form_of(method: str, name: str = "return") -> TypeAdapter[Any]:
    """Return the form of an argument of a store's method, or of its result, between objects and JSON."""
    hints = get_type_hints(getattr(LightningStore, method), KINDS)
    return TypeAdapter(hints[name])


def to_wire(method: str, name: str, value: Any) -> Any:
    """Return a value as JSON holds it. Raises ValueError if it cannot."""
    try:
        return form_of(method, name).dump_python(value, mode="json", serialize_as_any=True)
    except PydanticSerializationError as error:
        raise ValueError(f"The {name} of {method} cannot be sent to a store: {error}") from error


class LightningStoreServer(LightningStore):
    """A store that other processes reach; here it is the store that it serves."""

    def __init__(
        self, store: LightningStore, host: str | None = None, port: int | None = None
    ) -> None:
        """Raises ValueError for an address off the loopback without a token."""
        super().__init__(store._records)
        self.store, self._host, self._port = (
            store,
            host or "127.0.0.1",
            PORT if port is None else port,
        )
        self._token = os.environ.get(TOKEN, "")
        if not is_loopback(self._host) and not self._token:
            raise ValueError(f"{self._host} can be reached from other machines: set {TOKEN}.")
        self._exit = contextlib.AsyncExitStack()
        self.endpoint = ""
        """Its address, once it has started."""

    async def start(self) -> None:
        """Answer requests in the running event loop from now on. Raises UsageError if the address is taken."""
        routes = [Route(f"{PATH}/{{method}}", self._answer, methods=["POST"])]
        app = PageGuard(Starlette(routes=routes), {"localhost", self._host})
        self.endpoint = await self._exit.enter_async_context(listening(app, self._host, self._port))

    async def stop(self) -> None:
        """Answer no more."""
        await self._exit.aclose()

    async def run_forever(self) -> None:
        """Answer requests until cancelled."""
        await self.start()
        try:
            await asyncio.Event().wait()
        finally:
            await self.stop()

    async def _answer(self, request: Request) -> Response:
        name = request.path_params["method"]
        if self._token and not is_token(
            self._token, bearer(request.headers.get("authorization", ""))
        ):
            return _error_response("ValueError", "The token is missing or wrong.", 401)
        if name not in METHODS:
            return _error_response("ValueError", f"A store has no method {name!r}.", 404)
        try:
            sent = dict((await json_body(request, MOST)).get("arguments") or {})
            given = {key: form_of(name, key).validate_python(one) for key, one in sent.items()}
            result = await getattr(self.store, name)(**given)
            return JSONResponse({"result": to_wire(name, "return", result)})
        except RequestError as error:
            return _error_response("ValueError", error.message, error.status)
        except (ValidationError, KeyError, AttributeError) as error:
            return _error_response("ValueError", f"{name}: {error}", 400)
        except tuple(ERRORS.values()) as error:
            return _error_response(
                next(kind for kind, one in ERRORS.items() if isinstance(error, one)),
                str(error),
                400,
            )


class LightningStoreClient(LightningStore):
    """The store of a `LightningStoreServer`. Raises the errors of the server's store, and ConnectionError."""

    def __init__(self, server_address: str, *, request_timeout: float | None = None) -> None:
        """`request_timeout`: seconds for an answer; None waits, as `wait_for_rollouts` may."""
        self.server_address = server_address.rstrip("/")
        self._timeout = httpx2.Timeout(request_timeout, connect=5.0)
        token = os.environ.get(TOKEN, "")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    @property
    def capabilities(self) -> Any:
        """As every store's; other processes see its records."""
        return {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": False}

    async def close(self) -> None:
        """Close the connections of this event loop."""
        if (client := self._clients.pop(asyncio.get_running_loop(), None)) is not None:
            await client.aclose()

    async def ask(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method of the server's store."""
        # A connection belongs to the event loop that opened it, and each runner has a loop of its own.
        loop = asyncio.get_running_loop()
        if (client := self._clients.get(loop)) is None:
            client = self._clients[loop] = httpx2.AsyncClient(
                headers=self._headers, timeout=self._timeout, trust_env=False
            )
        sent = {name: to_wire(method, name, value) for name, value in arguments.items()}
        url, body = f"{self.server_address}{PATH}/{method}", {"arguments": sent}
        for pause in (*CONNECTING, None):
            try:
                answer = await client.post(url, json=body)
                break
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if pause is None:
                    raise ConnectionError(
                        f"No store answers at {self.server_address}: {error}"
                    ) from error
                await asyncio.sleep(pause)
            except httpx2.HTTPError as error:
                raise ConnectionError(
                    f"The store at {self.server_address} did not answer: {error}"
                ) from error
        try:
            said = answer.json()
            if answer.is_success:
                return form_of(method).validate_python(said["result"])
            kind, message = ERRORS.get(said["error"], RuntimeError), said["message"]
        except (KeyError, TypeError, ValueError) as problem:
            text = (
                f"{self.server_address} is not a store: its answer has status {answer.status_code}."
            )
            raise ConnectionError(text) from problem
        raise kind(message)


@contextlib.contextmanager
def serving(store: LightningStore, host: str, port: int) -> Iterator[None]:
    """Serve a store from a thread of its own until the block ends: an algorithm may block its event loop.

    Raises UsageError if the address is taken.
    """
    loop, server = asyncio.new_event_loop(), LightningStoreServer(store, host, port)
    thread = threading.Thread(target=loop.run_forever, name="store", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _error_response(kind: str, message: str, status: int) -> Response:
    return JSONResponse({"error": kind, "message": message}, status)


def _remote(name: str, signature: inspect.Signature) -> Any:
    async def method(self: LightningStoreClient, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        return await self.ask(name, given_only(given))

    method.__name__, method.__doc__ = name, getattr(LightningStore, name).__doc__
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


for _name, _signature in METHODS.items():
    setattr(LightningStoreClient, _name, _remote(_name, _signature))
