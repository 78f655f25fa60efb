"""A pack of recorded traces: requests, tools that answer as they did, and a reward from what was scored well.

The receiver of OTLP on loopback: complete traces become episodes, and what is not right is refused in a sentence.
"""

import base64
import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl_cli import Outcome, Store, load_pack
from agentrl_cli.agents.gateway.http import PageGuard, listening
from agentrl_cli.errors import NotFound
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.plugins.traces.load import load
from agentrl_cli.sft.from_store import choose
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.replay.screen import ReplayScreen
from benchmarks.traces import traces
from tests.helpers.cli import Cli
from tests.helpers.packs import call, play
from tests.helpers.tui import press, showing, until_text
from tests.plugins.traces.test_atif import ASK, CALL, agent_of
from tests.plugins.traces.test_otlp import CHAT, attributes, parts, span, tool_spans


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)))


async def test_a_planted_set(cli: Cli, tmp_path: Path) -> None:
    rows = traces(30)
    write(tmp_path / "t.jsonl", rows)
    cli("init", "p", "--from", "traces:t.jsonl", said="only give answers of tools")
    pack = load_pack(tmp_path / "p")
    tasks = [task for split in pack.splits() for task in pack.tasks(split)]
    assert len(tasks) == sum(row["score"] for row in rows)
    task = pack.tasks("train")[0]
    good = next(row for row in rows if row["messages"][1] == task.prompt[1])["messages"]
    asked = good[2]["tool_calls"][0]["function"]
    name, item = asked["name"], json.loads(asked["arguments"])["item"]
    right = [call(name, item=f" {item.upper()} "), f"It is {good[-1]['content']}."]
    episode = await play(pack, right)
    assert episode.outcome is Outcome.SOLVED and episode.reward == 1.2
    miss = await play(pack, [call(name, item="moon"), "Answer: 1"])
    assert miss.outcome is Outcome.FAILED and miss.reward == 0.0
    assert [result.error for turn in miss.turns for result in turn.results] == ["not_recorded"]
    assert pack.module.solve({"recorded": task["recorded"]})[-1]["content"] == good[-1]["content"]


@pytest.mark.parametrize(
    "tools",
    [
        [{"name": "look", "input_schema": {"type": "object", "properties": {"q": {}}}}],
        [
            {"function": "x"},
            {"type": "web_search"},
            {"type": "function", "function": {"name": "look"}},
        ],
    ],
)
async def test_schemas_and_conversations_of_others(
    cli: Cli, tmp_path: Path, tools: list[dict[str, Any]]
) -> None:
    rows = []
    for number in range(3, 13):
        asked = {"id": "c1", "function": {"name": "look", "arguments": {"q": number}}}
        said = [
            {"role": "user", "content": f"Price of {number}?"},
            {"role": "assistant", "content": "", "tool_calls": [asked]},
            {"role": "tool", "tool_call_id": "c1", "content": str(number)},
            {"role": "assistant", "content": f"It is {number}."},
        ]
        more = [{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Bye."}]
        rows.append({"messages": said + more, "tools": tools, "score": 1})
    write(tmp_path / "t.jsonl", [*rows, {"messages": rows[0]["messages"], "score": 10**400}])
    cli("init", "p", "--from", "traces:t.jsonl?unscored=skip", said="10 traces go on after")
    pack = load_pack(tmp_path / "p")
    [tool] = pack.tools
    assert [*tool.schema["function"]["parameters"]["properties"]] == ["q"]
    assert pack.tasks("train")[0]["recorded"][-1]["content"].startswith("It is")
    assert [str(problem) for problem in await check_pack(pack, None)] == []


@pytest.mark.parametrize("source", ["openinference", "genai", "langfuse"])
def test_spans_are_whole_conversations(cli: Cli, tmp_path: Path, source: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps(tool_spans()[source]))
    cli("init", "p", "--from", "traces:x.json")
    pack = load_pack(tmp_path / "p")
    [task] = [task for split in pack.splits() for task in pack.tasks(split)]
    assert [one["role"] for one in task.prompt] == ["system", "user"]
    assert task["recorded"][-1]["content"] == "It is 42."
    given = pack.tools[0].schema["function"]["parameters"]
    assert source == "langfuse" or given["required"] == ["q"]


async def test_answers_in_another_order_and_scores(cli: Cli, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for number in range(12):
        calls = [
            {"id": name, "function": {"name": name, "arguments": {"q": number}}} for name in "ab"
        ]
        said = [
            {"role": "user", "content": f"{number}?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": id, "content": f"{id} {number}"} for id in "ba"),
            {"role": "assistant", "content": f"It is {number}."},
        ]
        rows.append({"messages": said, "score": number / 100})
    write(tmp_path / "t.jsonl", rows)
    cli("init", "p", "--from", "traces:t.jsonl?score=0.02", said="2 traces only give answers")
    pack = load_pack(tmp_path / "p")
    assert sum(len(pack.tasks(split)) for split in pack.splits()) == 10
    assert [str(problem) for problem in await check_pack(pack, None)] == []
    write(tmp_path / "t.jsonl", [{**row, "score": 0} for row in rows])
    cli("init", "q", "--from", "traces:t.jsonl", code=2, said="The best score of 12 traces is 0")
    write(tmp_path / "t.jsonl", [{**rows[0], "score": 1, "messages": rows[0]["messages"][:2]}])
    cli("init", "q", "--from", "traces:t.jsonl", code=2, said="1 traces that are right have no")
    cli("init", "q", "--from", "traces:t.jsonl?score=high", code=2, said="not a number")


def test_it_asks_where_no_trace_says_what_is_right(cli: Cli, tmp_path: Path) -> None:
    rows = [{key: row[key] for key in ("messages",)} for row in traces(20)]
    write(tmp_path / "t.jsonl", rows)
    cli("init", "a", "--from", "traces:t.jsonl", code=2, said="20 of 20 traces have no score")
    cli("init", "a", "--from", "traces:t.jsonl?unscored=skip", code=2, said="no request")
    cli("init", "a", "--from", "traces:t.jsonl?unscored=right")
    tools = {tool.name: tool for tool in load_pack(tmp_path / "a").tools}
    assert set(tools) == {"price", "stock"}
    parameters = tools["price"].schema["function"]["parameters"]
    assert parameters["properties"] == {"item": {"type": "string"}}  # as the calls show
    cli("init", "b", "--from", "traces:missing.jsonl", code=2, said="No such file")


# --- commands that look at imported episodes ---


@pytest.fixture
def imported(cli: Cli, tmp_path: Path) -> Cli:
    """A run of an import: one solved, one failed, one without a score."""
    call = {"id": "c", "function": {"name": "look", "arguments": {"q": 1}}}
    said = [
        {"role": "user", "content": "What is it?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Let me see.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    rows = []
    for number, score in enumerate((1, 0, None)):
        answer = {"role": "assistant", "content": f"It is {4 + number}."}
        rows.append({"messages": [*said, answer]} | ({} if score is None else {"score": score}))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cli("import", "otlp", "rows.jsonl", "--db", "a.db")
    cli.always = ("--db", "a.db")
    return cli


def test_what_is_left_out_is_said(imported: Cli, tmp_path: Path) -> None:
    text = imported("failures")
    assert "1 of 2 attempts (import) failed" in text and "--whatif" not in text and "@t" in text
    left = "are left out: no model of this store sampled their tokens (imported)."
    imported("export", "--format", "sequences", "-o", "x.jsonl", said=f"3 of 3 episodes {left}")
    lines: list[str] = []
    with Store.open(tmp_path / "a.db") as store, pytest.raises(NotFound):
        choose(store, "run:rows", "", narrate=lines.append)
    assert lines == [f"2 of 2 episodes {left}"]
    imported("why", "rows", code=2, said="is of the kind import, not a training")


def test_what_cannot_run_again_is_said(imported: Cli) -> None:
    for words in (("--verify",), ("--whatif", "rerun")):
        imported("replay", "last", *words, code=2)
        assert "Nothing of this episode can run again" in imported.err
    imported("replay", "nosuch.json", code=2, said="No file named 'nosuch.json'")


async def test_the_screen_says_forced_and_shows_the_reasoning(
    imported: Cli, tmp_path: Path
) -> None:
    with Store.open(tmp_path / "a.db", readonly=True) as store:
        id = store.episodes.resolve("last")
    app = AgentApp(tmp_path / "a.db", lambda reader: ReplayScreen(reader, id))
    async with app.run_test(size=(120, 40)) as pilot:
        text = await until_text(pilot, "TURNS")
        assert "LAYER plain" in text  # nothing was sampled: no marks
        assert re.search(r"\dt forced", text) and not re.search(r"\dt sampled", text)
        await press(pilot, "M", then="Let me see.")


async def test_the_reading_fits_a_small_terminal_and_names_sub_agents(tmp_path: Path) -> None:
    found = agent_of("lead", "root", [ASK, CALL])
    found["subagent_trajectories"] = [agent_of("helper", "sub", [{**ASK, "message": "Look."}])]
    (tmp_path / "t.json").write_text(json.dumps(found))
    with Store.open(tmp_path / "a.db") as store:
        [id], _ = load(tmp_path / "t.json", store)
    app = AgentApp(tmp_path / "a.db", lambda reader: ReplayScreen(reader, id))
    async with showing(app, "TURN 1", size=(80, 24)) as pilot:
        text = await press(pilot, "M", then="TURN 3 user   helper   another context")
        assert "? keys  q back" in text


# --- the receiver ---

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
from agentrl_cli.plugins.traces import receive  # noqa: E402 - needs opentelemetry-proto
from agentrl_cli.plugins.traces.receive import Inbox  # noqa: E402


def export(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": [*spans]}]}]}


def chat(start: int, trace: str, **more: Any) -> dict[str, Any]:
    asked, answered = [parts(one) for one in CHAT[:2]], [parts(CHAT[4])]
    given = {"gen_ai.input.messages": asked, "gen_ai.output.messages": answered}
    return {**span(start, **{"gen_ai.operation.name": "chat"}, **given), "traceId": trace, **more}


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[tuple[Inbox, str, list[str]]]:
    """An inbox, its address and the sentences on what was left out."""
    said: list[str] = []
    with Store.open(tmp_path / "in.db") as store:
        found = Inbox(store, said.append)
        guard = PageGuard(found.app, {"localhost"}, token="key")
        async with listening(guard, "127.0.0.1", 0) as address:
            yield found, f"{address}/v1/traces", said


async def post(url: str, body: Any, **headers: str) -> httpx2.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"content-type": "application/json", "authorization": "Bearer key", **headers}
    async with httpx2.AsyncClient(timeout=None) as http:
        return await http.post(url, content=data, headers=head)


async def test_traces_in_pieces(
    inbox: tuple[Inbox, str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, url, said = inbox
    root = span(1, **{"gen_ai.operation.name": "invoke_agent", "reward": 1.0})
    inner = chat(2, "a" * 32, parentSpanId="1" * 16)
    assert (await post(url, export(inner))).json() == {} and not found.ids
    packed = gzip.compress(json.dumps(export(root, chat(5, "b" * 32))).encode())
    assert (await post(url, packed, **{"content-encoding": "gzip"})).status_code == 200
    assert len(found.ids) == 2
    late = (await post(url, export(inner))).json()["partialSuccess"]
    assert late["rejectedSpans"] == "1" and "is written" in late["errorMessage"]
    assert (await post(url, export(chat(9, "c" * 32)))).status_code == 200
    found.write()
    rows = Cli(capsys, tmp_path).json("ls", "--db", "in.db")
    assert len(rows) == 3 and not said
    assert [run["name"] for run in Cli(capsys, tmp_path).json("ls", "runs", "--db", "in.db")] == [
        "received"
    ]
    assert sorted(str(row["reward"]) for row in rows) == ["1.0", "None", "None"]


async def test_a_root_that_comes_first(inbox: tuple[Inbox, str, list[str]]) -> None:
    found, url, said = inbox
    await post(url, export({**span(1, reward=1.0), "traceId": "a" * 32}))
    assert (await post(url, export(chat(2, "a" * 32, parentSpanId="1" * 16)))).json() == {}
    found.write()
    assert len(found.ids) == 1 and not said


async def test_a_store_that_cannot_be_written_loses_nothing(
    inbox: tuple[Inbox, str, list[str]],
) -> None:
    found, url, _ = inbox
    found._store.episodes.file.conn.execute("PRAGMA query_only=1")
    assert (await post(url, export(chat(1, "a" * 32)))).status_code == 500
    found._store.episodes.file.conn.execute("PRAGMA query_only=0")
    found.write()
    assert len(found.ids) == 1


async def test_others_do_not_cut_a_long_trace(
    inbox: tuple[Inbox, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, url, _ = inbox
    body = export(chat(2, "a" * 32, parentSpanId="1" * 16))
    monkeypatch.setattr(receive, "HELD", 2 * len(json.dumps(body)))
    assert (await post(url, body)).json() == {}
    for number in range(6):
        assert (await post(url, export(chat(3 + number, f"{number:032x}")))).json() == {}
    assert len(found.ids) == 6
    assert (await post(url, export(chat(9, "a" * 32)))).json() == {}
    assert len(found.ids) == 7


async def test_what_is_refused(
    inbox: tuple[Inbox, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, url, _ = inbox
    assert (await post(url, export(), authorization="")).status_code == 401
    assert (await post(url, export(), origin="http://evil.example")).status_code == 403
    assert (await post(url, export(), host="evil.example")).status_code == 403
    assert (await post(url, b"x", **{"content-type": "application/xml"})).status_code == 415
    assert (await post(url, export(), **{"content-encoding": "br"})).status_code == 415
    assert (await post(url, b"x", **{"content-encoding": "gzip"})).status_code == 400
    for body in (b"{", b"[]", b"{}", b"[" * 200_000):
        answer = await post(url, body)
        assert answer.status_code == 400 and answer.json()["message"], body[:20]
    monkeypatch.setattr(receive, "LARGEST", 10_000)
    assert (await post(url, b" " * 20_000)).status_code == 413
    bomb = gzip.compress(b" " * 1_000_000)
    assert (await post(url, bomb, **{"content-encoding": "gzip"})).status_code == 413
    odd = {**chat(1, "a" * 32), "attributes": 7}
    partial = (await post(url, export(odd, chat(2, "a" * 32)))).json()["partialSuccess"]
    assert partial["rejectedSpans"] == "1"
    found.write()
    assert len(found.ids) == 1


async def test_protobuf(inbox: tuple[Inbox, str, list[str]]) -> None:
    from google.protobuf.json_format import ParseDict

    found, url, said = inbox
    kind = {"content-type": "application/x-protobuf"}

    def packed(one: dict[str, Any]) -> dict[str, Any]:
        ids = {
            name: base64.b64encode(bytes.fromhex(one[name])).decode()
            for name in ("traceId", "spanId")
        }
        return {**one, **ids}

    spans = [
        packed(chat(2, "ab" * 16)),
        {**packed(chat(4, "ab" * 16)), "attributes": attributes(x="y")},
    ]
    body = ParseDict(export(*spans), service.ExportTraceServiceRequest()).SerializeToString()
    answer = await post(url, body, **kind)
    read = service.ExportTraceServiceResponse.FromString(answer.content)
    assert answer.status_code == 200 and not read.partial_success.rejected_spans
    found.write()
    refused = await post(url, b"\xff\xff", **kind)
    from google.rpc.status_pb2 import Status

    assert refused.status_code == 400 and refused.headers["content-type"] == kind["content-type"]
    assert "not an export of OTLP" in Status.FromString(refused.content).message
    assert found._written.popitem()[0] == "ab" * 16
    plain = {**chat(4, "ab" * 16), "attributes": attributes(x="y")}
    await post(url, export(chat(2, "ab" * 16), plain))
    found.write()
    assert len({*found.ids}) == 1 and "is there already" in said[0]


def test_files_or_a_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Cli(capsys, tmp_path)("import", "otlp", code=2, said="Files are needed, or --listen")
