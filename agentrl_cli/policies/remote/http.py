"""JSON over HTTP to a server that samples: retries, a key, and what to do when the server was restarted meanwhile.

Requests run in threads of their own (urllib), so that no HTTP library is needed. A request that nobody waits for any
more (an episode's time is over, the run was stopped) has its connection closed: the server stops sampling for it, and
no thread is left waiting for the answer.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from agentrl_cli.errors import BadAnswer, PolicyError
from agentrl_cli.policies.remote.checked import decoded

T = TypeVar("T")

RETRY_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
MAX_BODY = 500
"""Characters of a server's error that a message repeats."""
MAX_READ = 16384
"""Bytes of an error that are read, to find its message."""
LONGEST_PAUSE = 10.0
"""Seconds between two attempts, at most."""
CONNECTING = 10.0
"""Seconds that a connection may take to be made."""
REACH = 4.0
"""Seconds that a server has to answer anything at all where somebody waits for it."""


class ServerError(PolicyError):
    """An answer that is an error. `status` is its HTTP status."""

    def __init__(self, message: str, status: int, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class Endpoint:
    """One server. `close` it.

    A connection that was refused or broke off may mean that the server starts again, without the weights that it was
    given: then `mend` is called once before the next request goes on.
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
        """`url` ends before the paths of requests (`http://host:8000/v1`). `timeout` in seconds, of one attempt.

        Failing requests are tried `retries` times more; a server that cannot be reached for `patience` seconds.
        `start`: how one is started, for those who have none.
        """
        if not url.startswith(("http://", "https://")):
            raise PolicyError(f"{url!r} is no HTTP address.", hint="Write it as http://127.0.0.1:8000/v1.")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.retries = retries
        self.patience = patience
        self._start = f" {start}" if start else ""
        self.watched = False
        """Whether somebody sits and waits: then a silent server is asked every `REACH` seconds if it is there."""
        self.mend: Callable[[], Awaitable[None]] | None = None
        self._lost = False
        self._mending = asyncio.Lock()
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="agentrl-remote")
        self._calls: set[Call] = set()
        self._closed = False

    @property
    def root(self) -> str:
        """The address without the version of the API: where a server's own paths are."""
        return self.url.removesuffix("/v1")

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON answer. Busy and failing servers are tried again; raises PolicyError with what the server said."""
        return await self.ask(path, body, lambda answer: answer)

    async def ask(self, path: str, body: Mapping[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """What `read` makes of the JSON answer. One that it cannot use (BadAnswer) is asked for again, too."""
        return await self._request(f"{self.url}{path}", json.dumps(body).encode(), lambda data: read(decoded(data)))

    async def get(self, path: str) -> dict[str, Any]:
        """Like `post`, without a body."""
        return await self._request(f"{self.url}{path}", None, decoded)

    async def command(self, url: str, body: Mapping[str, Any]) -> str:
        """Post to a whole address; the answer as text, which some servers give to commands. `mend` may use it."""
        return await self._request(
            url, json.dumps(body).encode(), lambda data: data.decode(errors="replace"), mending=True
        )

    def watch(self) -> None:
        """Somebody sits and waits from now on: a server that is not there is told of within seconds."""
        self.watched, self.patience = True, 0.0

    async def reach(self) -> None:
        """Raises PolicyError unless the server answers a request for its models, with anything, within `REACH` s."""
        try:
            await self._once(Call(f"{self.url}/models", None, self._headers, REACH), None)
        except urllib.error.HTTPError as error:
            error.close()  # it is there; whether it serves what is asked of it shows when it is asked
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise PolicyError(
                    f"{self.url} cannot be reached: no answer for {REACH:g} s.",
                    hint="It hangs, still loads its model, or a firewall drops what is sent to it: its log says which.",
                ) from error
            raise self._unreached(self.url, reason) from error

    def close(self) -> None:
        """Break off what runs."""
        self._closed = True
        for call in list(self._calls):
            call.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _request(self, url: str, data: bytes | None, read: Callable[[bytes], T], *, mending: bool = False) -> T:
        started, attempt = time.monotonic(), 0
        while True:
            try:
                if not mending:
                    await self._mended()
                return read(await self._answer(Call(url, data, self._headers, self.timeout)))
            except BadAnswer as error:
                if attempt >= self.retries or self._closed:
                    tried = f"; tried {attempt + 1} times" if attempt else ""
                    raise BadAnswer(f"{url} {error.message}{tried}.", hint=error.hint) from error
            except urllib.error.HTTPError as error:
                with error:
                    said = _said(error.read(MAX_READ).decode(errors="replace"))
                if error.code not in RETRY_STATUS or attempt >= self.retries:
                    what = f"{url} answered {error.code}: {said[:MAX_BODY]}"
                    raise ServerError(what, error.code, hint=_hint(error.code, attempt + 1)) from error
            except (OSError, http.client.HTTPException) as error:  # URLError is one, and a broken connection
                reason = getattr(error, "reason", error)
                self._lost |= not isinstance(reason, TimeoutError)
                late = attempt >= self.retries and time.monotonic() - started >= self.patience
                if late or self._closed:
                    raise self._unreached(url, reason) from error
            await asyncio.sleep(min(0.2 * 2 ** min(attempt, 10), LONGEST_PAUSE))
            attempt += 1

    async def _mended(self) -> None:
        """After a lost connection: give the server back what it had, once for all who wait."""
        if self.mend is None or not (self._lost or self._mending.locked()):
            return
        async with self._mending:
            if self._lost:
                self._lost = False
                try:
                    await self.mend()
                except BaseException:
                    self._lost = True
                    raise

    async def _answer(self, call: Call) -> bytes:
        """The answer; where somebody waits and it takes long, only as long as the server is there."""
        if not self.watched:
            return await self._once(call, self._threads)
        answer = asyncio.ensure_future(self._once(call, self._threads))
        try:
            while not (await asyncio.wait([answer], timeout=REACH))[0]:
                await self.reach()
            return answer.result()
        finally:
            answer.cancel()

    async def _once(self, call: Call, threads: ThreadPoolExecutor | None) -> bytes:
        self._calls.add(call)
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, call.run)
        except asyncio.CancelledError:
            call.abort()
            raise
        finally:
            self._calls.discard(call)

    def _unreached(self, url: str, reason: object) -> PolicyError:
        if isinstance(reason, TimeoutError):
            return PolicyError(
                f"{url} did not answer within {self.timeout:g} s.",
                hint="Raise remote.timeout, or lower rollout.concurrency or rollout.max_new_tokens.",
            )
        said = getattr(reason, "strerror", None) or reason
        return PolicyError(
            f"{url} cannot be reached: {said}.", hint=f"Is the server running? Is this its address?{self._start}"
        )


class Call:
    """One attempt of one request, in a thread: `run` there, `abort` from anywhere."""

    def __init__(self, url: str, data: bytes | None, headers: Mapping[str, str], timeout: float) -> None:
        self._request = urllib.request.Request(url, data, dict(headers), method="GET" if data is None else "POST")
        self._timeout = timeout
        self._aborted = False
        self._sockets: list[socket.socket] = []

    def run(self) -> bytes:
        """The answer's body. Raises OSError, HTTPException."""
        if self._aborted:
            raise ConnectionAbortedError("nobody waits any more")
        opener = urllib.request.build_opener(_Plain(self), _Secure(self))
        with opener.open(self._request, timeout=self._timeout) as response:
            body: bytes = response.read()
            return body

    def abort(self) -> None:
        """Close the connection, where there is one: `run` ends at once with an error."""
        self._aborted = True
        for one in self._sockets:
            with suppress(OSError):  # the other side was faster
                one.shutdown(socket.SHUT_RDWR)

    def connected(self, connection: http.client.HTTPConnection) -> None:
        """A connection was made."""
        connection.sock.settimeout(self._timeout)
        self._sockets.append(connection.sock)
        if self._aborted:
            self.abort()


def _connection(call: Call, kind: type[http.client.HTTPConnection]) -> type[http.client.HTTPConnection]:
    """A connection class that tells `call` of its sockets, and gives up early where nothing answers at all."""

    class Connection(kind):  # type: ignore[misc, valid-type]  # plain or secure
        def connect(self) -> None:
            self.timeout = min(CONNECTING, call._timeout)
            super().connect()
            call.connected(self)

    return Connection


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self._kind = _connection(call, http.client.HTTPConnection)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._kind, req)


class _Secure(urllib.request.HTTPSHandler):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self._kind = _connection(call, http.client.HTTPSConnection)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._kind, req)


def _hint(status: int, tries: int) -> str:
    if status in (401, 403):
        return "remote.api_key_env names the environment variable that holds the server's key."
    if status == 404:
        return "remote.model is the name under which the server serves the model; its /v1/models lists them."
    if status >= 500:
        return f"Tried {tries} times (remote.retries is {tries - 1}); the server's own log says more."
    return ""


def _said(text: str) -> str:
    """What a server's error says: its message, where it is JSON with one, else the text as it is."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text
    found = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = found.get("message") if isinstance(found, dict) else found
    return message if isinstance(message, str) and message else text
