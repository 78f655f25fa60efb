"""JSON over HTTP to a server: retries, an API key, and recovery after the server was restarted.

A request that is cancelled (an episode's time is over, the run was stopped) closes its connection, so that the server
stops sampling for it. A connection serves one request: nothing of it outlives the event loop that made it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import cache
from ssl import SSLContext
from typing import Any, TypeVar

import httpx2

from agentrl_cli.config.records import PolicySettings
from agentrl_cli.errors import BadAnswer, ConfigError, PolicyError
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.policies.remote.checked import read_json
from agentrl_cli.types.masking import mask_text

T = TypeVar("T")

RETRY_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
HINTS = {
    **dict.fromkeys(
        (401, 403),
        "remote.api_key_env names the environment variable that holds the server's key.",
    ),
    404: "remote.model is the name under which the server serves the model; its /v1/models lists them.",
}
MAX_BODY = 500
"""Characters of a server's error that a message repeats."""
LONGEST_PAUSE = 10.0
"""Seconds between two attempts, at most; more only if the server asks for them, within `remote.request.patience`."""
CONNECTING = 10.0
"""Seconds that a connection may take to be made."""
REACH = 4.0
"""Seconds that a server has to answer anything at all if a person waits for it."""


class ServerError(PolicyError):
    """An answer that is an error. `status` is its HTTP status."""

    def __init__(self, message: str, status: int, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class Unreachable(PolicyError):
    """No answer: the connection failed, or the time was over."""


def check_address(url: str) -> None:
    """Raise PolicyError unless `url` is an HTTP address."""
    try:
        valid = url.startswith(("http://", "https://")) and bool(httpx2.URL(url).host)
    except httpx2.InvalidURL:
        valid = False
    if not valid:
        raise PolicyError(
            f"{url!r} is not an HTTP address.", hint="Write it as http://127.0.0.1:8000/v1."
        )


class Endpoint:
    """One server. `close` it.

    A connection that was refused or broke off may mean that the server starts again, without the weights that it was
    given: then `recover` is called once before the next request is sent.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        concurrency: int = 64,
        timeout: float = 600.0,
        retries: int = 3,
        patience: float = 0.0,
        start: str = "",
    ) -> None:
        """Prepare requests; `url` ends before their paths (`http://host:8000/v1`). `timeout`: seconds of one attempt.

        Failing requests are tried `retries` times more, and an unreachable server for `patience` seconds.
        `start`: how to start one, for the hint of an error. Raises PolicyError if `url` is not an HTTP address.
        """
        check_address(url)
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.retries = retries
        self.patience = patience
        self._start = f" {start}" if start else ""
        self.watched = False
        """True if a person waits: a silent server is then asked every `REACH` seconds if it is there."""
        self.recover: Callable[[], Awaitable[None]] | None = None
        self.starting: Callable[[], bool] | None = None
        """Whether the server is started again now, for which requests wait; raises PolicyError if it never will be."""
        self._lost = False
        self.recoveries = 0
        """Calls of `recover`: a request that began before the last one does not ask for another."""
        self._recovering = asyncio.Lock()
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = httpx2.AsyncClient(
            headers=headers,
            verify=_tls(),
            timeout=httpx2.Timeout(timeout, connect=min(CONNECTING, timeout), pool=None),
            # One more for `reach`, which must not wait until a request is answered.
            limits=httpx2.Limits(max_connections=concurrency + 1, max_keepalive_connections=0),
            follow_redirects=True,
        )
        self._calls: set[asyncio.Task[httpx2.Response]] = set()
        self._closed = False

    @property
    def root(self) -> str:
        """The address without the version of the API, to which a server's own paths are appended."""
        return self.url.removesuffix("/v1")

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON answer. Busy and failing servers are tried again; raises PolicyError with the server's
        message.
        """
        return await self.ask(path, body, lambda answer: answer)

    async def ask(
        self, path: str, body: Mapping[str, Any], read: Callable[[dict[str, Any]], T]
    ) -> T:
        """Return what `read` makes of the JSON answer. If that raises BadAnswer, the request is tried again, too."""
        return await self._request(
            f"{self.url}{path}", json.dumps(body).encode(), lambda data: read(read_json(data))
        )

    async def command(self, url: str, body: Mapping[str, Any]) -> str:
        """Post to a whole address and return the answer as text; `recover` may use it."""
        data = json.dumps(body).encode()
        return await self._request(
            url, data, lambda answer: answer.decode(errors="replace"), recovering=True
        )

    def watch(self) -> None:
        """Report a server that is not there within seconds from now on: a person waits."""
        self.watched, self.patience = True, 0.0

    async def reach(self) -> None:
        """Raise PolicyError unless the server answers a request for its models, with anything, within `REACH` s."""
        try:
            await self._once(self._client.build_request("GET", f"{self.url}/models", timeout=REACH))
        except httpx2.TimeoutException as error:
            raise Unreachable(
                f"{mask_text(self.url)} cannot be reached: no answer for {REACH:g} s.",
                hint="It may be hung, still loading its model, or behind a firewall: its log shows which.",
            ) from error
        except httpx2.RequestError as error:
            raise self._unreachable(mask_text(self.url), error) from error

    async def close(self) -> None:
        """Cancel running requests and close their connections."""
        self._closed = True
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.aclose()

    async def _request(
        self, url: str, data: bytes, read: Callable[[bytes], T], *, recovering: bool = False
    ) -> T:
        started, attempt, seen = time.monotonic(), 0, self.recoveries
        shown = mask_text(url)  # it may hold a password
        while True:
            asked = 0.0
            try:
                if not recovering:
                    await self._ensure_recovered()
                seen = self.recoveries
                with waiting(f"the server at {shown}"):
                    request = self._client.build_request("POST", url, content=data)
                    answer = await self._answer(request)
                if answer.is_success:
                    return read(answer.content)
                if answer.status_code not in RETRY_STATUS or attempt >= self.retries:
                    raise _server_error(shown, answer, attempt)
                asked = retry_after(answer.headers.get("Retry-After", ""))
            except BadAnswer as error:
                if attempt >= self.retries or self._closed:
                    tried = f"; tried {attempt + 1} times" if attempt else ""
                    raise BadAnswer(f"{shown} {error.message}{tried}.", hint=error.hint) from error
            except httpx2.RequestError as error:
                if not isinstance(error, httpx2.TimeoutException):
                    self.note_loss(seen)
                late = attempt >= self.retries and time.monotonic() - started >= self.patience
                if self.starting is not None and self.starting():
                    late = False
                if late or self._closed:
                    raise self._unreachable(shown, error) from error
            left = started + self.patience - time.monotonic()
            with waiting(f"the server at {shown}"):
                await asyncio.sleep(pause(attempt, asked, left))
            attempt += 1

    def note_loss(self, seen: int) -> None:
        """Note that a request, begun after `seen` recoveries, found no server or one without its weights."""
        self._lost |= seen == self.recoveries

    async def _ensure_recovered(self) -> None:
        """Load the weights into the server again after a lost connection, once for all waiting requests."""
        if self.recover is None or not (self._lost or self._recovering.locked()):
            return
        async with self._recovering:
            if self._lost:
                self._lost = False
                self.recoveries += 1
                try:
                    await self.recover()
                except BaseException:
                    self._lost = True
                    raise

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer; if a person waits and it takes long, only as long as the server is there."""
        if not self.watched:
            return await self._once(request)
        answer = asyncio.ensure_future(self._once(request))
        try:
            while not (await asyncio.wait([answer], timeout=REACH))[0]:
                await self.reach()
            return answer.result()
        finally:
            answer.cancel()

    async def _once(self, request: httpx2.Request) -> httpx2.Response:
        """Make one attempt, in a task of its own that `close` can cancel."""
        self._require_open(request)
        call = asyncio.ensure_future(self._client.send(request))
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and not current.cancelling():  # `close` was called
                self._require_open(request)
            raise
        finally:
            self._calls.discard(call)

    def _require_open(self, request: httpx2.Request) -> None:
        if self._closed:
            raise httpx2.ConnectError("the client was closed", request=request)

    def _unreachable(self, url: str, error: httpx2.RequestError) -> Unreachable:
        if isinstance(error, httpx2.TimeoutException):
            return Unreachable(
                f"{url} did not answer within {self.timeout:g} s.",
                hint="Raise remote.request.timeout, or lower rollout.concurrency or rollout.max_new_tokens.",
            )
        return Unreachable(
            f"{url} cannot be reached: {_reason(error)}.",
            hint=f"Is the server running? Is this its address?{self._start}",
        )


@cache
def _tls() -> SSLContext:
    """Return one for all clients: making it reads every certificate authority of the system."""
    return httpx2.create_ssl_context()


def retry_after(header: str) -> float:
    """Return the seconds that a server asks to be left alone for, in digits or as a date; 0 if it asks for none."""
    if header.isdecimal():
        return float(header)
    try:
        return parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0


def pause(attempt: int, asked: float, left: float) -> float:
    """Return the seconds to the next attempt; `left`: those of the patience."""
    grown = min(0.2 * 2.0 ** min(attempt, 10), LONGEST_PAUSE)
    return max(grown, min(asked, max(left, LONGEST_PAUSE)))


def _reason(error: BaseException) -> str:
    """Return the system's own words for a failed connection ("Connection refused"), else the client's."""
    found, cause = str(error) or type(error).__name__, error.__cause__ or error.__context__
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):  # of several addresses, the first one's
            cause = cause.exceptions[0]
        if isinstance(cause, OSError) and cause.errno:
            found = (
                str(cause.strerror)
                if isinstance(cause, socket.gaierror)
                else os.strerror(cause.errno)
            )
        cause = cause.__cause__ or cause.__context__
    return found


def _server_error(url: str, answer: httpx2.Response, retries: int) -> ServerError:
    status, hint = answer.status_code, HINTS.get(answer.status_code, "")
    if status >= 500:
        tried = f"Tried {retries + 1} times (remote.request.retries is {retries})"
        hint = f"{tried}; the server's own log has more."
    said = error_message(answer.text)[:MAX_BODY]
    return ServerError(f"{url} answered {status}: {said}", status, hint=hint)


def error_message(text: str) -> str:
    """Return the message in a server's error if it is JSON with one, else the text as it is."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text
    for name in ("error", "message"):
        answer = answer.get(name, answer) if isinstance(answer, dict) else answer
    return answer if isinstance(answer, str) and answer else text


NO_IMAGES = "Servers are sent token ids alone, without images."


class RemotePolicy:
    """A policy that samples on a server."""

    endpoint: Endpoint

    async def reach(self) -> None:
        """Raise PolicyError unless the server answers within seconds."""
        await self.endpoint.reach()

    async def close(self) -> None:
        await self.endpoint.close()


def connection(config: PolicySettings, url: str = "") -> dict[str, Any]:
    """Return the arguments of Endpoint; `url`: one of several servers, whose turns can move to another one.

    Raises ConfigError if the address or the API key's variable is missing.
    """
    remote = config.remote
    if not (url or remote.address):
        raise ConfigError(
            "remote.backend needs remote.url.", hint="For example http://host:8000/v1."
        )
    key = os.environ.get(remote.api_key_env, "") if remote.api_key_env else ""
    if remote.api_key_env and not key:
        raise ConfigError(
            f"remote.api_key_env names {remote.api_key_env}, which is not set in the environment.",
            hint="Export it, or set remote.api_key_env to the one that holds the key.",
        )
    return {
        "url": url or remote.address,
        "api_key": key,
        "concurrency": config.rollout.concurrency,
        "timeout": remote.request.timeout,
        "retries": min(remote.request.retries, 1) if url else remote.request.retries,
        "patience": 0.0 if url else remote.request.patience,
    }
