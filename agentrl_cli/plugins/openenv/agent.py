"""An OpenEnv environment: behind an address, in an image, or a class of a package.

solve = OpenEnv("http://127.0.0.1:8000").solve
solve = OpenEnv("docker:echo-env:latest").solve
solve = OpenEnv("echo_env.server.echo_environment:EchoEnvironment").solve
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

from agentrl_cli.agents.programs import ForeignWorld
from agentrl_cli.agents.runners.base import WorldFault
from agentrl_cli.errors import AgentRLError
from agentrl_cli.plugins.openenv.image import serve_image
from agentrl_cli.types import Task

IMAGE = "docker:"
"""Before the name of an image."""


class OpenEnv(ForeignWorld):
    """`options`: `goal`, the prompt's first sentences; `size`, the number of rows; anything else is for `reset`."""

    name = "openenv"
    needs = "websockets"
    shown = "openenv:http://127.0.0.1:8000, openenv:docker:IMAGE, or openenv:MODULE:CLASS"
    tested: ClassVar = {"openenv": "0.10.0"}
    imports_here: ClassVar = True
    image = ""
    limits: ClassVar = {"max_turns": 16, "max_new_tokens": 96, "max_tokens": 4096}

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """Return the first rows. Raises NotFound, SandboxUnavailable, MissingDependency, EnvError."""
        self._serve()
        return super().rows(limit)

    async def solve(
        self, task: Task, base_url: str, api_key: str, model: str, attempt: int = 0
    ) -> float | dict[str, float] | None:
        """Play a row. Raises MissingDependency, WorldFault."""
        try:
            await asyncio.to_thread(self._serve)
        except AgentRLError as error:  # of the engine or the image, never of the model
            raise WorldFault(error.message, hint=error.hint) from error
        return await super().solve(task, base_url, api_key, model, attempt)

    def _serve(self) -> None:
        """Put the address of an image's container in its place; of a new one if it has ended."""
        kind, python, text = self._started
        config = json.loads(text)
        if config["package"].startswith(IMAGE):
            self.image = config["package"].removeprefix(IMAGE)
        if self.image:
            config["package"] = serve_image(self.image)
            self._started = kind, python, json.dumps(config)
