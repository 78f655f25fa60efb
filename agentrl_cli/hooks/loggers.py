"""Loggers: a run's metrics elsewhere, besides the store, which always has them.

A logger works in a thread of its own, so that a slow server never delays a training; its first error is logged and
stops nothing. A library that is not installed is an error of the configuration, raised before anything starts.

To add one: a subclass of `Logger` that a plugin offers as one of its `loggers`, or an object of your own as
`module:object` in `loggers:`.

`JsonlLogger` is an example of a hook without a thread: one JSON line per step and evaluation.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl_cli.errors import EnvironmentProblem
from agentrl_cli.hooks.base import Hook
from agentrl_cli.registry.old_modules import keep_old_names

log = logging.getLogger("agentrl.hooks")

PATIENCE = 60.0
"""Seconds without progress after which a logger is abandoned at the end of a run; the setting is `logger_seconds`."""


class Logger(Hook):
    """Base: `open`, `write` and `close` run in order in the logger's own thread."""

    name = "logger"
    library = ""
    """The module that must be installed; an extra of agentrl-cli has its name."""
    patience = PATIENCE
    """Seconds that the end of a run waits for one job; a logger that finishes jobs is waited for."""

    def __init__(self) -> None:
        """Raises EnvironmentProblem if the library is not installed."""
        if self.library and importlib.util.find_spec(self.library) is None:
            raise EnvironmentProblem(
                f"The logger {self.name} needs {self.library}, which is not installed.",
                hint=f"pip install 'agentrl-cli[{self.library}]', or remove {self.name} from `loggers`.",
            )
        self.failed = ""
        """The first error, or ""."""
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._progress = threading.Event()

    # For subclasses

    def open(self, run: Any) -> None:
        """Start logging; `run` is the run's row (name, id, dir, config, step)."""

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Log finite numbers of a step, or of an evaluation after it (`eval/…`)."""

    def close(self, error: BaseException | None) -> None:
        """Finish, whether the run failed or not."""

    # Events

    def on_run_start(self, run: Any) -> None:
        if self._thread is None and run is not None:
            name = f"agentrl-{self.name}"
            self._thread = threading.Thread(target=self._work, args=(run,), name=name, daemon=True)
            self._thread.start()

    def on_update(self, metrics: Mapping[str, float], step: int) -> None:
        self._put(finite(metrics), step)

    def on_eval(self, result: Any, step: int) -> None:
        numbers = {"eval/solved": result.pass_rate}
        for split, found in result.report()["splits"].items():
            numbers |= {f"eval/{split}/{name}": value for name, value in found.items()}
        self._put(finite(numbers), step)

    def on_run_end(self, run: Any, error: BaseException | None) -> None:
        if self._thread is None:
            return
        self._jobs.put(lambda: self.close(error))
        self._jobs.put(None)
        while self._thread.is_alive() and self._progress.wait(self.patience):
            self._progress.clear()
            if not (left := self._jobs.qsize()):
                self._thread.join(self.patience)
                break
            log.info("the logger %s has %d jobs left", self.name, left)
        if self._thread.is_alive():
            text = f"no progress for {self.patience:g} s with {self._jobs.qsize()} jobs left, abandoned"
            self._report(TimeoutError(f"{text}; `logger_seconds` sets the limit"))
        self._thread = None

    def _put(self, metrics: Mapping[str, float], step: int) -> None:
        if metrics and self._thread is not None:
            self._jobs.put(lambda: self.write(metrics, step))

    def _work(self, run: Any) -> None:
        opened = self._attempt(lambda: self.open(run))
        while (job := self._jobs.get()) is not None:
            if opened:
                self._attempt(job)
            self._progress.set()
        self._progress.set()

    def _attempt(self, job: Callable[[], None]) -> bool:
        """Whether a job succeeds; its error is reported."""
        try:
            job()
        except Exception as error:  # noqa: BLE001 - a logger's error never ends the run; it is logged once
            self._report(error)
            return False
        return True

    def _report(self, error: Exception) -> None:
        if not self.failed:
            self.failed = f"{type(error).__name__}: {error}"
            log.warning(
                "the logger %s failed (%s); the run continues, and the store has everything",
                self.name,
                self.failed,
            )


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among metrics."""
    numbers = {
        k: float(v)
        for k, v in metrics.items()
        if isinstance(v, (int, float)) and not isinstance(v, bool)
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration under dotted keys."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        out |= flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return out


def nest(given: Mapping[str, Any], *, gaps: bool = False) -> dict[str, Any] | list[Any]:
    """Return values under dotted keys as nested ones, and those under 0, 1, 2 … as a list: the inverse of `flat`.

    `gaps`: other numbers make a list, too, in their order.
    """
    root: dict[str, Any] = {}
    for key, value in given.items():
        *path, leaf = key.split(".")
        place = root
        for part in path:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[leaf] = value
    found: dict[str, Any] | list[Any] = _with_lists(root, gaps)
    return found


def _with_lists(node: Any, gaps: bool) -> Any:
    if not isinstance(node, dict) or not node:
        return node
    inner = {key: _with_lists(value, gaps) for key, value in node.items()}
    if not all(str(key).isdecimal() for key in inner):  # a value may have keys that are numbers
        return inner
    keys = sorted(inner, key=int)
    listed = gaps or keys == [str(index) for index in range(len(keys))]
    return [inner[key] for key in keys] if listed else inner


class JsonlLogger(Hook):
    """Appends to `path`, or to metrics.jsonl in the folder of the run (`run.dir`); without either it writes nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on_run_start(self, run: Any) -> None:
        if self.path is None and run is not None and run.dir:
            self.path = Path(run.dir) / "metrics.jsonl"

    def on_update(self, metrics: Mapping[str, float], step: int) -> None:
        self._write({"step": step, **metrics})

    def on_eval(self, result: Any, step: int) -> None:
        self._write({"step": step, "eval": result.report()})

    def _write(self, row: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        plain = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain, default=str, ensure_ascii=False) + "\n")


keep_old_names(__name__)
