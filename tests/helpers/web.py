"""Small HTTP servers for tests, of JSON and of pages; one call of a tool; a headless browser."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.tools import Tool, ToolContext
from agentrl_cli.types import Task, ToolResult

# Of a path and the JSON value that was sent (None for GET): a value for JSON, or a status with a
# value.
Answer = Callable[[str, Any], Any]


class _Handler(BaseHTTPRequestHandler):
    """Reads a request, which `reply` answers, and writes nothing to stderr."""

    def do_GET(self) -> None:
        self.reply(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    do_POST = do_GET

    def reply(self, body: bytes) -> None:
        raise NotImplementedError

    def begin(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Nothing: stderr belongs to the tests."""


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """The address of a server on this machine that answers JSON, without a slash at its end."""

    class Handler(_Handler):
        def reply(self, body: bytes) -> None:
            found = answer(self.path, json.loads(body) if self.command == "POST" else None)
            status, value = found if isinstance(found, tuple) else (200, found)
            data = json.dumps(value).encode()
            self.begin(status, len(data), {})
            with suppress(BrokenPipeError):  # a client that waits no longer
                self.wfile.write(data)

    with _running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


@contextmanager
def _running(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text: str, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": "stop", "index": 0}], **more}


async def calls(tool: Tool, *arguments: dict[str, Any], **row: Any) -> list[ToolResult]:
    state = await tool.create(ToolContext(task=Task("p/1", "p", "", "train", (), row)))
    try:
        return [await tool.call(state, one) for one in arguments]
    finally:
        await tool.release(state)


class Site:
    """Pages by path: (status, headers, body), or a function that writes by itself."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.seen: list[tuple[str, str, bytes]] = []
        site = self

        class Handler(_Handler):
            def reply(self, body: bytes) -> None:
                site.seen.append((self.command, self.path, body))
                status, headers, page = site.pages.get(self.path, (404, {}, b"missing"))
                length = 1 << 20 if self.path in ("/endless", "/cut") else len(page)
                self.begin(status, length, {"Content-Type": "text/html; charset=utf-8", **headers})
                try:
                    self.wfile.write(page)
                    while self.path == "/endless":
                        time.sleep(0.02)
                        self.wfile.write(b"x")
                except OSError:
                    self.close_connection = True  # the client had enough

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"


@contextmanager
def serve_pages() -> Iterator[Site]:
    made = Site()
    with _running(made.server):
        yield made


BROWSERS = (
    "chromium",
    "chromium-headless-shell",
    "chromium-browser",
    "google-chrome",
    "chrome-headless-shell",
)


def browser(folder: Path) -> list[str]:
    """The command that starts one without a window, its profile in `folder`; skips the test if none is installed."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return [found, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
