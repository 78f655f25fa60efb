"""Screens in a browser: no access without the token, nor by another name."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.agents.gateway.http import is_loopback
from agentrl_cli.errors import UsageError
from agentrl_cli.plugins.browser.server import make_server
from agentrl_cli.store import RunRow, Store
from tests.helpers.processes import descendants, free_port, soon

aiohttp = pytest.importorskip("aiohttp")
URL = pytest.importorskip("yarl").URL
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


async def test_only_the_token_opens_and_the_screen_answers_keys(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as store:
        store.runs.add(RunRow("r", "served", status="finished"))
    port = free_port()
    words = f"screens --db a.db --port {port} --token secret&+%".split()
    command = [sys.executable, "-m", "agentrl_cli", *words]
    piped: dict[str, Any] = {"stdout": PIPE, "stderr": PIPE, "cwd": tmp_path}
    process = await asyncio.create_subprocess_exec(*command, **piped)
    assert process.stdout is not None
    base = f"http://127.0.0.1:{port}"
    try:
        address = (await process.stdout.readline()).decode().strip()
        assert address == f"{base}/?token=secret%26%2B%25"
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:

            async def status(path: str, **headers: str) -> int:
                async with session.get(base + path, headers=headers) as answer:
                    return int(answer.status)

            for path in ("/", "/ws", "/static/js/textual.js", "/download/x"):
                assert await status(path) == 403, path
            for token in ("wrong", "secre", "secret2", ""):
                assert await status(f"/?token={token}") == 403, token
            assert await status("/?token=secret", Host="evil.example") == 403
            assert await status("/?token=secret", Origin="http://evil.example") == 403
            page = await session.get(URL(address, encoded=True))
            assert page.status == 200 and "token" not in str(page.url)
            cookies = [cookie.key for cookie in session.cookie_jar]
            assert cookies == [f"agentrl-{port}"]  # a server at another port sets its own
            text = await page.text()
            # Nothing is asked of other machines, and keys go to the screen without a click.
            assert "https://" not in text and "textual.js" in text and "keys.focus()" in text
            async with session.ws_connect(f"{base}/ws?width=100&height=30") as socket:

                async def until(part: bytes) -> None:
                    seen = b""
                    while part not in seen:
                        data = (await socket.receive()).data
                        seen += data if isinstance(data, bytes) else data.encode()

                await until(b"served")
                await socket.send_json(["stdin", "?"])
                await until(b"asks first")
                assert descendants(process.pid)
            assert await soon(lambda: not descendants(process.pid)), (
                "a screen ends with its browser"
            )
        second = await asyncio.create_subprocess_exec(*command, **piped)
        _, err = await second.communicate()
        assert second.returncode == 2 and b"in use" in err and b"Traceback" not in err
        assert (
            b"below 1024" in err and b"--port %d" % (port + 1) not in err
        )  # as closed as this one
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        assert process.returncode == 0 and out == b"" and b"secret" not in err
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
