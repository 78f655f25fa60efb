"""An episode as its agent sees it, and `emit_reward` for the agents themselves. Light: programs import it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real
from typing import Any

from agentrl_cli.errors import EnvError
from agentrl_cli.types import Task, Tokens, Turn

MODEL = "agentrl"
"""The model's name for agents. Any other name means the same model, as there is one in an episode."""
EVENT_URL, KEY = "AGL_EVENT_URL", "AGL_KEY"
POST_TIMEOUT = 60.0
"""Seconds to wait for the answer to a posted reward."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One episode as its agent sees it."""

    task: Task
    root: str
    """`http://127.0.0.1:PORT/e/KEY`"""
    api_key: str
    emit_reward: Callable[[float], None]
    """Sets the episode's reward; the last one counts."""
    attempt: int = 0
    """Number of the attempt at the task, from 0."""
    model: str = MODEL
    socket: str = ""
    """The unix socket that leads to the same server; empty unless the agent runs in a jail."""
    recorded: Callable[[], tuple[Sequence[Turn], Tokens]] | None = None
    """The episode so far, from any thread: its turns, and the tokens of their spans."""

    @property
    def base_url(self) -> str:
        """The address for an OpenAI client; Anthropic's adds `v1` itself and starts at `root`."""
        return f"{self.root}/v1"

    @property
    def event_url(self) -> str:
        return f"{self.root}/events"


CURRENT: ContextVar[AgentCall] = ContextVar("agentrl_agent_call")
"""The episode that the running code belongs to."""


def emit_reward(value: float) -> None:
    """Give the episode that calls this its reward. The last one counts, unless the agent returns one.

    Works in a function that runs as an agent, and in a program that an agent's command started. Raises ValueError
    for anything but a finite number, EnvError outside of an episode.
    """
    reward = reward_value(value)
    if call := CURRENT.get(None):
        call.emit_reward(reward)
        return
    url = os.environ.get(EVENT_URL)
    if not url:
        raise EnvError(
            "emit_reward was called outside of an episode.", hint=f"There is no {EVENT_URL} either."
        )
    import httpx2

    headers = {"authorization": f"Bearer {os.environ.get(KEY, '')}"}
    answer = httpx2.post(
        url, json={"reward": reward}, headers=headers, timeout=POST_TIMEOUT, trust_env=False
    )
    if answer.status_code != 200:
        raise EnvError(f"The reward was refused: {answer.status_code} {answer.text[:200]}")


def reward_value(value: Any) -> float:
    """Return a reward as a float. Raises ValueError for anything but a finite number."""
    real = isinstance(value, Real)
    if not (real and abs(value) <= sys.float_info.max):  # some whole numbers are larger
        raise ValueError(f"{value!r:.100} is not a reward: a finite number is")
    return float(value)
