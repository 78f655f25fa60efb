"""A LightningStore over HTTP: a server around a store, and a client that is a store.

    POST /v1/agl/{method} {"arguments": …}      200 {"result": …}, or 4xx {"error": TYPE, "message": …}

Records travel as `{"record": TYPE, "data": …}` and dictionaries as `{"dict": …}`, so that each side has what the other
had; values that JSON cannot hold are refused. Off the loopback AGENTRL_TOKEN is the bearer token of both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx2
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl_cli.agents.gateway.guard import PageGuard, bearer, is_loopback, is_token
from agentrl_cli.agents.gateway.http import json_body
from agentrl_cli.agents.gateway.listen import listening
from agentrl_cli.agents.gateway.request import RequestError
from agentrl_cli.plugins.lightning.spans import Span
from agentrl_cli.plugins.lightning.store import LightningStore
from agentrl_cli.plugins.lightning.store_rules import given_only
from agentrl_cli.plugins.lightning.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PaginatedResult,
    PromptTemplate,
    ProxyLLM,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Worker,
)

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
RECORDS: dict[str, type[BaseModel]] = {
    record.__name__: record
    for record in (
        *(AttemptedRollout, Rollout, Attempt, RolloutConfig, EnqueueRolloutRequest, Span, Worker),
        *(ResourcesUpdate, ProxyLLM, LLM, PromptTemplate),
    )
}


def to_wire(value: Any) -> Any:
    """Return a value as JSON holds it. Raises ValueError if it cannot."""
    if isinstance(value, PaginatedResult):
        return {
            "page": [to_wire(item) for item in value.items],
            "of": [value.limit, value.offset, value.total],
        }
    if isinstance(value, BaseModel):
        if type(value).__name__ not in RECORDS:
            raise ValueError(f"{type(value).__name__} cannot be sent to a store.")
        try:
            return {
                "record": type(value).__name__,
                "data": value.model_dump(mode="json", serialize_as_any=True),
            }
        except PydanticSerializationError as error:
            raise ValueError(
                f"{type(value).__name__} cannot be sent to a store: {error}"
            ) from error
    if isinstance(value, Mapping):
        return {"dict": {str(name): to_wire(one) for name, one in value.items()}}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [to_wire(one) for one in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(
        f"A {type(value).__name__} cannot be sent to a store: give what JSON can hold."
    )


def from_wire(value: Any) -> Any:
    """What `to_wire` was given. Raises ValueError for anything else."""
    if isinstance(value, list):
        return [from_wire(one) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("dict"), dict):
        return {name: from_wire(one) for name, one in value["dict"].items()}
    if isinstance(value.get("page"), list):
        limit, offset, total = value["of"]
        return PaginatedResult(
            items=from_wire(value["page"]), limit=limit, offset=offset, total=total
        )
    if value.get("record") in RECORDS:
        return RECORDS[value["record"]].model_validate(value["data"])
    raise ValueError(f"No record of a store: {sorted(value)}")


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
            return _failed("ValueError", "The token is missing or wrong.", 401)
        if name not in METHODS:
            return _failed("ValueError", f"A store has no method {name!r}.", 404)
        try:
            given = from_wire((await json_body(request, MOST)).get("arguments"))
            bound = METHODS[name].bind(self, **given)
            result = await getattr(self.store, name)(*bound.args[1:], **bound.kwargs)
            return JSONResponse({"result": to_wire(result)})
        except RequestError as error:
            return _failed("ValueError", error.message, error.status)
        except (ValidationError, KeyError, AttributeError) as error:
            return _failed("ValueError", f"{name}: {error}", 400)
        except tuple(ERRORS.values()) as error:
            return _failed(
                next(kind for kind, one in ERRORS.items() if isinstance(error, one)),
                str(error),
                400,
            )


class LightningStoreClient(LightningStore):
    """The store of a `LightningStoreServer`. Raises what the server's store raises, and ConnectionError."""

    def __init__(self, server_address: str, *, request_timeout: float | None = None) -> None:
        """`request_timeout`: seconds for an answer; None waits, as `wait_for_rollouts` may."""
        self.server_address = server_address.rstrip("/")
        self._timeout = httpx2.Timeout(request_timeout, connect=5.0)
        token = os.environ.get(TOKEN, "")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    @property
    def capabilities(self) -> Any:
        """As every store's; other processes see what it holds."""
        return {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": False}

    async def close(self) -> None:
        """Close the connections of this event loop."""
        if (client := self._clients.pop(asyncio.get_running_loop(), None)) is not None:
            await client.aclose()

    async def ask(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method of the server's store."""
        loop = asyncio.get_running_loop()
        if (client := self._clients.get(loop)) is None:
            client = self._clients[loop] = httpx2.AsyncClient(
                headers=self._headers, timeout=self._timeout, trust_env=False
            )
        url, body = f"{self.server_address}{PATH}/{method}", {"arguments": to_wire(arguments)}
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
                return from_wire(said["result"])
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


def _failed(kind: str, message: str, status: int) -> Response:
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
