"""The tasks of a project that a chat offers and opens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.errors import NotFound
from agentrl_cli.types import Task
from agentrl_cli.types.content import content_text

OFFERED = 3
WIDTH = 200
"""Characters of a task's question that are sent."""


@dataclass
class Choices:
    """The tasks of a pack, and those offered last."""

    tasks: Sequence[Task]
    offered: list[Task] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def offer(self) -> list[dict[str, Any]]:
        """Return three tasks, of different families if there are some, as number, id and question."""
        pool = self._random.sample(list(self.tasks), len(self.tasks))
        families: dict[str, list[Task]] = {}
        for task in pool:
            families.setdefault(task.family, []).append(task)
        turns = [
            group[place]
            for place in range(OFFERED)
            for group in families.values()
            if place < len(group)
        ]
        self.offered = turns[:OFFERED]
        return [
            {
                "number": number,
                "id": short(task),
                "text": " ".join(content_text(task.prompt[-1]["content"]).split())[:WIDTH],
            }
            for number, task in enumerate(self.offered, 1)
        ]

    def find(self, wanted: str) -> Task:
        """Return a task by its number among those offered last, or its id. Raises NotFound."""
        if wanted.isdigit() and 1 <= int(wanted) <= len(self.offered):
            return self.offered[int(wanted) - 1]
        for task in self.tasks:
            if wanted in (task.id, short(task)):
                return task
        raise NotFound.of("task", wanted, [short(task) for task in self.tasks])


def short(task: Task) -> str:
    """Return a task's id without its pack."""
    return task.id.partition("/")[2] or task.id
