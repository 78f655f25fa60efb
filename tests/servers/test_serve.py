"""Screens in a browser: no access without the token, nor by another name."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agentrl_cli.agents.gateway.guard import allowed, is_loopback
from agentrl_cli.errors import UsageError
from agentrl_cli.servers import screens
from agentrl_cli.servers.screens import make_server
from agentrl_cli.store import RunRow, Store
from tests.helpers.browser import tab
from tests.helpers.processes import soon

aiohttp = pytest.importorskip("aiohttp")
unused_port = pytest.importorskip("aiohttp.test_utils").unused_port
pytest.importorskip("textual_serve")


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("x", False),
    ],
)
def test_loopback(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside
    if not inside:
        with pytest.raises(UsageError, match="other machines"):
            make_server("true", host, 7575, "secret")


def test_tokens_are_compared_whole() -> None:
    assert allowed("abc", "abc") and not allowed("abc", "ab") and not allowed("abc", "")


async def test_only_the_token_opens(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as store:
        store.runs.add(RunRow("r", "served", status="finished"))
    port = unused_port()
    code = f"from pathlib import Path; from agentrl_cli.tui.app import start; start(Path({str(tmp_path / 'a.db')!r}))"
    server = make_server(f'{sys.executable} -c "{code}"', "127.0.0.1", port, "secret")
    runner = aiohttp.web.AppRunner(await server._make_app())
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()
    base = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            for path in ("/", "/ws", "/static/js/textual.js", "/?token=wrong", "/download/x"):
                assert (await session.get(base + path)).status == 403, path
            assert (
                await session.get(f"{base}/?token=secret", headers={"Host": "evil.example"})
            ).status == 403
            assert (
                await session.get(
                    f"{base}/?token=secret", headers={"Origin": "http://evil.example"}
                )
            ).status == 403
            page = await session.get(f"{base}/?token=secret")
            assert page.status == 200 and "token" not in str(page.url)
            text = await page.text()
            assert (
                "https://" not in text and "textual.js" in text
            )  # nothing is asked of other machines
            async with session.ws_connect(f"{base}/ws?width=100&height=30") as socket:
                text = b""
                while b"served" not in text:
                    message = await socket.receive()
                    assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), (
                        message
                    )
                    text += (
                        message.data if isinstance(message.data, bytes) else message.data.encode()
                    )
            assert await soon(lambda: server.running == 0), (
                "the screen's process ends with its browser"
            )
    finally:
        await runner.cleanup()


async def test_the_screens_work_in_a_browser(tmp_path: Path) -> None:
    """A page that loads, keys that reach the screen, and a picture that is not empty."""
    pillow = pytest.importorskip("PIL.Image")
    with Store.open(tmp_path / "a.db") as store:
        store.runs.add(RunRow("r", "served", status="finished"))
    async with tab(tmp_path / "profile") as page:
        command = [sys.executable, "-m", "agentrl_cli", "screens", "--db", str(tmp_path / "a.db")]
        process = await asyncio.create_subprocess_exec(
            *command,
            "--port",
            str(unused_port()),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert process.stdout is not None
            await page.call("Page.navigate", url=(await process.stdout.readline()).decode().strip())
            await page.until(lambda: b"served" in page.received, "the list of runs never came")
            empty = await page.screenshot()
            page.received = b""
            await page.key("?")
            await page.until(lambda: b"asks first" in page.received, "no help after the key ?")
            pictures = (empty, await page.screenshot())
        finally:
            process.send_signal(signal.SIGINT)
            await process.wait()
    (tmp_path / "screen.png").write_bytes(pictures[1])
    assert any("?" in text for text in page.sent) and pictures[0] != pictures[1] and not page.errors
    with pillow.open(tmp_path / "screen.png") as image:
        assert image.size[0] >= 1000 and len(image.convert("RGB").getcolors(1 << 24)) > 50


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_command_serves_without_telling_the_token_twice(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as store:
        store.runs.add(RunRow("r", "served", status="finished"))
    command = [sys.executable, "-m", "agentrl_cli", "screens", "--db", str(tmp_path / "a.db")]
    process = subprocess.Popen(
        [*command, "--port", str(unused_port())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert _listens(urlsplit(address).port or 0), "an address that is reported can be opened"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(address.partition("?")[0])
    cookies = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with cookies.open(address) as page:
        assert page.status == 200
    second = subprocess.run(
        [*command, "--port", str(urlsplit(address).port)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 2 and "in use" in second.stderr and "Traceback" not in second.stderr
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 0 and out == "" and address.partition("=")[2] not in err


def test_the_old_form_says_what_to_type() -> None:
    command = [sys.executable, "-m", "agentrl_cli", "serve", "--screens", "my-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "agentrl screens my-run" in done.stderr


async def test_a_screen_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from textual_serve.app_service import AppService
    from textual_serve.download_manager import DownloadManager

    async def nowhere(_: object = None) -> None:
        return None

    monkeypatch.setattr(
        screens, "PATIENCE", 0.2
    )  # a constant that no user sets; the test would take its time
    # Deaf to `quit`, and its stdout is never closed: textual-serve alone would wait for ever.
    screen = AppService(
        f"exec {sys.executable} -c 'import time; time.sleep(600)'",
        write_bytes=nowhere,
        write_str=nowhere,
        close=nowhere,
        download_manager=DownloadManager(),
    )
    await screen.start(80, 24)
    await screens.end(screen)
    assert screen._process is not None and screen._process.returncode == -9
    await screens.end(AppService("true", write_bytes=nowhere, write_str=nowhere, close=nowhere,
                                 download_manager=DownloadManager()))  # fmt: skip
