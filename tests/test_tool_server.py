"""The tool server: calls that run exactly once, state that survives a restart, and verl-tool's wire format."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat.parsers import load_parser
from agentrl_cli.errors import ConfigError, EnvError, NotFound, UsageError
from agentrl_cli.rollout import Job
from agentrl_cli.server.journal import Journal
from agentrl_cli.server.tools import Busy, ToolServer
from agentrl_cli.server.trajectories import Call, Trajectories
from agentrl_cli.tools import Tool, ToolContext, as_tool, tool
from agentrl_cli.tools.remote import connect, remote_tools
from agentrl_cli.types import Outcome
from tests.test_rollout import call, pack_of, rollout_of

aiohttp = pytest.importorskip("aiohttp")


class Tally:
    """A tool with state per trajectory, and a count of how often it really ran."""

    def __init__(self, **marks: Any) -> None:
        self.ran = 0
        self.hold = asyncio.Event()
        self.hold.set()

        async def bump(by: int, ctx: ToolContext) -> str:
            """Add to the trajectory's total.

            Args:
                by: How much.
            """
            await self.hold.wait()
            self.ran += 1
            ctx.state["total"] = ctx.state.get("total", 0) + by
            return str(ctx.state["total"])

        self.tool = tool(**marks)(bump)


@asynccontextmanager
async def world(path: Path, tools: Sequence[Tool]) -> AsyncIterator[Trajectories]:
    """One life of a server; leaving it is what a restart does."""
    journal = Journal(path)
    trajectories = Trajectories(tools, journal)
    try:
        yield trajectories
    finally:
        await trajectories.shutdown(0.1)
        journal.close()


def bump(key: str, by: int = 1, trajectory: str = "t") -> Call:
    return Call(trajectory, key, "bump", {"by": by})


async def test_a_key_runs_once_however_often_it_is_sent(tmp_path: Path) -> None:
    tally = Tally()
    async with world(tmp_path / "j.db", [tally.tool]) as trajectories:
        await trajectories.open("t", {})
        await trajectories.open("t", {})
        tally.hold.clear()
        racing = [asyncio.create_task(trajectories.call(bump("a", 5))) for _ in range(3)]
        await asyncio.sleep(0.01)
        tally.hold.set()
        answers = [await task for task in racing] + [await trajectories.call(bump("a", 5))]
        assert [answer["result"]["text"] for answer in answers] == ["5"] * 4 and tally.ran == 1
        assert (await trajectories.call(bump("b", 2)))["state"] == {"total": 7}
        with pytest.raises(UsageError, match="another call"):
            await trajectories.call(bump("a", 6))
        with pytest.raises(UsageError, match="another task"):
            await trajectories.open("t", {"seed": 3})
        assert trajectories.counts == {("bump", "ok"): 2}
        assert await trajectories.close("t") and not await trajectories.close("t")
        with pytest.raises(UsageError, match="closed"):
            await trajectories.call(bump("c"))
        with pytest.raises(NotFound):
            await trajectories.call(bump("c", trajectory="never"))


async def test_a_restart_rebuilds_the_state_and_runs_nothing_twice(tmp_path: Path) -> None:
    async with world(tmp_path / "j.db", [Tally().tool]) as first:
        await first.open("t", {})
        await first.call(bump("a", 5))
        await first.call(bump("b", 2))
    again = Tally()
    async with world(tmp_path / "j.db", [again.tool]) as second:
        # The answer to a retry comes from the journal, before anything is rebuilt.
        assert (await second.call(bump("b", 2)))["result"]["text"] == "7" and again.ran == 0
        assert (await second.call(bump("c", 1)))["result"]["text"] == "8" and again.ran == 3


async def test_what_was_in_flight_runs_again_unless_it_is_external(tmp_path: Path) -> None:
    for external in (False, True):
        journal = Journal(tmp_path / f"{external}.db")
        journal.open("t", {"tools": ["bump"]})
        journal.begin("t", "a", "bump", {"by": 1})  # and then the machine went dark
        journal.close()
        tally = Tally(external=external)
        async with world(tmp_path / f"{external}.db", [tally.tool]) as trajectories:
            if external:
                with pytest.raises(EnvError, match="in flight"):
                    await trajectories.call(bump("a"))
            else:
                assert (await trajectories.call(bump("a")))["result"]["text"] == "1"
        assert tally.ran == (0 if external else 1)


async def test_finished_external_calls_keep_their_answer_and_their_state(tmp_path: Path) -> None:
    async with world(tmp_path / "j.db", [Tally(external=True).tool]) as first:
        await first.open("t", {})
        await first.call(bump("a", 5))
    again = Tally(external=True)
    async with world(tmp_path / "j.db", [again.tool]) as second:
        assert (await second.call(bump("b", 2)))["result"]["text"] == "7" and again.ran == 1


async def test_a_state_that_comes_out_otherwise_is_told(tmp_path: Path) -> None:
    def dice(ctx: ToolContext) -> str:
        """Roll."""
        return os.urandom(8).hex()

    async with world(tmp_path / "j.db", [as_tool(dice)]) as first:
        await first.open("t", {})
        await first.call(Call("t", "a", "dice", {}))
    async with world(tmp_path / "j.db", [as_tool(dice)]) as second:
        with pytest.raises(EnvError, match=r"diverged at call 0 \(dice\)"):
            await second.call(Call("t", "b", "dice", {}))


async def test_only_pure_tools_are_cached(tmp_path: Path) -> None:
    ran: list[int] = []

    def square(x: int) -> str:
        """Square.

        Args:
            x: A number.
        """
        ran.append(x)
        return str(x * x)

    for pure in (False, True):
        ran.clear()
        async with world(tmp_path / f"{pure}.db", [tool(pure=pure)(square)]) as trajectories:
            for name in ("t", "u"):
                await trajectories.open(name, {})
                assert (await trajectories.call(Call(name, "a", "square", {"x": 3})))["result"]["text"] == "9"
        assert ran == ([3] if pure else [3, 3])


async def test_a_tool_that_cannot_be_made_spoils_its_own_calls_only(tmp_path: Path) -> None:
    """A trajectory is opened with all tools; `search` has no corpus here, and no other tool minds."""
    async with world(tmp_path / "j.db", [as_tool("search"), as_tool("calculator"), Tally().tool]) as trajectories:
        assert await trajectories.open("t", {}) == ["search", "calculator", "bump"]
        answer = await trajectories.call(Call("t", "a", "calculator", {"expression": "6*7"}))
        assert answer["result"]["text"] == "42"
        with pytest.raises(EnvError, match="neither a corpus nor a url"):
            await trajectories.call(Call("t", "b", "search", {"query": "x"}))
        assert (await trajectories.call(bump("c", 2)))["result"]["text"] == "2"
        assert await trajectories.rewards("t") == {} and await trajectories.close("t")


async def test_two_servers_do_not_share_a_journal(tmp_path: Path) -> None:
    async with world(tmp_path / "j.db", []):
        with pytest.raises(UsageError, match="Another tool server"):
            Journal(tmp_path / "j.db")
    Journal(tmp_path / "j.db").close()


async def test_idle_trajectories_give_back_what_they_hold(tmp_path: Path) -> None:
    tally = Tally()
    async with world(tmp_path / "j.db", [tally.tool]) as trajectories:
        await trajectories.open("t", {})
        await trajectories.call(bump("a", 5))
        assert await trajectories.sweep(60) == 0 and len(trajectories) == 1
        assert await trajectories.sweep(0) == 1 and len(trajectories) == 0
        assert (await trajectories.call(bump("b")))["result"]["text"] == "6"


# -- HTTP -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def served(path: Path, tools: Sequence[Tool], **options: Any) -> AsyncIterator[tuple[ToolServer, str]]:
    from agentrl_cli.commands.tools_serve import listening

    async with world(path / "j.db", tools) as trajectories:
        server = ToolServer(trajectories, load_parser("hermes"), **{"token": "secret", **options})
        async with listening(server, "127.0.0.1", 0, None) as address:
            yield server, address


async def test_tools_at_a_server_behave_like_tools_here(tmp_path: Path) -> None:
    tally = Tally()
    async with served(tmp_path, [tally.tool]) as (server, address), connect(address, token="secret") as remote:
        offered = await remote.schemas()
        (there,) = remote_tools(remote, offered, [tally.tool])
        ctx = ToolContext()
        state = await there.create(ctx)
        assert (await there.call(state, {"by": 2})).text == "2" and (await there.call(state, {"by": 3})).text == "5"
        assert (await there.call(state, {"by": "x"})).error == "bad_arguments" and tally.ran == 2
        assert ctx.state["total"] == 5 and len(server.trajectories) == 1
        assert await there.reward(state) is None
        await there.release(state)
        assert len(server.trajectories) == 0
        with pytest.raises(ConfigError, match="does not offer"):
            remote_tools(remote, [], [tally.tool])
        changed = {**offered[0], "function": {**offered[0]["function"], "description": "Else."}}
        with pytest.raises(ConfigError, match="another schema"):
            remote_tools(remote, [changed], [tally.tool])


async def test_the_token_and_bad_requests(tmp_path: Path) -> None:
    async with served(tmp_path, [Tally().tool]) as (_, address), aiohttp.ClientSession() as session:
        for path in ("/v1/call", "/get_observation", "/v1/open"):
            assert (await session.post(address + path, json={})).status == 401
        assert (await session.get(f"{address}/metrics")).status == 401
        assert (await session.get(f"{address}/health")).status == 200
        with pytest.raises(ConfigError, match="401"):
            async with connect(address, token="wrong") as remote:
                await remote.schemas()
        head = {"Authorization": "Bearer secret"}
        bad: list[Any] = [b"{", b"[]", b"{}", b'{"calls": [1]}', b'{"calls": [{"trajectory": "t", "arguments": {}}]}']
        for body in bad:
            answer = await session.post(f"{address}/v1/call", data=body, headers=head)
            assert answer.status == 400 and (await answer.json())["error"]["message"], body
        answer = await session.post(f"{address}/v1/open", json={"tools": ["bmup"]}, headers=head)
        assert answer.status == 404 and "bump" in (await answer.json())["error"]["hint"]


async def test_too_many_calls_are_sent_away_and_come_back(tmp_path: Path) -> None:
    tally = Tally()
    async with served(tmp_path, [tally.tool], limit=2) as (server, address), connect(address, token="secret") as remote:
        await remote.post("/v1/open", {"trajectory": "t"})
        tally.hold.clear()
        calls = [{"trajectory": "t", "key": str(n), "name": "bump", "arguments": {"by": 1}} for n in range(5)]
        waiting = [asyncio.create_task(remote.post("/v1/call", {"calls": [one]})) for one in calls]
        while not server.refused:
            await asyncio.sleep(0.01)
        assert server.active == 2
        with pytest.raises(Busy):
            await server.call({"calls": calls[:1]})
        with pytest.raises(UsageError, match="at most 2"):
            await server.call({"calls": calls})
        tally.hold.set()
        texts = [(await task)["results"][0]["result"]["text"] for task in waiting]
        assert sorted(texts) == ["1", "2", "3", "4", "5"] and tally.ran == 5
        assert 'agentrl_tool_calls_total{tool="bump",status="ok"} 5' in server.metrics()


async def test_verl_tools_wire_format(tmp_path: Path) -> None:
    tally = Tally()
    async with served(tmp_path, [tally.tool], token="") as (_, address), aiohttp.ClientSession() as session:

        async def observe(**body: Any) -> dict[str, Any]:
            answer: dict[str, Any] = await (await session.post(f"{address}/get_observation", json=body)).json()
            return answer

        action = f"I add.\n{call('bump', by=4)}"
        said = await observe(trajectory_ids=["x", "y"], actions=[action, "no call"], extra_fields=[{}, {}])
        assert said["observations"] == ["4", {"obs": "", "invalid_reason": "no valid tool found for action"}]
        assert said["valids"] == [True, False] and said["dones"] == [False, False] and said["processing_time_ms"] > 0
        said = await observe(trajectory_ids=["x"], actions=[call("bump", by="four")])
        assert not said["valids"][0] and "by" in said["observations"][0]["invalid_reason"]
        said = await observe(trajectory_ids=["x"], actions=[r"so \boxed{4}"], finish=[True])
        assert (said["observations"], said["dones"], said["valids"]) == (["4"], [True], [True])
        health = await (await session.get(f"{address}/health")).json()
        assert health["status"] == "healthy" and health["tools"] == ["bump"] and health["concurrent_requests"] == 0
        assert (await session.post(f"{address}/get_observation", json={"trajectory_ids": ["x"]})).status == 400


async def test_a_rollout_on_a_server_that_is_killed_loses_no_episode(tmp_path: Path) -> None:
    """State in the sandbox, three calls an episode, `kill -9` in the middle: the server comes back and all end well."""
    socket = tmp_path / "tools.sock"
    command = [sys.executable, "-m", "agentrl_cli", "tools", "serve", "--socket", str(socket), "--token", "secret"]
    command += ["--journal", str(tmp_path / "j.db"), "--project", str(tmp_path)]
    (tmp_path / "agentrl.yaml").write_text("task: {packs: [code-task]}\nsandbox: {min_level: landlock}\n")
    turns = [call("run_python", code=code) for code in ("n = 20", "n += 1; print(n)", "print(n * 2)")]
    slow = call("run_python", code="import time; time.sleep(1.5); n += 0")
    pack = pack_of(tools=["run_python"], answer="42")

    async def start() -> asyncio.subprocess.Process:
        socket.unlink(missing_ok=True)
        server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert server.stdout is not None and b"unix:" in await server.stdout.readline()
        return server

    server = await start()
    try:
        async with connect(f"unix:{socket}", token="secret", patience=60) as remote:
            pack = replace(pack, tools=remote_tools(remote, await remote.schemas(), pack.tools))
            rollout = rollout_of(pack, [*turns[:1], slow, *turns[1:], "42"])
            jobs = [Job(pack.tasks("train")[0], sample=n, seed=n) for n in range(4)]
            running = asyncio.create_task(rollout.run(jobs))
            with contextlib.closing(sqlite3.connect(tmp_path / "j.db")) as journal:
                counts = "SELECT count(result), count(*) - count(result) FROM calls"
                while not all(journal.execute(counts).fetchone()):  # some calls are done, some are running
                    await asyncio.sleep(0.02)
            server.send_signal(signal.SIGKILL)
            await server.wait()
            server = await start()
            episodes = await running
        assert [episode.outcome for episode in episodes] == [Outcome.SOLVED] * 4
        assert [result.text.strip() for result in episodes[0].turns[-2].results] == ["42"]
        assert episodes[0].turns[-2].results[0].level in ("ns", "landlock")
    finally:
        server.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(server.wait(), 20) == 0


def test_the_command_refuses_an_open_door(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl_cli", "tools", "serve", "--no-auth", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2 and "Without a token" in done.stderr
