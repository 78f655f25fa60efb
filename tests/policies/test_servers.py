"""Several servers behind one policy, and a server that is not there where a person waits for it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.remote.http import Unreachable
from agentrl_cli.policies.remote.policy import HttpPolicy
from agentrl_cli.policies.remote.servers import Servers
from agentrl_cli.policies.remote.wires import VLLM
from agentrl_cli.store import Store
from agentrl_cli.types import Generation, Outcome, Sampling
from tests.envs.test_worlds import guess, play, what_if
from tests.helpers.processes import soon
from tests.helpers.remote import StandIn, server
from tests.helpers.train import trainer_of, write_model
from tests.tui.test_chat import serve


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class Slow(HttpPolicy):
    """Loses its connection once, after a turn that took longer than the patience for a lost server."""

    lost = False

    async def generate(self, *args: Any, **given: Any) -> Generation:
        if not self.lost:
            self.lost = True
            await asyncio.sleep(0.4)
            raise Unreachable("broke off")
        return await super().generate(*args, **given)


async def turn(policy: Servers, key: str) -> list[int]:
    said = await policy.generate(key, [9, 10, 11], Sampling(max_new_tokens=3, seed=5))
    return [int(id_) for id_ in said.ids]


async def test_episodes_stay_move_and_come_back(model: Path) -> None:
    async with AsyncExitStack() as stack:
        stands = [StandIn("vllm", model) for _ in range(2)]
        urls = [await stack.enter_async_context(server(one.handle)) for one in stands]
        policies = [
            HttpPolicy(VLLM, url, "base", api_key="k", retries=0, context_length=256)
            for url in urls
        ]
        policy = Servers(policies, patience=5.0, pause=0.05)
        said = [await turn(policy, key) for key in ("a", "b", "a", "b", "a")]
        stands.sort(key=lambda one: -one.generated)
        assert [one.generated for one in stands] == [3, 2], "an episode stays on its server"
        stands[0].down = True
        said += await asyncio.gather(turn(policy, "a"), turn(policy, "c"))
        assert (
            stands[1].generated == 4
            and policy.describe() == "vllm on 2 servers, 1 of them unreachable"
        )
        moved = policy.take_metrics()  # c may begin on either server
        assert moved["remote/servers"] == 1.0 and moved["remote/moved_turns"] in (1.0, 2.0)
        policy._folder, policy.weights_version = (
            model,
            "run@1",
        )  # published while the first was lost
        stands[0].down = False
        await soon(lambda: len(policy.servers()) == 2)
        assert "/collective_rpc" in stands[0].paths, (
            "it has the present weights before it gets a turn"
        )
        said += [await turn(policy, key) for key in ("a", "d")]
        assert [one.generated for one in stands] == [4, 5], (
            "a stays where it moved to; a new episode evens out"
        )
        slow = Servers(
            [Slow(VLLM, urls[0], "base", api_key="k", retries=0, context_length=256)],
            patience=0.3,
            pause=0.05,
        )
        said.append(await turn(slow, "a"))
        await slow.close()
        assert all(one == said[0] for one in said), "the seed decides, not the server"
        for one in stands:
            one.down = True
        policy.patience = 0.3
        with pytest.raises(PolicyError, match="None of 2 servers can be reached"):
            await turn(policy, "e")
        await policy.close()
        for one in stands:
            await one.close()


async def test_training_on_two_servers_with_one_that_keeps_old_weights(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe after an update is quiet about a server with the new weights, and an alert names one without."""
    monkeypatch.setenv("SERVER_KEY", "k")

    class Keeps(StandIn):
        """Reports success and keeps its weights, from the second load on."""

        async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            if path == "/collective_rpc" and self.paths.count(path) == 1:
                return 200, {"results": [None]}
            return await super().handle(path, body)

    async with AsyncExitStack() as stack:
        stands = [StandIn("vllm", model), Keeps("vllm", model)]
        urls = [await stack.enter_async_context(server(one.handle)) for one in stands]
        found = []
        for name, used in (("good", [urls[0]]), ("bad", urls)):
            remote = {"backend": "vllm", "urls": used, "model": "base", "api_key_env": "SERVER_KEY"}
            async with trainer_of(
                tmp_path / name, model, remote=remote, train={"steps": 2, "lr": 0.3}
            ) as trainer:
                run = await trainer.train()
                gaps = [row["probe/logp_difference"] for row in trainer.store.runs.steps(run.id)]
                alerts = [
                    alert
                    for alert in trainer.store.journal.alerts(run.id)
                    if alert["name"] == "mismatch"
                ]
                found.append((gaps, alerts))
                assert run.status == "finished" and "STABLE" in {
                    p.name for p in tmp_path.glob(f"{name}/**/STABLE")
                }
        for one in stands:
            await one.close()
    (good, quiet), (bad, named) = found
    assert max(good) < 1e-4 and not quiet
    assert max(bad) > 0.02 and named, bad


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
    """Return the events of a chat in which one thing is said."""
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
