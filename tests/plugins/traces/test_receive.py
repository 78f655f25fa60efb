"""The receiver of OTLP on loopback: complete traces become episodes, and what is not right is refused in a sentence."""

import base64
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl_cli.agents.gateway.http import PageGuard, listening
from agentrl_cli.store import Store
from tests.helpers.cli import Cli
from tests.plugins.traces.test_otlp import CHAT, attributes, export, parts, span

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
from agentrl_cli.plugins.traces import receive  # noqa: E402 - needs opentelemetry-proto
from agentrl_cli.plugins.traces.receive import Inbox  # noqa: E402

Box = tuple[Inbox, str, list[str]]


def chat(start: int, trace: str, **more: Any) -> dict[str, Any]:
    asked, answered = [parts(one) for one in CHAT[:2]], [parts(CHAT[4])]
    given = {"gen_ai.input.messages": asked, "gen_ai.output.messages": answered}
    return {**span(start, **{"gen_ai.operation.name": "chat"}, **given), "traceId": trace, **more}


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Box]:
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


async def test_traces_in_pieces(inbox: Box, cli: Cli) -> None:
    found, url, said = inbox
    root = span(1, **{"gen_ai.operation.name": "invoke_agent", "reward": 1.0})
    inner = chat(2, "a" * 32, parentSpanId="1" * 16)
    assert (await post(url, export(inner))).json() == {} and not found.ids
    packed = gzip.compress(json.dumps(export(root, chat(5, "b" * 32))).encode())
    assert (await post(url, packed, **{"content-encoding": "gzip"})).status_code == 200
    assert len(found.ids) == 2
    late = (await post(url, export(inner))).json()["partialSuccess"]
    assert late["rejectedSpans"] == "1" and "is written" in late["errorMessage"]
    bare = {"traceId": "c" * 32, "spanId": "9" * 16, "startTimeUnixNano": "9000000000"}
    await post(url, export(chat(9, "c" * 32, parentSpanId="9" * 16)))
    assert (await post(url, export(bare))).json() == {} and len(found.ids) == 3
    rewards = [str(row["reward"]) for row in cli.json("ls", "--db", "in.db")]
    assert sorted(rewards) == ["1.0", "None", "None"] and not said
    assert [run["name"] for run in cli.json("ls", "runs", "--db", "in.db")] == ["received"]


async def test_a_root_that_comes_first(inbox: Box) -> None:
    found, url, said = inbox
    await post(url, export({**span(1, reward=1.0), "traceId": "a" * 32}))
    assert (await post(url, export(chat(2, "a" * 32, parentSpanId="1" * 16)))).json() == {}
    found.write()
    assert len(found.ids) == 1 and not said


async def test_a_store_that_cannot_be_written_loses_nothing(inbox: Box) -> None:
    found, url, _ = inbox
    found._store.episodes.file.conn.execute("PRAGMA query_only=1")
    assert (await post(url, export(chat(1, "a" * 32)))).status_code == 500
    found._store.episodes.file.conn.execute("PRAGMA query_only=0")
    found.write()
    assert len(found.ids) == 1


async def test_others_do_not_cut_a_long_trace(inbox: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    found, url, _ = inbox
    first = chat(2, "a" * 32, parentSpanId="1" * 16)
    monkeypatch.setattr(receive, "HELD", 2 * len(json.dumps(export(first))))
    others = [chat(3 + number, f"{number:032x}") for number in range(6)]
    for sent, written in ((first, 0), *((other, n + 1) for n, other in enumerate(others))):
        assert (await post(url, export(sent))).json() == {} and len(found.ids) == written
    assert (await post(url, export(chat(9, "a" * 32)))).json() == {} and len(found.ids) == 7


async def test_what_is_refused(inbox: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "LARGEST", 10_000)
    refused: list[tuple[int, Any, dict[str, str]]] = [
        (401, export(), {"authorization": ""}),
        (403, export(), {"origin": "http://evil.example"}),
        (403, export(), {"host": "evil.example"}),
        (415, b"x", {"content-type": "application/xml"}),
        (415, export(), {"content-encoding": "br"}),
        (400, b"x", {"content-encoding": "gzip"}),
        (400, b"{", {}),
        (400, b"[]", {}),
        (400, b"{}", {}),
        (400, b"[" * 9_000, {}),
        (413, b" " * 20_000, {}),
        (413, gzip.compress(b" " * 1_000_000), {"content-encoding": "gzip"}),
    ]
    for status, body, head in refused:
        answer = await post(inbox[1], body, **head)
        assert answer.status_code == status, head
        assert status != 400 or answer.json()["message"]


async def test_a_span_that_cannot_be_read_is_left_out_alone(inbox: Box) -> None:
    found, url, _ = inbox
    odd = {**chat(1, "a" * 32), "attributes": 7}
    partial = (await post(url, export(odd, chat(2, "a" * 32)))).json()["partialSuccess"]
    found.write()
    assert partial["rejectedSpans"] == "1" and len(found.ids) == 1


async def test_protobuf(inbox: Box) -> None:
    from google.protobuf.json_format import ParseDict
    from google.rpc.status_pb2 import Status

    found, url, said = inbox
    kind = {"content-type": "application/x-protobuf"}
    plain = [chat(2, "ab" * 16), {**chat(4, "ab" * 16), "attributes": attributes(x="y")}]

    def packed(one: dict[str, Any]) -> dict[str, Any]:
        names = ("traceId", "spanId")
        return one | {name: base64.b64encode(bytes.fromhex(one[name])).decode() for name in names}

    sent = ParseDict(export(*map(packed, plain)), service.ExportTraceServiceRequest())
    answer = await post(url, sent.SerializeToString(), **kind)
    read = service.ExportTraceServiceResponse.FromString(answer.content)
    assert answer.status_code == 200 and not read.partial_success.rejected_spans
    found.write()
    refused = await post(url, b"\xff\xff", **kind)
    assert refused.status_code == 400 and refused.headers["content-type"] == kind["content-type"]
    assert "not an export of OTLP" in Status.FromString(refused.content).message
    assert found._written.popitem()[0] == "ab" * 16
    await post(url, export(*plain))
    found.write()
    assert len({*found.ids}) == 1 and "is there already" in said[0]


def test_files_or_a_port(cli: Cli) -> None:
    cli("import", "otlp", code=2, said="Files are needed, or --listen")
