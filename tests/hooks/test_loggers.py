"""Loggers: what reaches the libraries, and that a failing or hanging one never stops a run and is reported once."""

import importlib.util
import logging
import math
import sys
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config import Config
from agentrl_cli.errors import EnvironmentProblem, NotFound
from agentrl_cli.hooks import LOGGERS, load_hooks
from agentrl_cli.hooks.loggers import Logger, MLflow, TensorBoard, Trackio, Wandb, finite, flat
from agentrl_cli.rollout.parts import open_parts
from agentrl_cli.store import RunRow
from tests.helpers.train import trainer_of

RUN = RunRow(
    "id1",
    "name-1",
    config={"train": {"lr": 0.1, "optimizer": {"betas": [0.9, 0.95]}}, "seed": 3, "rewards": {}},
)
METRICS: dict[str, Any] = {
    "reward": 0.5,
    "facts/skipped:no_signal": 8.0,
    "loss": math.nan,
    "word": "no",
    "yes": True,
}


class Result:
    """What an evaluation hands over."""

    pass_rate = 0.25

    def report(self) -> dict[str, Any]:
        return {"splits": {"test": {"tool_rate": 0.5, "families": {}}}}


def drive(logger: Logger, run: RunRow, error: BaseException | None = None) -> None:
    """A run of two steps with an evaluation, as the trainer calls it."""
    logger.on_run_start(run)
    logger.on_update(METRICS, 1)
    logger.on_eval(Result(), 1)
    logger.on_update({"reward": 0.75}, 2)
    logger.on_run_end(run, error)


def run_in(folder: Path) -> RunRow:
    return RunRow(RUN.id, RUN.name, dir=str(folder), config=RUN.config)


def test_numbers_and_flat_settings() -> None:
    assert finite(METRICS) == {"reward": 0.5, "facts/skipped:no_signal": 8.0}
    assert flat(RUN.config) == {
        "train.lr": 0.1,
        "train.optimizer.betas": [0.9, 0.95],
        "seed": 3,
        "rewards": {},
    }


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
        self.given, self.rows, self.ended = given, [], []  # type: ignore[var-annotated]

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
            self.uri, self.calls = uri, []  # type: ignore[var-annotated]
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


class Broken(Logger):
    """Fails at everything after it was opened."""

    name = "broken"

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        raise ConnectionError("no server")

    def close(self, error: BaseException | None) -> None:
        raise ConnectionError("still none")


class NeverOpen(Logger):
    name = "closed"

    def open(self, run: Any) -> None:
        raise PermissionError("no key")

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        raise AssertionError("it was never opened")


class Hanging(Logger):
    name = "hanging"

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self.go.wait()


async def test_a_logger_that_fails_or_cannot_be_made_never_stops_a_run(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(
        "class Unmade:\n    def __init__(self):\n        raise RuntimeError('no account')\n"
        "class Good:\n    seen = []\n    def on_update(self, metrics, step):\n        self.seen.append(step)\n"
    )
    with caplog.at_level(logging.WARNING, "agentrl.hooks"):
        hooks = load_hooks([], tmp_path, loggers=["mine.py:Unmade", "mine.py:Good"]).hooks
        loggers = [*hooks, Broken(), NeverOpen()]
        async with trainer_of(tmp_path / "p", model, loggers, train={"steps": 2}) as trainer:
            run = await trainer.train()
            assert (run.status, run.step) == ("finished", 2)
            assert len(trainer.store.runs.steps(run.id)) == 2
    (good,) = hooks
    assert type(good).__name__ == "Good" and vars(type(good))["seen"] == [1, 2]
    reported = [record.getMessage() for record in caplog.records if record.name == "agentrl.hooks"]
    assert len(reported) == 3, "each is reported once"
    assert "mine.py:Unmade cannot be created (RuntimeError: no account)" in caplog.text
    assert "broken failed (ConnectionError: no server)" in caplog.text
    assert "closed failed (PermissionError: no key)" in caplog.text


class Slow(Logger):
    """Takes longer for all of a run's writes than it is given for one."""

    name = "slow"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        time.sleep(0.15)
        self.steps.append(step)

    def close(self, error: BaseException | None) -> None:
        self.steps.append(-1)


async def test_a_slow_logger_is_caught_up_within_the_configured_patience(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"from {__name__} import Slow\n")
    config = Config(logger_seconds=0.5)
    async with open_parts(config, tmp_path, packs=[], loggers=["mine.py:Slow"]) as parts:
        (slow,) = [hook for hook in parts.hooks.hooks if isinstance(hook, Slow)]
        assert slow.patience == 0.5
        slow.on_run_start(RUN)
        for step in range(1, 7):
            slow.on_update({"reward": 1.0}, step)
        slow.on_run_end(RUN, None)
    assert slow.steps == [1, 2, 3, 4, 5, 6, -1] and slow.failed == ""


def test_a_hanging_logger_holds_nothing_up() -> None:
    logger = Hanging()
    logger.patience = 0.2
    drive(logger, RUN)
    assert "abandoned" in logger.failed
    logger.go.set()


def test_a_library_that_is_missing_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # some are installed here
    for name in ("tensorboard", "wandb", "trackio", "mlflow"):
        with pytest.raises(EnvironmentProblem, match=f"logger {name} needs {name}") as caught:
            load_hooks([], loggers=[name])
        assert f"agentrl-cli[{name}]" in (caught.value.hint or "")
    with pytest.raises(NotFound, match="logger named 'tensorbord'"):
        load_hooks([], loggers=["tensorbord"])
    assert set(LOGGERS) == {"jsonl", "tensorboard", "wandb", "trackio", "mlflow"}
