"""Metrics reach the libraries, and a library that is missing is named."""

import asyncio
import importlib.util
import itertools
import json
import sqlite3
import struct
import sys
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import EnvironmentProblem, NotFound
from agentrl_cli.hooks import LOGGERS, load_hooks
from agentrl_cli.hooks.loggers import Logger
from agentrl_cli.plugins.trackers.loggers import MLflow, TensorBoard, Trackio, Wandb
from agentrl_cli.registry import names
from agentrl_cli.types import Episode, RewardPart, ToolCall, Turn
from tests.hooks.test_hooks import drive, run_in


def test_tensorboard_files(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoard()
    drive(logger, run_in(tmp_path))
    assert logger.failed == ""
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.5), (2, 0.75)]
    assert [(e.step, e.value) for e in events.Scalars("eval/solved")] == [(1, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("eval/test/tool_rate")] == [(1, 0.5)]
    assert "loss" not in events.Tags()["scalars"]


class FakeRun:
    """A stand-in for the run objects of wandb and trackio."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ended: list[dict[str, Any]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def finish(self, **given: Any) -> None:
        self.ended.append(given)


@pytest.mark.parametrize(("cls", "name"), [(Wandb, "wandb"), (Trackio, "trackio")])
def test_wandb_and_trackio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[Logger], name: str
) -> None:
    made: list[FakeRun] = []
    fake: Any = types.ModuleType(name)
    fake.__spec__ = types.SimpleNamespace()

    def init(**given: Any) -> FakeRun:
        made.append(FakeRun(**given))
        return made[-1]

    fake.init = init
    monkeypatch.setitem(sys.modules, name, fake)  # the real one wants an account
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    drive(cls(), run_in(tmp_path), RuntimeError("x"))
    (run,) = made
    assert (
        run.given["project"] == "mine"
        and run.given["name"] == "name-1"
        and run.given["resume"] == "allow"
    )
    assert run.rows[0] == (1, {"reward": 0.5, "facts/skipped:no_signal": 8.0})
    assert run.rows[1] == (1, {"eval/solved": 0.25, "eval/test/tool_rate": 0.5}) and run.rows[
        2
    ] == (
        2,
        {"reward": 0.75},
    )
    assert run.ended == [{"exit_code": 1} if name == "wandb" else {}]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Client:
        def __init__(self, uri: str) -> None:
            self.uri = uri
            self.calls: list[tuple[Any, ...]] = []
            made.append(self)

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return f"e-{name}"

        def search_runs(self, numbers: list[str], text: str, max_results: int) -> list[Any]:
            return []

        def create_run(self, number: str, **given: Any) -> Any:
            self.calls.append(("create", number, given))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **given: self.calls.append((name, *args, given))

    fake: Any = types.ModuleType("mlflow")
    fake.__spec__ = types.SimpleNamespace()
    tracking: Any = types.ModuleType("mlflow.tracking")
    tracking.MlflowClient = Client
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # the tests do not install the real one
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "run").mkdir()
    drive(MLflow(), run_in(tmp_path / "run"))
    (client,) = made
    assert client.uri == (tmp_path / "mlruns").as_uri()
    assert client.calls[0] == (
        "create",
        "e-agentrl",
        {"run_name": "name-1", "tags": {"agentrl_id": "id1"}},
    )
    assert ("log_param", "r1", "train.lr", "0.1", {}) in client.calls
    assert ("log_metric", "r1", "facts/skipped_no_signal", 8.0, {"step": 1}) in client.calls
    assert client.calls[-1] == ("set_terminated", "r1", "FINISHED", {})


def test_a_library_that_is_missing_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # some are installed here
    for name in ("tensorboard", "wandb", "trackio", "mlflow"):
        with pytest.raises(EnvironmentProblem, match=f"logger {name} needs {name}") as caught:
            load_hooks([], loggers=[name])
        assert f"agentrl-cli[{name}]" in (caught.value.hint or "")
    with pytest.raises(NotFound, match="logger named 'tensorbord'"):
        load_hooks([], loggers=["tensorbord"])
    found = names("loggers", LOGGERS)
    assert {"jsonl", "tensorboard", "wandb", "trackio", "mlflow"} <= set(found)


# --- the real packages, offline: what they wrote is read back ---


EXPECTED = {
    ("reward", 1, 0.5),
    ("reward", 2, 0.75),
    ("eval/solved", 1, 0.25),
    ("eval/test/tool_rate", 1, 0.5),
}


# Seconds that a step of wandb may take on a busy machine: its service is a process of its own.
SLOW = 100.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", str(SLOW))
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", str(SLOW))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    return tmp_path / "runs" / "a"


SHOWN = Episode(
    "e1",
    "t",
    kind="train",
    turns=(Turn(0, "user", ({"role": "user", "content": "key sk-" + "a1" * 20},), 0, 0),),
    reward_parts=(RewardPart("exact", 1.0, primary=True),),
)


def leveldb_records(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes, which counts as part of a block."""
    at, joined = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + size > len(data):
            return  # it is being written
        joined += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield joined
            joined = b""


def test_wandb_offline(folder: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    logger = Wandb()
    logger.patience = SLOW
    asyncio.run(logger.on_rollout_end(SHOWN, None))
    drive(logger, run_in(folder))
    assert logger.failed == ""
    records: list[Any] = []
    while not any(r.WhichOneof("record_type") == "exit" for r in records):
        time.sleep(0.1)  # wandb's own process may write the file after `finish` has returned
        records = []
        written = [path.read_bytes() for path in folder.glob("wandb/offline-run-*/*.wandb")]
        for data in itertools.chain.from_iterable(map(leveldb_records, written)):
            records.append(wandb_internal_pb2.Record())
            records[-1].ParseFromString(data)
    exits = [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"]
    seen = set()
    for record in records:
        items = {
            item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
        }
        seen |= {
            (name, int(items["_step"]), float(value))
            for name, value in items.items()
            if name[0] != "_" and not name.startswith("episodes")
        }
    assert seen >= EXPECTED and exits == [0]
    (table,) = folder.rglob("episodes_*.table.json")
    messages = json.dumps([{"role": "user", "content": "key [masked:api-key]"}])
    assert json.loads(table.read_text())["data"] == [["e1", "t", 1.0, 1.0, messages]]


@pytest.mark.filterwarnings("ignore:.*Any type hint:UserWarning")  # of a part that is loaded late
def test_mlflow_files(folder: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from mlflow.tracking import MlflowClient

    logger = MLflow()
    calls = (ToolCall("c1", "look", {"q": "x"}, ""),)
    asked = Turn(1, "assistant", ({"role": "assistant", "content": ""},), 0, 0, calls=calls)
    answered = Turn(2, "tool", ({"role": "tool", "content": "key sk-" + "b2" * 20},), 0, 0)
    long = SHOWN.with_(turns=(*SHOWN.turns, asked, answered), started=1e9, ended=1e9 + 2)
    for episode in (long, SHOWN.with_(kind="eval"), SHOWN.with_(sample=1)):
        asyncio.run(logger.on_rollout_end(episode, None))
    drive(logger, run_in(folder), RuntimeError("x"))
    assert logger.failed == ""
    client = MlflowClient((folder.parent / "mlruns").as_uri())
    number = client.get_experiment_by_name("agentrl").experiment_id
    (run,) = client.search_runs([number])
    found = [m for key in run.data.metrics for m in client.get_metric_history(run.info.run_id, key)]
    seen = {(m.key, m.step, m.value) for m in found}
    assert seen >= EXPECTED and run.info.status == "FAILED" and run.data.params["train.lr"] == "0.1"
    (trace,) = client.search_traces(locations=[number])
    scores = {one.name: one.value for one in trace.info.assessments}
    assert scores == {"reward": 1.0, "exact": 1.0}
    assert trace.info.trace_metadata["mlflow.sourceRun"] == run.info.run_id
    spans = {span.span_type: span for span in trace.data.spans}
    assert {*spans} == {"AGENT", "CHAT_MODEL", "TOOL"} and spans["AGENT"].attributes[
        "episode"
    ] == "e1"
    texts = json.dumps([[span.inputs, span.outputs] for span in trace.data.spans])
    assert texts.count("[masked:api-key]") > 1 and "sk-" not in texts and "look" in texts


def test_trackio_files(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    logger = Trackio()
    for episode in (SHOWN, SHOWN.with_(kind="eval"), SHOWN.with_(sample=1)):
        asyncio.run(logger.on_rollout_end(episode, None))
    drive(logger, run_in(folder))
    assert logger.failed == ""
    (path,) = (tmp_path / "trackio").rglob("agentrl*.db")
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        ((messages, about),) = db.execute("SELECT messages, metadata FROM traces").fetchall()
    assert json.loads(about)["episode"] == "e1" and json.loads(about)["reward"] == 1.0
    assert json.loads(messages) == [{"role": "user", "content": "key [masked:api-key]"}]
    seen = {
        (name, step, value) for _, step, text in rows for name, value in json.loads(text).items()
    }
    assert seen >= EXPECTED and {row[0] for row in rows} == {"name-1"}
