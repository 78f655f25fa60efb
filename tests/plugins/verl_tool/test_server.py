"""The tool server: calls that run exactly once, state that survives a restart, and verl-tool's wire format."""

import asyncio
import copy
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat.parsers import load_parser
from agentrl_cli.errors import ConfigError, EnvError, NotFound, UsageError
from agentrl_cli.plugins.verl_tool.app import Busy, ToolServer, _read_boxed
from agentrl_cli.plugins.verl_tool.bodies import CallsBody
from agentrl_cli.plugins.verl_tool.client import connect, remote_tools
from agentrl_cli.plugins.verl_tool.command import listening
from agentrl_cli.plugins.verl_tool.journal import Journal
from agentrl_cli.plugins.verl_tool.trajectories import Call, Trajectories
from agentrl_cli.registry.adapters import adapt
from agentrl_cli.rollout import Job
from agentrl_cli.tools import Tool, ToolContext, as_tool, tool
from agentrl_cli.tools.search import SearchTool
from agentrl_cli.types import Outcome, Task, ToolResult
from tests.helpers.chat import call, schema
from tests.helpers.cli import Cli
from tests.helpers.growth import exponent
from tests.helpers.processes import alive, descendants, run_code
from tests.helpers.remote import server
from tests.helpers.train import Started, start
from tests.helpers.web import calls
from tests.rollout.test_rollout import pack_of, rollout_of

aiohttp = pytest.importorskip("aiohttp")


class Tally:
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
async def world(path: Path, tools: Sequence[Tool], **given: Any) -> AsyncIterator[Trajectories]:
    """One life of a server; leaving it is what a restart does."""
    with closing(Journal(path)) as journal:
        trajectories = Trajectories(tools, journal, **given)
        try:
            yield trajectories
        finally:
            await trajectories.shutdown(0.1)


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
        assert await trajectories.close("t") and not await trajectories.close("t")
        with pytest.raises(UsageError, match="closed"):
            await trajectories.call(bump("c"))
        with pytest.raises(NotFound):
            await trajectories.call(bump("c", trajectory="never"))
        await trajectories.open("u", {})
        waiting = asyncio.create_task(trajectories.call(bump("a", trajectory="u")))
        await asyncio.sleep(0)
        assert await trajectories.close("u")
        with pytest.raises(UsageError, match="closed"):
            await waiting


@pytest.mark.parametrize(("external", "ran"), [(False, 3), (True, 1)])
async def test_a_restart_rebuilds_the_state_and_runs_nothing_twice(
    tmp_path: Path, external: bool, ran: int
) -> None:
    async with world(tmp_path / "j.db", [Tally(external=external).tool]) as first:
        with pytest.raises(UsageError, match="Another tool server"):
            Journal(tmp_path / "j.db")
        await first.open("t", {})
        await first.call(bump("a", 5))
        # An idle one gives back what it holds, and is rebuilt by its next call.
        assert await first.sweep(60) == 0 and len(first) == 1
        assert await first.sweep(0) == 1 and len(first) == 0
        assert (await first.call(bump("b", 2)))["result"]["text"] == "7"
    again = Tally(external=external)
    async with world(tmp_path / "j.db", [again.tool]) as second:
        # The answer to a retry comes from the journal, before anything is rebuilt.
        assert (await second.call(bump("b", 2)))["result"]["text"] == "7" and again.ran == 0
        assert (await second.call(bump("c", 1)))["result"]["text"] == "8" and again.ran == ran


@pytest.mark.parametrize("external", [False, True])
async def test_a_call_that_is_cut_off_runs_again_unless_it_is_external(
    tmp_path: Path, external: bool
) -> None:
    tally, again = Tally(external=external), Tally(external=external)
    tally.hold.clear()
    async with world(tmp_path / "j.db", [tally.tool]) as first:
        await first.open("t", {})
        cut = asyncio.create_task(first.call(bump("a")))
        while not ((live := first._live.get("t")) and live.running):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await cut
    async with world(tmp_path / "j.db", [again.tool]) as second:
        if external:
            with pytest.raises(EnvError, match="in flight"):
                await second.call(bump("a"))
        else:
            assert (await second.call(bump("a")))["result"]["text"] == "1"
    assert again.ran == (0 if external else 1)


async def test_a_restart_without_a_tool_that_was_called_is_an_env_error(tmp_path: Path) -> None:
    other = as_tool("calculator")
    async with world(tmp_path / "j.db", [Tally().tool, other]) as first:
        await first.open("t", {})
        await first.call(bump("a", 5))
    async with world(tmp_path / "j.db", [other]) as second:
        for _ in range(2):
            with pytest.raises(EnvError, match="bump is not served any more"):
                await second.call(Call("t", "b", "calculator", {"expression": "1"}))


@pytest.mark.parametrize("pure", [False, True])
async def test_only_pure_tools_are_cached_and_without_the_state_of_their_episode(
    tmp_path: Path, pure: bool
) -> None:
    ran: list[int] = []

    @tool(pure=pure)
    def square(x: int) -> str:
        """Square.

        Args:
            x: A number.
        """
        ran.append(x)
        return str(x * x)

    async with world(tmp_path / "j.db", [Tally().tool, square]) as trajectories:
        answers = []
        for name in ("t", "u"):
            await trajectories.open(name, {})
            await trajectories.call(bump("a", 5, "t"))
            answers.append(await trajectories.call(Call(name, "b", "square", {"x": 3})))
        found = [(answer["result"]["text"], answer["state"]) for answer in answers]
        assert found == [("9", {"total": 5}), ("9", {})]
        assert (await trajectories.call(bump("c", 1, "u")))["result"]["text"] == "1"
    assert ran == ([3] if pure else [3, 3])


async def test_rows_with_other_corpora_share_no_cached_passages(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"id": "a", "text": f"The owl of {name}."})
        )
    searching = SearchTool(corpus="one.jsonl").at(tmp_path)
    async with world(tmp_path / "j.db", [searching]) as trajectories:
        found = []
        for name in ("one", "two"):
            await trajectories.open(name, {"task": {"data": {"corpus": f"{name}.jsonl"}}})
            answer = await trajectories.call(Call(name, "k", "search", {"query": "owl"}))
            found.append(answer["result"]["text"])
    assert found == ["[1] The owl of one.", "[1] The owl of two."]


async def test_a_tool_that_cannot_be_made_spoils_its_own_calls_only(tmp_path: Path) -> None:
    tools = [as_tool("search"), as_tool("calculator"), Tally().tool]
    async with world(tmp_path / "j.db", tools) as trajectories:
        assert await trajectories.open("t", {}) == ["search", "calculator", "bump"]
        answer = await trajectories.call(Call("t", "a", "calculator", {"expression": "6*7"}))
        assert answer["result"]["text"] == "42"
        with pytest.raises(EnvError, match="neither a corpus nor a url"):
            await trajectories.call(Call("t", "b", "search", {"query": "x"}))
        assert (await trajectories.call(bump("c", 2)))["result"]["text"] == "2"
        assert await trajectories.rewards("t") == {} and await trajectories.close("t")


# -- HTTP -----------------------------------------------------------------------------------------------------------


async def test_a_trajectory_that_is_closed_while_its_tools_are_made_frees_them(
    tmp_path: Path,
) -> None:
    begun, go, states = asyncio.Event(), asyncio.Event(), ["slow"]

    class Slow(Tool):
        name, opens, schema = "slow", True, schema("slow", {})

        async def create(self, ctx: ToolContext) -> str:
            begun.set()
            await go.wait()
            return states[0]

        async def release(self, state: Any) -> None:
            states.remove(state)

    async with world(tmp_path / "j.db", [Slow()]) as trajectories:
        await trajectories.open("t", {})
        opening = asyncio.create_task(trajectories.opening("t"))
        await begun.wait()
        closing = asyncio.create_task(trajectories.close("t"))
        for _ in range(20):  # it frees what there is, as far as it can
            await asyncio.sleep(0)
        go.set()
        assert await opening == [] and await closing
        assert not states, "a folder or a process of it would stay until the server ends"


@asynccontextmanager
async def served(
    path: Path, tools: Sequence[Tool], **options: Any
) -> AsyncIterator[tuple[ToolServer, str]]:
    async with world(path / "j.db", tools) as trajectories:
        server = ToolServer(trajectories, load_parser("hermes"), **{"token": "secret", **options})
        async with listening(server, "127.0.0.1", 0, None) as address:
            yield server, address


async def test_a_file_in_the_place_of_the_socket_is_kept(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("kept")
    async with world(tmp_path / "j.db", [Tally().tool]) as trajectories:
        server = ToolServer(trajectories, load_parser("hermes"), token="")
        with suppress(UsageError):  # of a machine without IPv6
            async with (
                listening(server, "::1", 0, None) as address,
                aiohttp.ClientSession() as client,
            ):
                assert (await client.get(f"{address}/health")).status == 200
        with pytest.raises(UsageError, match="Cannot listen"):
            async with listening(server, "127.0.0.1", 0, tmp_path / "notes"):
                pass
    assert (tmp_path / "notes").read_text() == "kept"


async def test_tools_at_a_server_behave_like_tools_here(tmp_path: Path) -> None:
    def draw() -> ToolResult:
        """Draw."""
        return ToolResult("drawn", images=(b"\x89PNG 1", b"\x89PNG 2"))

    tally = Tally()
    ours, ctx = [tally.tool, as_tool(draw)], ToolContext()
    async with (
        served(tmp_path, ours) as (server, address),
        connect(address, token="secret") as remote,
    ):
        offered = await remote.schemas()
        there, drawing = remote_tools(remote, offered, ours)
        state = await there.create(ctx)
        found = [await there.call(state, {"by": by}) for by in (2, 3, "x")]
        assert [(one.text, one.error) for one in found[:2]] == [("2", None), ("5", None)]
        assert found[2].error == "bad_arguments" and tally.ran == 2
        assert ctx.state["total"] == 5 and len(server.trajectories) == 1
        assert await there.reward(state) is None
        other = await drawing.create(ctx)
        drawn = await drawing.call(other, {})
        assert (drawn.text, drawn.images) == ("drawn", (b"\x89PNG 1", b"\x89PNG 2"))
        await drawing.release(other)
        await there.release(state)
        assert len(server.trajectories) == 0
        with pytest.raises(ConfigError, match="does not offer"):
            remote_tools(remote, [], ours)
        changed = {**offered[0], "function": {**offered[0]["function"], "description": "Else."}}
        with pytest.raises(ConfigError, match="another schema"):
            remote_tools(remote, [changed], ours)


async def test_tools_that_a_row_chooses_are_chosen_at_a_server_too(tmp_path: Path) -> None:
    class Shop(Tool):
        """Says what the row has; it is hidden where the row has nothing."""

        name, pure = "shop", True

        def __init__(self) -> None:
            self.schema = schema("shop", {}, "Look.")

        def for_task(self, task: Task) -> Tool | None:
            if not task.data.get("goods"):
                return None
            shown = copy.copy(self)
            shown.schema = schema("shop", {}, f"Look for {task['goods']}.")
            return shown

        async def execute(self, state: ToolContext, arguments: dict[str, Any]) -> ToolResult:
            assert state.task is not None
            return ToolResult(str(state.task["goods"]))

    ours, function = [Shop(), as_tool("declared")], {"name": "move", "description": "Go."}
    async with (
        served(tmp_path, ours) as (server, address),
        connect(address, token="secret") as remote,
    ):
        there = remote_tools(remote, await remote.schemas(), ours)
        plain = Task("p/1", "p", "", "train", ())
        assert [tool.offer(plain) for tool in there] == [[], []]
        for goods in ("tea", "rice"):  # the same call, of rows with other answers
            row = {"goods": goods, "tool_schemas": [{"type": "function", "function": function}]}
            shop, move = (one for tool in there for one in tool.offer(replace(plain, data=row)))
            assert shop.schema["function"]["description"] == f"Look for {goods}."
            (seen,), (said,) = await calls(shop, {}, **row), await calls(move, {}, **row)
            assert (seen.text, said.text, said.done) == (goods, "The call is noted.", True)
        assert move.name == "move" and len(server.trajectories) == 0


GOOD = {"results": [{"result": {"text": "5", "images": []}, "state": {}}]}
SPOILT: dict[str, Any] = {
    "a page": b"<html>proxy</html>",
    "nested": b"[" * 100_000,
    "a list": [GOOD],
    "no results": {"results": []},
    "a result that is null": {"results": [None]},
    "a number as text": {"results": [{"result": {"text": 5}, "state": {}}]},
    "no text": {"results": [{"result": {}, "state": {}}]},
    "a reward of infinity": {
        "results": [{"result": {"text": "5", "reward": float("inf")}, "state": {}}]
    },
    "another field": {"results": [{"result": {"text": "5", "more": 1}, "state": {}}]},
    "no picture": {"results": [{"result": {"text": "5", "images": ["%"]}, "state": {}}]},
    "a state that is a list": {"results": [{"result": {"text": "5"}, "state": []}]},
}


@pytest.mark.parametrize("name", SPOILT)
async def test_an_answer_that_cannot_be_used_is_no_observation(name: str) -> None:
    """It was one: `Error: JSONDecodeError …`, which the model read and was trained on."""
    answers: list[Any] = []

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, answers.pop(0) if path == "/v1/call" else {}

    async with (
        server(handler) as url,
        connect(url.removesuffix("/v1"), token="secret", patience=20.0) as remote,
    ):
        (bumped,) = remote_tools(remote, [Tally().tool.schema], [Tally().tool])
        answers += [SPOILT[name], GOOD]
        assert [one.text for one in await calls(bumped, {"by": 1})] == ["5"] and not answers
        answers += [SPOILT[name]] * 3
        said = r"The tool server at http\S+ sent what cannot be used.*tried 3 times"
        with pytest.raises(EnvError, match=said):
            await calls(bumped, {"by": 1})


async def test_the_token_and_an_unknown_tool(tmp_path: Path) -> None:
    async with served(tmp_path, [Tally().tool]) as (_, address), aiohttp.ClientSession() as session:
        for path in ("/v1/call", "/get_observation", "/v1/open"):
            assert (await session.post(address + path, json={})).status == 401
        assert (await session.get(f"{address}/metrics")).status == 401
        everyone = await (await session.get(f"{address}/health")).json()
        assert everyone["status"] == "healthy" and "tools" not in everyone
        for sesame in ("secret", "Basic secret", "Bearersecret", "Bearer", "Bearer \udcff"):
            found = await session.get(f"{address}/v1/tools", headers={"Authorization": sesame})
            assert found.status == 401, sesame
        with pytest.raises(ConfigError, match="401"):
            async with connect(address, token="wrong") as remote:
                await remote.schemas()
        with pytest.raises(EnvError, match="404") as refused:
            async with connect(address, token="secret") as remote:
                await remote.post("/v1/open", {"tools": ["bmup"]})
        assert not refused.value.hint  # the token is right
        head = {"Authorization": "Bearer secret"}
        known = await (await session.get(f"{address}/health", headers=head)).json()
        assert known["tools"] == ["bump"]
        answer = await session.post(f"{address}/v1/open", json={"tools": ["bmup"]}, headers=head)
        assert answer.status == 404 and "bump" in (await answer.json())["error"]["hint"]


async def test_too_many_calls_are_sent_away_and_come_back(tmp_path: Path) -> None:
    tally = Tally()
    async with (
        served(tmp_path, [tally.tool], limit=2) as (server, address),
        connect(address, token="secret") as remote,
    ):
        await remote.post("/v1/open", {"trajectory": "t"})
        tally.hold.clear()
        asked = [
            {"trajectory": "t", "key": str(n), "name": "bump", "arguments": {"by": 1}}
            for n in range(5)
        ]
        waiting = [asyncio.create_task(remote.post("/v1/call", {"calls": [one]})) for one in asked]
        while not server.refused:
            await asyncio.sleep(0.01)
        assert server.active == 2
        with pytest.raises(Busy):
            await server.call(CallsBody(calls=[bump("5")]))
        with pytest.raises(UsageError, match="limit is 2"):
            await server.call(CallsBody(calls=[bump(str(n)) for n in range(5)]))
        tally.hold.set()
        texts = [(await task)["results"][0]["result"]["text"] for task in waiting]
        assert sorted(texts) == ["1", "2", "3", "4", "5"] and tally.ran == 5
        assert 'agentrl_tool_calls_total{tool="bump",status="ok"} 5' in server.metrics()


async def test_a_batch_is_answered_in_order_whatever_goes_wrong_in_it(tmp_path: Path) -> None:
    tally = Tally()
    async with (
        served(tmp_path, [tally.tool]) as (_, address),
        connect(address, token="secret") as remote,
    ):
        for name in ("t", "u"):
            body = {"trajectory": name, "task": {"data": {"n": 1}}, "seed": 3}
            opened = {"trajectory": name, "tools": [tally.tool.schema], "opening": []}
            assert await remote.post("/v1/open", body) == opened
        asked = [
            {"trajectory": "t", "key": "1", "name": "bump", "arguments": {"by": 1}},
            {"trajectory": "missing", "key": "1", "name": "bump", "arguments": {"by": 1}},
            {"trajectory": "u", "key": "1", "name": "bump", "arguments": {"by": 10}},
            {"trajectory": "u", "key": "2", "name": "bump", "arguments": {"by": "x"}},
            {"trajectory": "u", "key": "3", "name": "jump", "arguments": {}},
        ]
        answers = (await remote.post("/v1/call", {"calls": asked}))["results"]
        missing = {"fault": "usage_error", "message": "No trajectory missing is open."}
        assert answers.pop(1) == missing
        found = [(one["result"]["text"], one["result"]["error"], one["state"]) for one in answers]
        assert found[:2] == [("1", None, {"total": 1}), ("10", None, {"total": 10})]
        assert [error for _, error, _ in found[2:]] == ["bad_arguments", "unknown_tool"]
        fields = "text error reward metrics images seconds level truncated done value"
        assert {*answers[0]["result"]} == {*fields.split()}
        assert (await remote.post("/v1/rewards", {"trajectories": ["t"]})) == {"rewards": {"t": {}}}
        closed = await remote.post("/v1/close", {"trajectories": ["t", "u", "missing"]})
        assert closed == {"closed": ["t", "u"]}


async def test_what_a_world_says_at_its_beginning_comes_from_the_server(tmp_path: Path) -> None:
    class Counter:
        def reset(self, **row: Any) -> str:
            self.count = int(row["start"])
            return f"The counter is at {self.count}."

        def increment(self, step: int) -> int:
            """Increment.

            Args:
                step: By how much.
            """
            self.count += step
            return self.count

        def read(self) -> int:
            """Read."""
            return self.count

    ours = adapt("environment", "here", Counter, tmp_path)
    async with (
        served(tmp_path, ours) as (server, address),
        connect(address, token="secret", patience=5) as remote,
    ):
        there = remote_tools(remote, await remote.schemas(), ours)
        pack = replace(pack_of(tools=[], start=3, answer="5"), tools=there)
        episode = await rollout_of(pack, [call("increment", step=2), call("read"), "5"]).episode(
            Job(pack.tasks("train")[0], 1)
        )
        assert episode.outcome is Outcome.SOLVED and not len(server.trajectories)
        assert episode.turns[1].messages[-1]["content"] == "2 + 3?\n\nThe counter is at 3."
        assert [result.text for turn in episode.turns for result in turn.results] == ["5", "5"]
        broken = replace(pack_of(tools=[]), tools=there)  # its row has no `start`
        lost = await rollout_of(broken, ["5"]).episode(Job(broken.tasks("train")[0], 1))
        assert lost.outcome is Outcome.ENV_ERROR and "422" in lost.error and "start" in lost.error


async def observed(session: Any, address: str, **body: Any) -> dict[str, Any]:
    head = {"Authorization": "Bearer secret"}
    answer = await session.post(f"{address}/get_observation", json=body, headers=head)
    return dict(await answer.json())


async def test_verl_tools_wire_format(tmp_path: Path) -> None:
    async with (
        served(tmp_path, [Tally().tool], token="") as (_, address),
        aiohttp.ClientSession() as session,
    ):

        async def observe(action: str, **more: Any) -> list[Any]:
            said = await observed(session, address, trajectory_ids=["x"], actions=[action], **more)
            return [said[name][0] for name in ("observations", "dones", "valids")]

        none = {"obs": "", "invalid_reason": "no valid tool found for action"}
        actions = [f"I add.\n{call('bump', by=4)}", "no call"]
        said = await observed(
            session, address, trajectory_ids=["x", "y"], actions=actions, extra_fields=[{}, {}]
        )
        assert said.pop("processing_time_ms") > 0 and said.pop("queue_time_ms") == 0
        found = {"observations": ["4", none], "dones": [False, False], "valids": [True, False]}
        assert said == found
        wrong, done, valid = await observe(call("bump", by="four"))
        assert "by" in wrong["invalid_reason"] and not done and not valid
        assert exponent(lambda count: _read_boxed("\\boxed{" * count), 2_000) < 1.5
        for action, answer in (
            ("so \\boxed{ 4 } or \\boxed{5}", "4"),
            ("so \\boxed{}} and \\boxed{4}", "}"),
            ("\\boxed{" * 110_000, ""),  # a finish without an answer, as in verl-tool
        ):
            assert await observe(action, finish=[True]) == [answer, True, True]
        odd: dict[str, Any] = {"finish": [True], "is_last_step": None, "extra_fields": [None]}
        assert await observe("over", **odd) == ["", True, True]
        again = await observe(call("bump", by=2), finish=None, mode="train")
        assert again == ["2", False, True], "the same id begins again after its finish"
        health = await (await session.get(f"{address}/health")).json()
        known = {"status": "healthy", "tools": ["bump"], "concurrent_requests": 0}
        assert known.items() <= health.items()
        short = await session.post(f"{address}/get_observation", json={"trajectory_ids": ["x"]})
        assert short.status == 400


async def test_verl_tools_id_begins_again_if_its_state_is_lost(tmp_path: Path) -> None:
    """Its test clients use fixed ids and leave them open: after a restart, what cannot be rebuilt fails once."""
    body = {"trajectory_ids": ["test-bash-001"], "actions": [call("now")]}
    answers = []
    for clock in (1, 2):

        def now(_at: int = clock) -> int:
            """The time."""
            return _at

        async with (
            served(tmp_path, [as_tool(now)], token="") as (_, address),
            aiohttp.ClientSession() as session,
        ):
            answers += [await observed(session, address, **body) for _ in range(2)]
    lost = answers.pop(2)
    assert [answer["observations"] for answer in answers] == [["1"], ["1"], ["2"]]
    why = "could not be rebuilt: diverged at call 0 (now)"
    assert lost["dones"] == [True] and why in lost["observations"][0]["error"]


async def test_verl_tools_own_actions_are_run(tmp_path: Path) -> None:
    ran: list[str] = []

    def run_python(code: str) -> str:
        """Run."""
        ran.append(code)
        return f"python {len(ran)}"

    def bash(command: str) -> str:
        """Run."""
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return (done.stdout + done.stderr).strip()

    def search(query: str, k: int = 3) -> str:
        """Search."""
        return f"search {query}"

    def sql(query: str) -> str:
        """Query."""
        return f"sql {query}"

    actions = {
        "I think <python>x = 1</python> and <python>print(x)</python>": "python 1",
        "```python\nprint(2)\n```": "python 2",
        "<bash>\necho 'Hello' > test.txt\necho 'Line 2' >> test.txt\ncat test.txt\n</bash>": "Hello\nLine 2",
        "```bash\nmkdir -p a/b\ncd a\necho x > b/c.txt\nfind . -name '*.txt'\n```": "./b/c.txt",
        "```sh\ncat a/b/c.txt\n```": "x",
        "<bash>cd a</bash>\n<bash>basename $PWD</bash>": "a",
        '```bash\nread name\necho "Hello, $name!"\n```\n```input\nTestUser\n```': "Hello, TestUser!",
        "```terminal\ncat nothing; echo still here\n```": "still here\ncat: nothing: No such file or directory",
        "```python\nprint(input())\n```\n```input\n4 'x'\n```": "python 3",
        "<search>who</search>": "search who",
        "```sql\nSELECT 1\n```": "sql SELECT 1",
        "<sql>SELECT 2</sql>": "sql SELECT 2",
        '<mcp_call>{"name": "search", "arguments": {"query": "q"}}</mcp_call>': "search q",
    }
    tools = [as_tool(function) for function in (run_python, bash, search, sql)]
    async with (
        served(tmp_path, tools, token="") as (_, address),
        aiohttp.ClientSession() as session,
    ):
        for action, wanted in actions.items():
            body = {"trajectory_ids": ["p"], "actions": [action], "extra_fields": [{}]}
            answer = await session.post(f"{address}/get_observation", json=body)
            said = await answer.json()
            assert (said["observations"], said["valids"]) == ([wanted], [True]), action
            assert float(answer.headers["X-Process-Time"]) > 0 and said["queue_time_ms"] == 0
        said = await observed(
            session, address, trajectory_ids=["y"], actions=["<mcp_call>{</mcp_call>"]
        )
        assert said["valids"] == [False] and said["observations"][0]["invalid_reason"]
    assert ran[:2] == ["x = 1\nprint(x)", "print(2)"]
    assert run_code(ran[2]).stdout == "4 'x'\n"


def started(folder: Path) -> tuple[Started, str]:
    """A server of the project in a folder, on a Unix socket; and its address."""
    socket = folder / "tools.sock"
    socket.unlink(missing_ok=True)
    words = ["--socket", str(socket), "--token", "secret", "--journal", str(folder / "j.db")]
    server = start(folder, "tools", "serve", *words)
    server.line("unix:")
    assert socket.stat().st_mode & 0o777 == 0o600
    return server, f"unix:{socket}"


async def test_a_rollout_on_a_server_that_is_killed_loses_no_episode(tmp_path: Path) -> None:
    (tmp_path / "agentrl.yaml").write_text(
        "task: {packs: [code-task]}\nsandbox: {min_level: landlock}\n"
    )
    turns = [
        call("run_python", code=code) for code in ("n = 20", "n += 1; print(n)", "print(n * 2)")
    ]
    slow = call("run_python", code="import time; time.sleep(1.5); n += 0")
    pack = pack_of(tools=["run_python"], answer="42")
    server, address = started(tmp_path)
    try:
        async with connect(address, token="secret", patience=60) as remote:
            pack = replace(pack, tools=remote_tools(remote, await remote.schemas(), pack.tools))
            rollout = rollout_of(pack, [*turns[:1], slow, *turns[1:], "42"])
            jobs = [Job(pack.tasks("train")[0], sample=n, seed=n) for n in range(4)]
            running = asyncio.create_task(rollout.run(jobs))
            with closing(sqlite3.connect(tmp_path / "j.db")) as journal:
                counts = "SELECT count(result), count(*) - count(result) FROM calls"
                while not all(
                    journal.execute(counts).fetchone()
                ):  # some calls are done, some are running
                    await asyncio.sleep(0.02)
            server.process.kill()
            await asyncio.to_thread(server.end)
            server, _ = await asyncio.to_thread(started, tmp_path)
            episodes = await running
        assert [episode.outcome for episode in episodes] == [Outcome.SOLVED] * 4
        assert [result.text.strip() for result in episodes[0].turns[-2].results] == ["42"]
        assert episodes[0].turns[-2].results[0].level in ("ns", "landlock")
    finally:
        server.process.terminate()
        assert server.end()[0] == 0


async def test_a_server_that_is_ended_lets_calls_finish_and_frees_its_sandboxes(
    tmp_path: Path,
) -> None:
    (tmp_path / "agentrl.yaml").write_text(
        "task: {packs: [code-task]}\nsandbox: {min_level: landlock, workers: 1}\n"
    )
    server, address = started(tmp_path)
    try:
        socket = aiohttp.UnixConnector(address.removeprefix("unix:"))
        async with aiohttp.ClientSession(connector=socket) as proxy:  # which has pages as clients
            for page in PAGES[1:]:
                head = {"Content-Type": "application/json", "Authorization": "Bearer secret"} | page
                body = b'{"trajectory": "t"}'
                refused = await proxy.post("http://any/v1/open", data=body, headers=head)
                assert refused.status in (403, 415), page
        async with connect(address, token="secret", patience=20) as remote:
            await remote.post("/v1/open", {"trajectory": "t"})
            one = {"trajectory": "t", "name": "run_python"}
            await remote.post(
                "/v1/call", {"calls": [{**one, "key": "a", "arguments": {"code": "n = 41"}}]}
            )
            boxes = descendants(server.process.pid)
            assert boxes
            slow = {"code": "import time; time.sleep(1); n += 1; print(n)"}
            answer = asyncio.create_task(
                remote.post("/v1/call", {"calls": [{**one, "key": "b", "arguments": slow}]})
            )
            with closing(sqlite3.connect(tmp_path / "j.db")) as journal:
                while journal.execute("SELECT count(*) FROM calls").fetchone()[0] < 2:
                    await asyncio.sleep(0.02)
                server.process.terminate()
                assert (await answer)["results"][0]["result"]["text"].strip() == "42"
                assert (await asyncio.to_thread(server.end))[0] == 0
                assert journal.execute("SELECT count(result) FROM calls").fetchone()[0] == 2
        assert not [pid for pid in boxes if alive(pid)]
        assert not (tmp_path / "tools.sock").exists()
    finally:
        server.process.kill()


def test_the_command_refuses_an_open_door(cli: Cli) -> None:
    cli("tools", "serve", "--no-auth", "--host", "0.0.0.0", code=2, said="loopback")
    for words, said in (
        ("--socket s --host ::1 --port 0", "--host and --port do nothing with --socket"),
        ("--mcp --stdio --idle 5 --port 1", "--port and --idle do nothing with --stdio"),
        ("--mcp --parser qwen --done-if-invalid", "--parser and --done-if-invalid do nothing with"),
        ("--mcp --socket s", "--socket does nothing with --mcp"),
        ("--stdio", "--stdio does nothing without --mcp"),
    ):
        cli("tools", "serve", *words.split(), code=2, said=said)


def test_a_tool_server_warns_before_the_first_call(tmp_path: Path) -> None:
    (tmp_path / "agentrl.yaml").write_text(
        "task: {packs: [code-task]}\nsandbox: {backend: bare, min_level: bare}\n"
    )
    server, _ = started(tmp_path)
    os.kill(server.process.pid, signal.SIGINT)
    code, said = server.end()
    assert code == 0 and "WARNING: Sandbox level bare isolates NOTHING" in said, said


PAGES: list[dict[str, str]] = [
    {"Host": "evil.example"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Content-Type": "text/plain"},
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Content-Type": ""},
]


@pytest.mark.parametrize("token", ["", "secret"])
async def test_no_page_of_a_browser_reaches_the_tools(tmp_path: Path, token: str) -> None:
    tally = Tally()
    body = json.dumps({"trajectory": "t", "task": {"data": {}}})
    async with (
        served(tmp_path, [tally.tool], token=token) as (_, address),
        aiohttp.ClientSession() as session,
    ):
        own = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
        for page in PAGES:
            answer = await session.post(f"{address}/v1/open", data=body, headers={**own, **page})
            assert answer.status in (403, 415), page
        port = address.rpartition(":")[2]
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            head = {**own, "Host": host, "Origin": f"http://{host}"}
            assert (await session.post(f"{address}/v1/open", data=body, headers=head)).status == 200


# --- hostile texts and bodies: read in linear time, answered with a sentence ---


# --- a pack's tools by MCP, with the official client: state per session, over stdio and streamable HTTP ---


async def bumped(client: Any, by: int) -> str:
    return str((await client.call_tool("bump", {"by": by})).content[0].text)
