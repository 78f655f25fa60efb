"""A small HTTP server for tests: one function answers every request with JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, Any], Any]
"""Of a path and the JSON value that was sent (None for GET): a value for JSON, or a status with a value."""


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """The address of a server on this machine, without a slash at its end."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(answer(self.path, None))

        def do_POST(self) -> None:
            self._answer(
                answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            )

        def _answer(self, found: Any) -> None:
            status, value = found if isinstance(found, tuple) else (200, found)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(BrokenPipeError):  # a client that waits no longer
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Nothing: stderr belongs to the tests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text: str, **more: Any) -> dict[str, Any]:
    """A chat completion that says `text`."""
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": "stop", "index": 0}], **more}
