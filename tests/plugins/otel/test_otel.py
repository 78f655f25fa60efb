"""A collector on loopback gets the spans of a rollout and of a served session; they come back by `import otlp`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.commands import main
from tests.helpers.cli import Cli

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of an OTLP server, and what it gets, as the JSON of OTLP."""
    MessageToDict = importlib.import_module("google.protobuf.json_format").MessageToDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            got.append(MessageToDict(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def spans_of(got: list[Any]) -> list[dict[str, Any]]:
    return [
        span | {"is": {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}}
        for export in got
        for resource in export["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("otel") / "calc"
    assert main(["init", "calc-task", str(folder)]) == 0
    return folder


def rollout(project: Path, address: str, *more: str) -> None:
    words = [
        "-m",
        "agentrl_cli",
        "rollout",
        "-n",
        "12",
        "-g",
        "1",
        "--project",
        str(project),
        *more,
    ]
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": address}
    subprocess.run([sys.executable, *words], env=env, check=True, capture_output=True)


def test_spans_of_a_rollout_come_back_as_its_episodes(
    project: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Agent, calls and tools with usage and rewards; with content, a secret masked, they are the same conversation."""
    with collector() as (address, got):
        rollout(project, address, "--otel", "--set", "telemetry.content=true")
    spans = spans_of(got)
    kinds = [span["is"]["gen_ai.operation.name"] for span in spans]
    assert kinds.count("invoke_agent") == 12 and {"chat", "execute_tool"} < {*kinds}
    roots = {span["spanId"]: span for span in spans if span["name"].startswith("invoke_agent")}
    for span in spans:
        assert span["spanId"] in roots or span["parentSpanId"] in roots
        assert int(span["endTimeUnixNano"]) >= int(span["startTimeUnixNano"]) > 1e18
    chat = next(span for span in spans if span["is"]["gen_ai.operation.name"] == "chat")
    assert int(chat["is"]["gen_ai.usage.output_tokens"]) > 0
    (tmp_path / "got.jsonl").write_text("\n".join(map(json.dumps, got)))
    cli = Cli(capsys, tmp_path)
    ids = cli.json("import", "otlp", "got.jsonl", "--db", "in.db")["episodes"]
    theirs = [cli.json("show", one, "--db", "in.db") for one in ids]
    names = [span["is"]["gen_ai.conversation.id"] for span in roots.values()]
    ours = [cli.json("show", one, "--project", str(project)) for one in names]

    def said(row: dict[str, Any]) -> list[Any]:
        texts = [(m["role"], m["content"]) for turn in row["turns"] for m in turn["messages"]]
        calls = [(c["name"], c["arguments"]) for turn in row["turns"] for c in turn["calls"]]
        return [texts, calls, row["reward"]]

    assert sorted(map(said, theirs), key=str) == sorted(map(said, ours), key=str)


def test_nothing_is_sent_unasked(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An address alone sends nothing, spans without content hold no text, and a missing address is said."""
    with collector() as (address, got):
        rollout(project, address)
        assert not got
        rollout(project, address, "--set", "telemetry.spans=true")
    texts = json.dumps(got)
    assert "gen_ai.usage" in texts and "messages" not in texts and "arguments" not in texts
    said = "telemetry.spans has no collector"
    Cli(capsys, project)("rollout", "-n", "1", "--otel", code=2, said=said)
