"""Metrics reach the libraries, and a library that is missing is named."""

import importlib.util
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import EnvironmentProblem, NotFound
from agentrl_cli.hooks import LOGGERS, load_hooks
from agentrl_cli.hooks.loggers import Logger
from agentrl_cli.plugins.trackers.loggers import MLflow, TensorBoard, Trackio, Wandb
from agentrl_cli.registry import names
from tests.hooks.test_loggers import drive, run_in


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
    logger = cls()
    drive(logger, run_in(tmp_path), RuntimeError("x"))
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
    logger = MLflow()
    drive(logger, run_in(tmp_path / "run"))
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
