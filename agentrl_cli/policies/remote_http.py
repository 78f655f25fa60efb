"""JSON over HTTP to a server that samples: retries, a key, and what to do when the server was restarted meanwhile.

Requests run in threads of their own (urllib), so that no HTTP library is needed.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrl_cli.errors import PolicyError

RETRY_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
MAX_BODY = 500
"""Characters of a server's error that a message repeats."""
LONGEST_PAUSE = 10.0
"""Seconds between two attempts, at most."""


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
    ) -> None:
        """`url` ends before the paths of requests (`http://host:8000/v1`). `timeout` in seconds, of one attempt.

        Failing requests are tried `retries` times more; a server that cannot be reached for `patience` seconds.
        """
        if not url.startswith(("http://", "https://")):
            raise PolicyError(f"{url!r} is no HTTP address.", hint="Write it as http://127.0.0.1:8000/v1.")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.retries = retries
        self.patience = patience
        self.mend: Callable[[], Awaitable[None]] | None = None
        self._lost = False
        self._mending = asyncio.Lock()
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="agentrl-remote")

    @property
    def root(self) -> str:
        """The address without the version of the API: where a server's own paths are."""
        return self.url.removesuffix("/v1")

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON answer. Busy and failing servers are tried again; raises PolicyError with what the server said."""
        url = f"{self.url}{path}"
        return _decoded(url, await self._request(url, json.dumps(body).encode()))

    async def get(self, path: str) -> dict[str, Any]:
        """Like `post`, without a body."""
        url = f"{self.url}{path}"
        return _decoded(url, await self._request(url, None))

    async def command(self, url: str, body: Mapping[str, Any]) -> str:
        """Post to a whole address; the answer as text, which some servers give to commands. `mend` may use it."""
        return (await self._request(url, json.dumps(body).encode(), mending=True)).decode(errors="replace")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _request(self, url: str, data: bytes | None, *, mending: bool = False) -> bytes:
        loop, started, attempt = asyncio.get_running_loop(), time.monotonic(), 0
        while True:
            try:
                if not mending:
                    await self._mended()
                return await loop.run_in_executor(self._threads, self._once, url, data)
            except urllib.error.HTTPError as error:
                with error:
                    said = error.read(MAX_BODY).decode(errors="replace")
                if error.code not in RETRY_STATUS or attempt >= self.retries:
                    raise ServerError(f"{url} answered {error.code}: {said}", error.code, hint=_hint(error)) from error
            except (OSError, http.client.HTTPException) as error:  # URLError is one, and a broken connection
                reason = getattr(error, "reason", error)
                self._lost |= not isinstance(reason, TimeoutError)
                if attempt >= self.retries and time.monotonic() - started >= self.patience:
                    raise PolicyError(f"{url} cannot be reached: {reason}.", hint="Is the server running?") from error
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

    def _once(self, url: str, data: bytes | None) -> bytes:
        request = urllib.request.Request(url, data, self._headers, method="GET" if data is None else "POST")
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            body: bytes = response.read()
            return body


def _hint(error: urllib.error.HTTPError) -> str:
    if error.code in (401, 403):
        return "remote.api_key_env names the environment variable that holds the server's key."
    return ""


def _decoded(url: str, text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise PolicyError(f"{url} answered no JSON: {text[:80]!r}.") from error
    if not isinstance(answer, dict):
        raise PolicyError(f"{url} answered {type(answer).__name__}, not an object.")
    return answer
