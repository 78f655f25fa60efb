"""A server with pages, and one call of a tool."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agentrl_cli.tools import Tool, ToolContext
from agentrl_cli.types import Task, ToolResult


async def calls(tool: Tool, *arguments: dict[str, Any], **row: Any) -> list[ToolResult]:
    """One episode's calls."""
    context = ToolContext(task=Task("p/1", "p", "", "train", (), row))
    state = await tool.create(context)
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

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.seen.append((self.command, self.path, b""))
                self.answer()

            def do_POST(self) -> None:
                site.seen.append(
                    ("POST", self.path, self.rfile.read(int(self.headers["Content-Length"])))
                )
                self.answer()

            def answer(self) -> None:
                status, headers, body = site.pages.get(self.path, (404, {}, b"missing"))
                self.send_response(status)
                for key, value in {"Content-Type": "text/html; charset=utf-8", **headers}.items():
                    self.send_header(key, value)
                self.send_header(
                    "Content-Length", str(1 << 20 if self.path == "/endless" else len(body))
                )
                self.end_headers()
                try:
                    self.wfile.write(body)
                    while self.path == "/endless":
                        time.sleep(0.02)
                        self.wfile.write(b"x")
                except OSError:
                    self.close_connection = True  # the client had enough

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"


@contextmanager
def serve_pages() -> Iterator[Site]:
    made = Site()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()
