"""Loggers: a failing or hanging one never stops a run and is reported once."""

import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config import Config
from agentrl_cli.hooks import load_hooks
from agentrl_cli.hooks.loggers import Logger, finite, flat
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


class Broken(Logger):
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
