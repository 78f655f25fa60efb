"""What a runner gets and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentrl_cli.agents.emit import AgentCall
from agentrl_cli.errors import EnvError
from agentrl_cli.tasks import AgentSpec


@dataclass(frozen=True, slots=True)
class Ended:
    """How an agent ended."""

    reward: float | None = None
    """What it returned; None if it returned none."""
    error: str = ""
    """What it raised, or its exit status; empty if it ended well."""
    stderr: str = ""
    """The end of what it wrote there."""


class AgentLost(EnvError):
    """An agent elsewhere died: its episode begins again with another one."""


class Runner(Protocol):
    """Runs one kind of agent."""

    async def run(self, call: AgentCall) -> Ended:
        """Run the agent to its end. Cancelled, it stops the agent as far as that can be done."""
        ...

    @property
    def stderr(self) -> str:
        """The end of what an agent that was stopped had written; empty if its kind has no stream of its own."""
        ...


MakeRunner = Callable[[AgentSpec], Runner]
