"""A run's metrics, and episodes of each step, in TensorBoard, W&B, trackio or MLflow."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.hooks.loggers import Logger, flat
from agentrl_cli.types import Episode, Turn
from agentrl_cli.types.content import content_text
from agentrl_cli.types.masking import mask

SHOWN = 4
"""Episodes of a step that W&B, trackio and MLflow show, each of another task."""


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
