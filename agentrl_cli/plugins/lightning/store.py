"""LightningStore: the queue between algorithms and runners, and what attempts leave behind.

`SqliteLightningStore` keeps its records in the file that also has the runs and episodes (`runs/agentrl.db`), where
several processes may share it; `InMemoryLightningStore` in a file of this process's memory. No method waits for
anything while it changes records, so each is atomic.

A server around a store, and a client that is a store, bring it to other processes:

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
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

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
from agentrl_cli.errors import AgentRLError
from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.plugins.lightning.rules import HEAL, Records, page
from agentrl_cli.plugins.lightning.spans import Span
from agentrl_cli.plugins.lightning.types import NamedResources, PaginatedResult, ResourcesUpdate
from agentrl_cli.plugins.lightning.work_queue import (
    LightningQueue,
    LightningStoreCapabilities,
    LightningStoreStatistics,
)

__all__ = [
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "SqliteLightningStore",
]


class LightningStore(LightningQueue):
    """A store over some records, by default in memory. Unknown ids raise ValueError."""

    def __init__(self, records: Records | None = None, heal: float = HEAL) -> None:
        super().__init__(Records(":memory:") if records is None else records, heal)

    # --- spans -------------------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span | None:
        """Keep a span; None if there is one of that id."""
        return next(iter(await self.add_many_spans([span])), None)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Keep spans: a sign of life of their attempts. Returns those that were new."""
        kept = []
        with self._records.file.transaction():
            for span in spans:
                key = f"{span.rollout_id}/{span.attempt_id}/{span.span_id}"
                attempt = self._find_attempt(span.rollout_id, span.attempt_id)
                self._records.raise_to(span.rollout_id, span.sequence_id)
                if self._records.get("spans", key) is None:
                    self._records.put("spans", key, span, span.rollout_id)
                    kept.append(span)
                    self._alive(attempt)
        return kept

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: int | None = None
    ) -> Span | None:
        """Keep OpenTelemetry's `ReadableSpan`."""
        if sequence_id is None:
            sequence_id = await self.get_next_span_sequence_id(rollout_id, attempt_id)
        return await self.add_span(
            Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id)
        )

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Return a number above all of the rollout's before."""
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    async def get_many_span_sequence_ids(
        self, rollout_attempt_ids: Sequence[tuple[str, str]]
    ) -> Sequence[int]:
        """One such number for each."""
        with self._records.file.transaction():
            return [self._records.raise_to(rollout_id) for rollout_id, _ in rollout_attempt_ids]

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: Literal["and", "or"] = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: Literal["asc", "desc"] = "asc",
    ) -> PaginatedResult[Span]:
        """Spans of a rollout, of one attempt or of all."""
        if attempt_id == "latest":
            latest = self._latest(rollout_id)
            attempt_id = "" if latest is None else latest.attempt_id
        rows = self._records.select("spans", rollout_id=[rollout_id])
        rows = [span for span in rows if attempt_id is None or span.attempt_id == attempt_id]
        equal = {"trace_id": trace_id, "span_id": span_id, "parent_id": parent_id, "name": name}
        any_of = {field: None if value is None else [value] for field, value in equal.items()}
        holding = {
            "trace_id": trace_id_contains,
            "span_id": span_id_contains,
            "parent_id": parent_id_contains,
            "name": name_contains,
        }
        return page(rows, any_of, holding, filter_logic, sort_by, sort_order, limit, offset)

    # --- resources ---------------------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        """Return a new version of the resources, under an id of its own."""
        return await self.update_resources(f"rs-{secrets.token_hex(6)}", resources)

    async def update_resources(
        self, resources_id: str, resources: NamedResources
    ) -> ResourcesUpdate:
        """Other resources under an id, which are then the latest."""
        now = time.time()
        with self._records.file.transaction():
            old = self._records.get("resources", resources_id)
            update = ResourcesUpdate(
                resources_id=resources_id,
                create_time=now if old is None else old.create_time,
                update_time=now,
                version=1 if old is None else old.version + 1,
                resources=resources,
            )
            self._records.put("resources", resources_id, update)
        return update

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Versions of the resources."""
        rows: list[ResourcesUpdate] = self._records.select("resources")
        any_of = {"resources_id": None if resources_id is None else [resources_id]}
        holding = {"resources_id": resources_id_contains}
        return page(rows, any_of, holding, "and", sort_by, sort_order, limit, offset)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """One version."""
        found: ResourcesUpdate | None = self._records.get("resources", resources_id)
        return found

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the version that was written last."""
        return max(self._records.select("resources"), key=lambda row: row.update_time, default=None)


class InMemoryLightningStore(LightningStore):
    """A store of this process. `thread_safe` has no effect: it always is."""

    def __init__(self, *, thread_safe: bool = True, scan_debounce_seconds: float = HEAL) -> None:
        """`scan_debounce_seconds`: how long attempts may be over their time before that is seen."""
        super().__init__(heal=scan_debounce_seconds)


class SqliteLightningStore(LightningStore):
    """A store in the file of runs and episodes, for several processes; its contents outlive them."""

    def __init__(self, path: str | Path = "runs/agentrl.db") -> None:
        """Raises StoreError."""
        super().__init__(Records(path))

    async def close(self) -> None:
        """Write what waits and close the file."""
        self._records.file.close()


class LightningStoreThreaded(LightningStore):
    """The same store: every store here may be used by threads."""

    def __init__(self, store: LightningStore) -> None:
        super().__init__(store._records)


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


def token_for(host: str) -> str:
    """Return the token in AGENTRL_TOKEN. Raises ValueError if there is none and `host` is off the loopback."""
    token = os.environ.get(TOKEN, "")
    if not is_loopback(host) and not token:
        raise ValueError(f"{host} can be reached from other machines: set {TOKEN}.")
    return token


class LightningStoreServer(LightningStore):
    """A store that other processes reach; here it is the store that it serves."""

    def __init__(
        self, store: LightningStore, host: str | None = None, port: int | None = None
    ) -> None:
        """Raises ValueError for an address off the loopback without a token."""
        super().__init__(store._records)
        self.store, self._host = store, host or "127.0.0.1"
        self._port, self._token = PORT if port is None else port, token_for(self._host)
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
        except (KeyError, ValueError, RuntimeError, TypeError, AgentRLError) as error:
            kinds = [kind for kind, one in ERRORS.items() if isinstance(error, one)]
            other = "ValueError" if isinstance(error, KeyError) else "RuntimeError"
            return _refuse([*kinds, other][0], str(error), 400)


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
        try:
            yield
        finally:
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
