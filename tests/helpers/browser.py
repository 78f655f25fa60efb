"""A headless Chromium, driven over its DevTools protocol; tests skip without one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

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


class Page:
    """One tab: commands, keys, the bytes of its websockets, errors of its scripts."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._count, self._answers = socket, 0, dict[int, asyncio.Future[Any]]()
        self.received, self.sent = b"", list[str]()
        self.errors = list[str]()

    async def listen(self) -> None:
        """Sorts what the browser reports until it closes."""
        async for message in self._socket:
            event = json.loads(message.data)
            frame = event.get("params", {}).get("response", {})
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event.get("result", event))
            elif event["method"] == "Network.webSocketFrameReceived":
                data = frame["payloadData"]
                self.received += base64.b64decode(data) if frame["opcode"] == 2 else data.encode()
            elif event["method"] == "Network.webSocketFrameSent":
                self.sent.append(frame["payloadData"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(event["params"])[:400])

    async def call(self, method: str, **params: Any) -> Any:
        """One command and its result."""
        self._count += 1
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._count, "method": method, "params": params})
        return await answer

    async def key(self, text: str) -> None:
        """Presses and releases a key that types `text`."""
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, key=text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=text)

    async def screenshot(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fail with `what` as soon as a script of the page has failed."""
        while not condition():
            assert not self.errors, f"{what}; errors of the page: {self.errors}"
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def tab(folder: Path, size: str = "1200,800") -> AsyncIterator[Page]:
    """A tab of a browser of its own, which ends with it."""
    import aiohttp

    command = [
        *browser(folder),
        "--remote-debugging-port=0",
        f"--window-size={size}",
        "about:blank",
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        where = folder / "DevToolsActivePort"
        while not where.is_file() or "\n" not in where.read_text():
            assert process.returncode is None, "the browser has ended"
            await asyncio.sleep(0.05)
        port = where.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            tabs = await (await session.get(f"http://127.0.0.1:{port}/json/list")).json()
            async with session.ws_connect(
                tabs[0]["webSocketDebuggerUrl"], max_msg_size=0
            ) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                for domain in ("Page", "Network", "Runtime"):
                    await page.call(f"{domain}.enable")
                yield page
                listening.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                process.pid, signal.SIGKILL
            )  # Debian's command is a script around the browser
        await process.wait()
