"""Runs the tasks of a verifiers taskset (0.4): its environment, tools and rewards, with the model at an address."""

from __future__ import annotations

import itertools
import os
from typing import Any

HERE = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""How a role plays unless its package or the options have another: a plain chat loop with the task's tools, here.
verifiers' own default gives the model a shell, on a machine elsewhere."""


class Taskset:
    """A taskset with the environment that its package has for it."""

    def __init__(self, config: dict[str, Any]) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils import loaders

        options = dict(config["options"])
        options["taskset"] = {"id": config["package"], **options.get("taskset", {})}
        kind = loaders.env_config_type(config["package"], options.get("id", ""))
        own = loaders.default_harness_id(config["package"])
        for role, pinned in agent_config_fields(kind()).items():
            default = dict(HERE) if own == "bash" else {"runtime": HERE["runtime"]}
            if pinned.harness is not None:
                default.pop("harness", None)
            options[role] = {**default, **options.get(role, {})}
        self.env = loaders.load_environment(loaders.resolve_env_config(options))
        self.tasks: list[Any] = []
        self._stream = iter(self.env.taskset)
        self.serving = self.env.serving

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """Return the tasks as rows. `sample` is a row's place in the taskset."""
        rows = []
        for place in range(limit):
            if (task := self._task(place)) is None:
                break
            data = task.data
            prompt = (
                [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
            )
            if isinstance(data.prompt, str):
                prompt.append({"role": "user", "content": data.prompt})
            else:
                prompt += [
                    {"role": one.role, "content": _text(one.content)} for one in data.prompt or ()
                ]
            if not any(one["role"] == "user" for one in prompt):
                prompt.append(
                    {
                        "role": "user",
                        "content": f"({data.name or 'the task'}: its environment opens)",
                    }
                )
            rows.append(
                {
                    "id": f"{data.id or data.name or place}-{place}",
                    "prompt": prompt,
                    "sample": place,
                }
            )
        return rows

    def _task(self, place: int) -> Any:
        """Return the task at that place of the stream; None after its end."""
        self.tasks += itertools.islice(self._stream, max(0, place + 1 - len(self.tasks)))
        return self.tasks[place] if place < len(self.tasks) else None

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Play one episode; return the mean reward of its trainable parts, None without one: it is ungraded."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        task = self._task(request["sample"])
        if task is None:
            raise ValueError(
                f"the taskset has no task {request['sample']}: its rows were made with other options"
            )
        name = f"AGENTRL_KEY_{request['id']}"
        os.environ[name] = request["api_key"]
        try:
            client = EvalClientConfig(base_url=request["base_url"], api_key_var=name)
            context = ModelContext(model=request["model"], client=client)
            episode = await self.env.run_episode(task, context)
        finally:
            del os.environ[name]
        problem = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if problem:
            raise RuntimeError(f"{problem[0].type}: {problem[0].message}")
        trained = [
            trace for trace in episode.traces if trace.agent is None or trace.agent.trainable
        ]
        return {
            "reward": sum(trace.reward for trace in trained) / len(trained) if trained else None
        }


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return " ".join(getattr(part, "text", f"[{part.type}]") for part in content or ())


WORKER, FORKED = Taskset, False
