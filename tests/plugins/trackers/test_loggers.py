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
from collections.abc import Iterator
from contextlib import closing
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
    tags = events.Tags()["scalars"]
    seen = {(tag, e.step, e.value) for tag in tags for e in events.Scalars(tag)}
    assert seen == EXPECTED | {("facts/skipped:no_signal", 1, 8.0)}, "a loss of NaN is left out"


class Fake:
    """A stand-in for an object of a library: remembers calls, and answers them from `answers`."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            self.calls.append((name, *args, given))
            return self.answers.get(name)

        return call


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Put a module in place of a library that the tests do not install, or that wants an account."""
    fake: Any = types.ModuleType(name)
    vars(fake).update(members, __spec__=types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, fake)


@pytest.mark.parametrize(("cls", "name"), [(Wandb, "wandb"), (Trackio, "trackio")])
def test_wandb_and_trackio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[Logger], name: str
) -> None:
    run = Fake()
    library = Fake(init=run)
    install(monkeypatch, name, init=library.init)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    drive(cls(), run_in(tmp_path), RuntimeError("x"))
    [(_, given)] = library.calls
    assert {"project": "mine", "name": "name-1", "resume": "allow"}.items() <= given.items()
    assert run.calls == [
        ("log", {"reward": 0.5, "facts/skipped:no_signal": 8.0}, {"step": 1}),
        ("log", {"eval/solved": 0.25, "eval/test/tool_rate": 0.5}, {"step": 1}),
        ("log", {"reward": 0.75}, {"step": 2}),
        ("finish", {"exit_code": 1} if name == "wandb" else {}),
    ]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    client = Fake(create_experiment="e-agentrl", search_runs=[], create_run=made)
    library = Fake(MlflowClient=client)
    install(monkeypatch, "mlflow")
    install(monkeypatch, "mlflow.tracking", MlflowClient=library.MlflowClient)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "run").mkdir()
    drive(MLflow(), run_in(tmp_path / "run"))
    assert library.calls == [("MlflowClient", (tmp_path / "mlruns").as_uri(), {})]
    assert client.calls[:4] == [
        ("get_experiment_by_name", "agentrl", {}),
        ("create_experiment", "agentrl", {}),
        ("search_runs", ["e-agentrl"], "tags.agentrl_id = 'id1'", {"max_results": 1}),
        ("create_run", "e-agentrl", {"run_name": "name-1", "tags": {"agentrl_id": "id1"}}),
    ]
    assert ("log_param", "r1", "train.lr", "0.1", {}) in client.calls
    assert ("log_metric", "r1", "facts/skipped_no_signal", 8.0, {"step": 1}) in client.calls
    assert client.calls[-1] == ("set_terminated", "r1", "FINISHED", {})


def test_a_library_that_is_missing_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # some are installed here
    libraries = {"tensorboard", "wandb", "trackio", "mlflow"}
    for name in libraries:
        with pytest.raises(EnvironmentProblem, match=f"logger {name} needs {name}") as caught:
            load_hooks([], loggers=[name])
        assert f"agentrl-cli[{name}]" in (caught.value.hint or "")
    with pytest.raises(NotFound, match="logger named 'tensorbord'"):
        load_hooks([], loggers=["tensorbord"])
    assert {"jsonl", *libraries} <= {*names("loggers", LOGGERS)}


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
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB__SERVICE_WAIT": str(SLOW),
        "WANDB_INIT_TIMEOUT": str(SLOW),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
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
    with closing(sqlite3.connect(path)) as db, db:
        rows = db.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        ((messages, about),) = db.execute("SELECT messages, metadata FROM traces").fetchall()
    assert json.loads(about)["episode"] == "e1" and json.loads(about)["reward"] == 1.0
    assert json.loads(messages) == [{"role": "user", "content": "key [masked:api-key]"}]
    seen = {
        (name, step, value) for _, step, text in rows for name, value in json.loads(text).items()
    }
    assert seen >= EXPECTED and {row[0] for row in rows} == {"name-1"}
