"""A collector on loopback gets the spans of a rollout and of a served session; they come back by `import otlp`."""

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl_cli.commands import main
from agentrl_cli.plugins.otel.spans import ADDRESSES, send, tracer
from agentrl_cli.types import Episode, StopReason, ToolCall, ToolResult, Turn
from tests.helpers.cli import Cli
from tests.helpers.train import serving
from tests.helpers.web import Site, serve_pages

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


@contextmanager
def collector() -> Iterator[tuple[str, Site]]:
    """Yield the address of an OTLP server, and what it gets."""
    with serve_pages() as site:
        site.pages["/v1/traces"] = (200, {}, b"")
        yield site.url, site


def exports(site: Site) -> list[Any]:
    """The requests as the JSON of OTLP."""
    assert {path for _, path, _ in site.seen} <= {"/v1/traces"}
    read = importlib.import_module("google.protobuf.json_format").MessageToDict
    kind = importlib.import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    return [read(kind.ExportTraceServiceRequest.FromString(body)) for *_, body in site.seen]


def spans_of(site: Site) -> list[dict[str, Any]]:
    return [
        span | {"is": {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}}
        for export in exports(site)
        for resource in export["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("otel") / "calc"
    assert main(["init", "calc-task", str(folder)]) == 0
    return folder


@pytest.fixture
def agentrl(project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a command of the project, whose spans go to an address and have arrived when it returns."""
    tracer.cache_clear()

    def run(address: str, *words: str) -> None:
        monkeypatch.setenv(ADDRESSES[0], address)
        cli(*words, "--project", str(project))
        if tracer.cache_info().currsize:
            tracer().span_processor.shutdown()  # as at the end of a process
            tracer.cache_clear()

    return run


ROLLOUT = ("rollout", "-g", "1", "-n")
CONTENT = ("--otel", "--set", "telemetry.content=true")


def said(row: dict[str, Any]) -> list[Any]:
    texts = [(m["role"], m["content"]) for turn in row["turns"] for m in turn["messages"]]
    calls = [(c["name"], c["arguments"]) for turn in row["turns"] for c in turn["calls"]]
    return [texts, calls, row["reward"]]


def test_spans_of_a_rollout_come_back_as_its_episodes(
    project: Path, agentrl: Callable[..., None], cli: Cli, tmp_path: Path
) -> None:
    with collector() as (address, got):
        agentrl(address, *ROLLOUT, "12", *CONTENT)
    spans = spans_of(got)
    kinds = [span["is"]["gen_ai.operation.name"] for span in spans]
    assert kinds.count("invoke_agent") == 12 and {"chat", "execute_tool"} < {*kinds}
    roots = {span["spanId"]: span for span in spans if span["name"].startswith("invoke_agent")}
    for span in spans:
        assert span["spanId"] in roots or span["parentSpanId"] in roots
        assert int(span["endTimeUnixNano"]) >= int(span["startTimeUnixNano"]) > 1e18
    used = [span["is"].get("gen_ai.usage.output_tokens", "0") for span in spans]
    assert [int(one) > 0 for one in used] == [kind == "chat" for kind in kinds]
    (tmp_path / "got.jsonl").write_text("\n".join(map(json.dumps, exports(got))))
    ids = cli.json("import", "otlp", "got.jsonl", "--db", "in.db")["episodes"]
    theirs = [said(cli.json("show", one, "--db", "in.db")) for one in ids]
    names = [span["is"]["gen_ai.conversation.id"] for span in roots.values()]
    ours = [said(cli.json("show", one, "--project", str(project))) for one in names]
    assert sorted(theirs, key=str) == sorted(ours, key=str)


def test_attributes_are_those_of_the_conventions_and_hold_no_secret() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    key = "sk-" + "a1" * 20
    call = ToolCall("c", "look", {"q": key}, "")
    turns = (
        Turn(0, "user", ({"role": "user", "content": f"Use {key}."},), 0, 1, started=1e9),
        Turn(1, "assistant", ({"role": "assistant", "content": key},), 1, 2, calls=(call,),
             stop_reason=StopReason.STOP_STRING, started=1e9),
        Turn(2, "tool", ({"role": "tool", "content": key},), 2, 3, started=1e9,
             results=(ToolResult(key, error=f"refused {key} here"),)),
    )  # fmt: skip
    fault = f"no {key} is known"
    episode = Episode("e" * 14, "t", turns=turns, started=1e9, ended=2e9, error=fault)
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    send(provider.get_tracer("test"), episode, content=True)
    spans = kept.get_finished_spans()
    assert key not in "".join(span.to_json() for span in spans)
    chat, tool, root = (dict(span.attributes or {}) for span in spans)
    assert chat["gen_ai.provider.name"] == root["gen_ai.provider.name"] == "agentrl"
    assert all("masked" in str(one["error.type"]) for one in (tool, root))
    assert chat["gen_ai.response.finish_reasons"] == ("stop",)
    [answer] = json.loads(str(chat["gen_ai.output.messages"]))
    assert {"role", "parts", "finish_reason"} <= answer.keys()


def test_nothing_is_sent_unasked(
    project: Path, agentrl: Callable[..., None], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as (address, got):
        agentrl(address, *ROLLOUT, "1")
        assert not got.seen
        agentrl(address, *ROLLOUT, "12", "--set", "telemetry.spans=true")
    texts = json.dumps(exports(got))
    assert "gen_ai.usage" in texts and "messages" not in texts and "arguments" not in texts
    with collector() as (address, got):
        agentrl(address, *ROLLOUT, "2", "--otel", "--set", "cluster.kind=processes")
    assert sum(span["name"].startswith("invoke_agent") for span in spans_of(got)) == 2
    monkeypatch.delenv(ADDRESSES[0])
    cli.folder = project
    cli("rollout", "-n", "1", "--otel", code=2, said="telemetry.spans has no collector")


def test_steps_of_a_training_are_spans_of_one_trace(agentrl: Callable[..., None]) -> None:
    small = ["train.steps=2", "rollout.group_size=2", "rollout.prompts_per_step=1"]
    small.append("train.eval={every: 2, tasks: 1, samples: 1}")
    with collector() as (address, got):
        agentrl(address, "train", "--otel", *(word for one in small for word in ("--set", one)))
    spans = spans_of(got)
    (run,) = (span for span in spans if span["name"].startswith("train "))
    inner = [span for span in spans if span["name"] in ("train_step", "evaluate")]
    inner.sort(key=lambda span: (span["name"], int(span["is"]["agentrl.step"])))
    found = [(span["name"], int(span["is"]["agentrl.step"])) for span in inner]
    assert found == [("evaluate", 0), ("evaluate", 2), ("train_step", 1), ("train_step", 2)]
    assert all("agentrl.solved" in span["is"] for span in inner[:2])
    assert all("agentrl.reward" in span["is"] for span in inner[2:])
    for span in inner[1:]:  # the base is evaluated before the training
        assert span["parentSpanId"] == run["spanId"]
        times = [int(one[name]) for one, name in ((run, "startTimeUnixNano"), (span, "startTimeUnixNano"),
                                                  (span, "endTimeUnixNano"), (run, "endTimeUnixNano"))]  # fmt: skip
        assert times == sorted(times)
    assert "invoke_agent" in {span["name"].split()[0] for span in spans}


def test_a_served_session_is_a_span(
    project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [("user", "Hi?"), ("assistant", "Who asks?"), ("user", "I.")]  # its client's own history
    asked = {"model": "*", "messages": [{"role": role, "content": text} for role, text in said]}
    words = "serve --record --otel --model scripted --alias * --port 0".split()
    with collector() as (address, got), serving(project, *words, **{ADDRESSES[0]: address}) as url:
        place = f"{url.removesuffix('/v1')}/e/one/v1/chat/completions"
        answer = httpx2.post(place, json=asked, timeout=None)
        assert answer.status_code == 200, answer.text
    names = [span["is"].get("gen_ai.operation.name") for span in spans_of(got)]
    assert sorted(names) == ["chat", "invoke_agent"]
    monkeypatch.setenv(ADDRESSES[0], address)
    cli("serve", "--otel", "--project", str(project), code=2, said="Add --record")


@pytest.mark.parametrize("content", ["true", "false"])
def test_calls_of_a_tool_server_are_spans(project: Path, content: str) -> None:
    key, call = "sk-" + "a1" * 20, {"trajectory": content, "name": "calculator"}
    calls = [
        {**call, "key": str(n), "arguments": {"expression": text}}
        for n, text in enumerate(("2+3", key))
    ]
    words = f"tools serve --otel --set telemetry.content={content} --no-auth --port 0".split()
    with collector() as (address, got), serving(project, *words, **{ADDRESSES[0]: address}) as url:
        httpx2.post(f"{url}/v1/open", json={"trajectory": content}, timeout=None)
        for _ in range(2):  # a retry runs nothing
            answer = httpx2.post(f"{url}/v1/call", json={"calls": calls}, timeout=None)
            assert answer.json()["results"][0]["result"]["text"] == "5", answer.text
    right, wrong = sorted(spans_of(got), key=lambda span: span["is"]["gen_ai.tool.call.id"])
    assert right["name"] == wrong["name"] == "execute_tool calculator"
    assert right["is"]["gen_ai.conversation.id"] == content and "error.type" not in right["is"]
    assert wrong["is"]["error.type"] and key not in json.dumps(exports(got))
    assert right["is"].get("gen_ai.tool.call.result") == ("5" if content == "true" else None)


def test_the_receiver_takes_what_the_sdk_sends(
    agentrl: Callable[..., None],
    project: Path,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    db = str(tmp_path / "in.db")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with serving(tmp_path, "import", "otlp", "--listen", "0", "--db", db) as url:
        agentrl(url, *ROLLOUT, "4", *CONTENT)
    cli.folder = project
    ours, theirs = (
        sorted(str(row["reward"]) for row in cli.json("ls", *where, "--limit", "99"))
        for where in (("--run", "last"), ("--db", db))
    )
    assert len(theirs) == 4 and theirs == ours
