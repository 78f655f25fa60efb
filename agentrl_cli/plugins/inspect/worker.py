"""Runs the samples of an Inspect task: its solver, tools, sandbox and scorers, with the model at an address."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class InspectTask:
    """A task of a package, or of a file."""

    def __init__(self, config: dict[str, Any]) -> None:
        import openai  # noqa: F401 - Inspect asks the model through it
        from inspect_ai._eval.loader import load_tasks
        from inspect_ai._util.registry import registry_lookup

        package, name, self.score = config["package"], config["task"], config["score"]
        spec = package + ("@" if package.endswith(".py") else "/") * bool(name) + name
        tasks = load_tasks([spec], config["options"])
        if len(tasks) != 1:
            raise ValueError(f"{spec} means {len(tasks)} tasks: name one, {package}@TASK")
        maker = registry_lookup("task", spec)
        taken = inspect.signature(maker).parameters if callable(maker) else config["options"]
        if unknown := set(config["options"]) - set(taken):  # which Inspect ignores
            raise ValueError(
                f"{spec} has no argument {unknown.pop()}; it has {', '.join(taken) or 'none'}"
            )
        self.task = tasks[0]
        self.samples = list(self.task.dataset)

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """Return the samples as rows. `sample` is a row's place in the dataset."""
        rows = []
        for place, sample in enumerate(self.samples[:limit]):
            given = sample.input
            texts = (
                given
                if isinstance(given, str)
                else [{"role": one.role, "content": one.text} for one in given]
            )
            rows.append({"id": f"{sample.id or place}", "prompt": texts, "sample": place})
        return rows

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Play one sample, with one epoch; return the value of its first scorer, or of the one that is named."""
        from inspect_ai.dataset import MemoryDataset
        from inspect_ai.scorer import value_to_float

        self.task.dataset = MemoryDataset([self.samples[request["sample"]]])
        scores = await play(self.task, request)
        name, _, key = self.score.partition("/")
        if name and name not in scores:
            raise ValueError(f"no scorer {name}: the task has {', '.join(scores)}")
        value = scores[name or next(iter(scores))].value
        if isinstance(value, dict):
            value = value[key or next(iter(value))]
        return {"reward": value_to_float()(value)}

    def rehearse(self) -> None:
        """Run a task of one question, with a constant model, so that Inspect does its late imports now."""
        from inspect_ai import Task
        from inspect_ai.dataset import MemoryDataset, Sample
        from inspect_ai.scorer import match
        from inspect_ai.solver import generate

        os.environ["NO_PROXY"] = "127.0.0.1"
        server = HTTPServer(("127.0.0.1", 0), Parrot)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        task = Task(
            dataset=MemoryDataset([Sample(input="Say 2.", target="2")]),
            solver=generate(),
            scorer=match(),
        )
        request = {
            "model": "m",
            "base_url": f"http://127.0.0.1:{server.server_port}/v1",
            "api_key": "none",
        }
        asyncio.run(play(task, request))


class Parrot(BaseHTTPRequestHandler):
    """A model that says 2."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "2"},
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


async def play(task: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the scores of a task's one sample, by their scorers' names."""
    from inspect_ai import eval_async
    from inspect_ai.model import get_model

    model = get_model(
        f"openai/{request['model']}",
        base_url=request["base_url"],
        api_key=request["api_key"],
        responses_api=False,
    )
    with tempfile.TemporaryDirectory(prefix="agentrl-inspect-") as folder:
        (log,) = await eval_async(
            task,
            model=model,
            epochs=1,
            log_dir=folder,
            log_level="error",
            score_display=False,
            ctl_server=False,
        )
        sample = (log.samples or [None])[0]  # read from the folder
    problem = sample.error if sample is not None and sample.error else log.error
    if problem is not None:
        raise RuntimeError(problem.message)
    scores = sample.scores if sample is not None else None
    if not scores:
        raise ValueError("the task has no scorer")
    return dict(scores)


WORKER, FORKED = InspectTask, True
