"""Loggers: a run's metrics in TensorBoard, W&B, trackio or MLflow, besides the store, which always has them.

A logger works in a thread of its own, so that a slow server never delays a training; its first error is logged and
stops nothing. A library that is not installed is an error of the configuration, raised before anything starts.

To add one: a subclass of `Logger` here and a line in LOGGERS (hooks/__init__.py), or an object of your own as
`module:object` in `loggers:`.

`JsonlLogger` is an example of a hook without a thread: one JSON line per step and evaluation.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.errors import EnvironmentProblem
from agentrl_cli.hooks.base import Hook
from agentrl_cli.types import Episode, Turn
from agentrl_cli.types.content import content_text
from agentrl_cli.types.masking import mask

log = logging.getLogger("agentrl.hooks")

SHOWN = 4
"""Episodes of a step that W&B, trackio and MLflow show, each of another task."""
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


class TensorBoard(Logger):
    """Event files in `tensorboard/` of the run's folder: `tensorboard --logdir runs`."""

    name = library = "tensorboard"

    def open(self, run: Any) -> None:
        make = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        step = int(run.step)  # a resume rewrites the steps from its own on
        self.writer = make(
            str(Path(run.dir) / "tensorboard"), purge_step=step + 1 if step else None
        )
        lines = [f"    {key}: {value}" for key, value in flat(run.config).items()]
        self.writer.add_text("config", "\n".join(lines))

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self, error: BaseException | None) -> None:
        self.writer.close()


class Wandb(Logger):
    """Weights & Biases; the project is WANDB_PROJECT or "agentrl", and WANDB_MODE=offline keeps it on this machine."""

    name = library = "wandb"
    kept: tuple[Episode, ...] = ()
    """Episodes of the step so far that are shown with its numbers."""

    async def on_rollout_end(self, rollout: Episode, task: Any) -> None:
        if rollout.kind == "train" and not rollout.sample and len(self.kept) < SHOWN:
            self.kept = (*self.kept, rollout)

    def on_update(self, metrics: Mapping[str, float], step: int) -> None:
        shown, self.kept = self.kept, ()
        super().on_update(metrics, step)
        if shown and self._thread is not None:
            self._jobs.put(lambda: self.show(shown, step))

    def show(self, episodes: Sequence[Episode], step: int) -> None:
        """Show episodes; secrets are masked."""
        self.run.log({"episodes": self.value_of(episodes)}, step=step)

    def value_of(self, episodes: Sequence[Episode]) -> Any:
        """Return episodes in this library's form."""
        columns = ["episode", "task", "reward", "primary", "messages"]
        rows = [[*_facts(one).values(), json.dumps(_messages(one))] for one in episodes]
        return importlib.import_module(self.library).Table(columns=columns, data=rows)

    def open(self, run: Any) -> None:
        project = os.environ.get(f"{self.name.upper()}_PROJECT", "agentrl")
        init = importlib.import_module(self.library).init
        self.run = init(project=project, name=run.name, resume="allow", **self.describe(run))

    def describe(self, run: Any) -> dict[str, Any]:
        """Return what this library wants of a run besides its name."""
        return {"id": run.id, "dir": run.dir, "config": dict(run.config)}

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self, error: BaseException | None) -> None:
        self.run.finish(exit_code=0 if error is None else 1)


class Trackio(Wandb):
    """trackio, which stores its numbers locally: `trackio show`. The project is TRACKIO_PROJECT or "agentrl"."""

    name = library = "trackio"

    def describe(self, run: Any) -> dict[str, Any]:
        return {"config": flat(run.config)}

    def value_of(self, episodes: Sequence[Episode]) -> Any:
        make = importlib.import_module(self.library).Trace
        return [make(messages=_messages(one), metadata=_facts(one)) for one in episodes]

    def close(self, error: BaseException | None) -> None:
        self.run.finish()


def _facts(episode: Episode) -> dict[str, Any]:
    """Return the facts of an episode that was graded; its outcome is decided later."""
    facts = {"episode": episode.id, "task": episode.task_id}
    return {**facts, "reward": episode.reward, "primary": episode.primary}


def _messages(episode: Episode) -> list[dict[str, Any]]:
    """Return the main conversation with its calls, masked."""
    return [one for _, said in _by_turn(episode) for one in said]


def _by_turn(episode: Episode) -> Iterator[tuple[Turn, list[dict[str, Any]]]]:
    """Yield the turns of the main conversation with their messages, masked."""
    for turn in episode.chain(episode.main).turns:
        calls = [
            {"id": call.id, "type": "function",
             "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for call in turn.calls
        ]  # fmt: skip
        more = {"tool_calls": calls} if calls else {}
        yield (
            turn,
            [
                mask({**said, "content": content_text(said.get("content")), **more})
                for said in turn.messages
            ],
        )


class MLflow(Wandb):
    """MLflow; the server is MLFLOW_TRACKING_URI, the experiment MLFLOW_EXPERIMENT_NAME or "agentrl".

    Without a server the numbers and traces go into `mlruns/` beside the run's folder.
    """

    name = library = "mlflow"

    def open(self, run: Any) -> None:
        from mlflow.tracking import MlflowClient

        given = os.environ.get("MLFLOW_TRACKING_URI")
        if given is None:  # newer versions need the file store's explicit name
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.uri = given or (Path(run.dir).parent / "mlruns").absolute().as_uri()
        self.client: Any = MlflowClient(self.uri)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "agentrl")
        found = self.client.get_experiment_by_name(experiment)
        number = (
            found.experiment_id if found is not None else self.client.create_experiment(experiment)
        )
        self.experiment = number
        same = self.client.search_runs([number], f"tags.agentrl_id = '{run.id}'", max_results=1)
        if same:  # a resume continues the existing run
            self.id = same[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return
        tags = {"agentrl_id": run.id}
        self.id = self.client.create_run(number, run_name=run.name, tags=tags).info.run_id
        for key, value in flat(run.config).items():
            self.client.log_param(self.id, key, str(value)[:500])

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.client.log_metric(self.id, re.sub(r"[^\w./ -]", "_", name), value, step=step)

    def show(self, episodes: Sequence[Episode], step: int) -> None:
        """Log each episode as a trace, with a span for every turn and its reward parts as feedback."""
        mlflow = importlib.import_module("mlflow")
        mlflow.set_tracking_uri(self.uri)
        named = [(self._trace(mlflow.start_span_no_context, one, step), one) for one in episodes]
        mlflow.flush_trace_async_logging()
        for trace, episode in named:
            total = [] if episode.reward is None else [("reward", episode.reward)]
            for name, value in [*total, *((one.name, one.value) for one in episode.reward_parts)]:
                mlflow.log_feedback(trace_id=trace, name=name, value=value)

    def _trace(self, start: Callable[..., Any], episode: Episode, step: int) -> str:
        facts = {key: value for key, value in _facts(episode).items() if value is not None}
        root = start(
            "episode",
            span_type="AGENT",
            attributes=facts,
            metadata={"mlflow.sourceRun": self.id},
            tags={"agentrl.step": str(step)},
            experiment_id=self.experiment,
            start_time_ns=int(episode.started * 1e9),
        )
        before: list[Any] = []
        for turn, said in _by_turn(episode):
            kind = {"assistant": "CHAT_MODEL", "tool": "TOOL"}.get(turn.role)
            at = int((turn.started or episode.started) * 1e9)
            if kind is not None:
                span = start(turn.role, span_type=kind, parent_span=root, start_time_ns=at)
                span.set_inputs([*before])
                span.end(outputs=said, end_time_ns=at + int(turn.seconds * 1e9))
            before += said
        root.set_inputs(before[:1])
        root.end(outputs=before[-1:], end_time_ns=int(max(episode.ended, episode.started) * 1e9))
        return str(root.trace_id)

    def close(self, error: BaseException | None) -> None:
        self.client.set_terminated(self.id, "FINISHED" if error is None else "FAILED")


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
