"""A LightningStore over HTTP: a server around a store, and a client that is a store.

    POST /v1/agl/{method} {"args": […], "kwargs": {…}}      200 the result as JSON, or 4xx {"error": TYPE, "message": …}

The annotations of the method say what both sides make of the JSON; values that JSON cannot hold are refused. Off the
loopback AGENTRL_TOKEN is the bearer token of both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx2
from pydantic import ConfigDict, TypeAdapter, validate_call
from pydantic_core import PydanticSerializationError, to_jsonable_python
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
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
from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.plugins.lightning.store import LightningStore

TOKEN = "AGENTRL_TOKEN"
PORT = 4747
PATH = "/v1/agl"
RETRIES = 6
"""Attempts to connect, over 15 s. A request that was sent is not repeated: it may have taken effect."""
MOST = 64 * 2**20
"""Bytes of a request."""
METHODS = {
    name: method
    for name, method in inspect.getmembers(LightningStore, inspect.iscoroutinefunction)
    if name[0] != "_" and name != "add_otel_span"
}
"""The methods that a client asks its server for."""
ERRORS: dict[str, type[Exception]] = {
    one.__name__: one for one in (ValueError, RuntimeError, TypeError)
}


class LightningStoreServer(LightningStore):
    """A store that other processes reach; here it is the store that it serves."""

    def __init__(
        self, store: LightningStore, host: str | None = None, port: int | None = None
    ) -> None:
        """Raises ValueError for an address off the loopback without a token."""
        super().__init__(store._records)
        self.store, self._host = store, host or "127.0.0.1"
        self._port, self._token = PORT if port is None else port, os.environ.get(TOKEN, "")
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
        async with self._exit:
            await self.start()
            await asyncio.Event().wait()

    async def _answer(self, request: Request) -> JSONResponse:
        name, given = request.path_params["method"], request.headers.get("authorization", "")
        if self._token and not is_token(self._token, bearer(given)):
            return _refuse("ValueError", "The token is missing or wrong.", 401)
        if name not in METHODS:
            return _refuse("ValueError", f"A store has no method {name!r}.", 404)
        try:
            sent = await json_body(request, MOST)
            call = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(
                getattr(self.store, name)
            )
            return JSONResponse(to_jsonable_python(await call(*sent["args"], **sent["kwargs"])))
        except RequestError as error:
            return _refuse("ValueError", error.message, error.status)
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            kinds = [kind for kind, one in ERRORS.items() if isinstance(error, one)]
            return _refuse([*kinds, "ValueError"][0], str(error), 400)


class LightningStoreClient(LightningStore):
    """The store of a `LightningStoreServer`. Raises the errors of the server's store, and ConnectionError."""

    def __init__(self, server_address: str, *, request_timeout: float | None = None) -> None:
        """`request_timeout`: seconds for an answer; None waits, as `wait_for_rollouts` may."""
        self.server_address = server_address.rstrip("/")
        token = os.environ.get(TOKEN, "")
        self._client = httpx2.Client(
            base_url=f"{self.server_address}{PATH}",
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=httpx2.Timeout(request_timeout, connect=5.0),
            transport=httpx2.HTTPTransport(retries=RETRIES),
        )

    @property
    def capabilities(self) -> Any:
        """As every store's; other processes see its records."""
        return {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": False}

    async def close(self) -> None:
        """Close its connections."""
        self._client.close()

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the server's store."""
        try:
            sent = to_jsonable_python({"args": args, "kwargs": kwargs})
        except PydanticSerializationError as error:
            raise ValueError(f"An argument of {method} cannot be sent: {error}") from error
        try:  # in a thread: each runner has an event loop of its own, and they share the connections
            answer = await in_thread(self._client.post, f"/{method}", json=sent)
            said = answer.json()
            if answer.is_success:
                return _result_of(method).validate_python(said)
            kind, message = ERRORS[said["error"]], said["message"]
        except httpx2.HTTPError as error:
            text = f"No store answers at {self.server_address}: {error}"
            raise ConnectionError(text) from error
        except (KeyError, TypeError, ValueError) as error:
            text = (
                f"{self.server_address} is not a store: its answer has status {answer.status_code}."
            )
            raise ConnectionError(text) from error
        raise kind(message)


for _name in METHODS:
    setattr(LightningStoreClient, _name, functools.partialmethod(LightningStoreClient.ask, _name))


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


@functools.cache
def _result_of(method: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(METHODS[method])["return"])


def _refuse(kind: str, message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": kind, "message": message}, status)
