"""Calls of a project's environment: in the event loop if it is asynchronous, else in a thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agentrl_cli.envs.tool_env import AssistantTurn, Env, Step
from agentrl_cli.hooks.threads import contain, in_thread, is_async
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.types import Message, Task


async def run_reset(env: Env, task: Task) -> list[Message]:
    """Return the first messages of an episode. Raises EnvError if the environment's code would end the process."""
    with contain("The environment"), waiting("the environment's reset"):
        messages: list[Message] = await _value(env.reset, task)
        return messages


async def run_step(env: Env, turn: AssistantTurn) -> Step:
    """Return the environment's answer to a turn. Raises EnvError if its code would end the process."""
    with contain("The environment"), waiting("the environment's step"):
        step: Step = await _value(env.step, turn)
        return step


async def _value(function: Callable[..., Any], *args: Any) -> Any:
    answer = function(*args) if is_async(function) else await in_thread(function, *args)
    return await answer if inspect.isawaitable(answer) else answer
