"""A server that is not there, or falls silent, where a person waits for it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl_cli.store import Store
from agentrl_cli.types import Outcome
from tests.envs.test_worlds import guess, play, what_if
from tests.tui.test_chat import serve


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def falling_silent(answers: int) -> AsyncIterator[str]:
    """A server that answers so many requests with an empty list of models, and then accepts and says nothing."""
    left = answers
    over = asyncio.Event()
    heard: list[asyncio.Task[None]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        heard.append(asyncio.current_task())  # type: ignore[arg-type]  # it runs in one
        await reader.readuntil(b"\r\n\r\n")
        if left:
            left -= 1
            writer.write(
                b'HTTP/1.1 200 X\r\nContent-Length: 11\r\nConnection: close\r\n\r\n{"data":[]}'
            )
            await writer.drain()
        else:
            await over.wait()
        writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    finally:
        over.set()
        await asyncio.gather(*heard)
        listening.close()
        await listening.wait_closed()


def remote(url: str) -> list[str]:
    said = ("remote.backend=openai", f"remote.url={url}", "remote.model=m")
    return [word for text in said for word in ("--set", text)]


async def chat(url: str, db: Path) -> list[dict[str, Any]]:
    _, events = await serve(
        [{"op": "user", "text": "hi"}], "--pack", "calc-task", "--db", str(db), *remote(url)
    )
    return events


async def test_no_process_listens(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{closed_port()}/v1"
    (event,) = await chat(url, tmp_path / "c.db")
    assert (
        event["ev"] == "fatal"
        and event["message"] == f"{url} cannot be reached: Connection refused."
    )
    assert "remote.url" in event["hint"] and "--model tiny" in event["hint"]


async def test_it_accepts_and_never_answers(tmp_path: Path) -> None:
    async with falling_silent(0) as url:
        (event,) = await chat(url, tmp_path / "c.db")
    assert (
        event["ev"] == "fatal"
        and event["message"] == f"{url} cannot be reached: no answer for 4 s."
    )
    assert "loading its model" in event["hint"]


async def test_it_falls_silent_while_the_model_is_to_answer(tmp_path: Path) -> None:
    async with falling_silent(1) as url:
        events = await chat(url, tmp_path / "c.db")
    (event,) = [event for event in events if event["ev"] == "error"]
    assert "no answer for 4 s" in event["message"] and events[-1]["ev"] == "idle"


async def test_a_what_if_with_a_server_that_is_not_there(tmp_path: Path) -> None:
    db, (pack, task) = tmp_path / "a.db", guess()
    episode = await play(db, pack, task, ["10", "12"], {})
    config = {"remote": {"backend": "openai", "url": f"http://127.0.0.1:{closed_port()}/v1"}}
    (tmp_path / "agentrl.yaml").write_text(json.dumps(config))
    code, events = await what_if(db, episode, "--turn", "2", "--project", str(tmp_path))
    assert code and events[-1]["ev"] == "fatal" and "Connection refused" in events[-1]["message"]
    with Store.open(db, readonly=True) as store:
        assert (
            len(store.episodes.ids()) == 1 and store.episodes.get(episode).outcome is Outcome.SOLVED
        )
