"""Rewards: named parts with weights, one of them primary.

A part is a function of the episode and a context, sync or async, that returns a number, a `Scored` (number and a text
for people), or None where it does not apply. A part that is None is left out of the sum, with its weight; where it is
the primary one, the episode is ungraded. A function that raises makes an EnvError: a grader that crashes never scores
zero. A sync function runs in a thread: many episodes are graded at once, and its episode's deadline, or its own
`timeout`, cuts it off.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from agentrl_cli.errors import AgentRLError, EnvError
from agentrl_cli.rewards.adapt import adapted
from agentrl_cli.rewards.context import RewardContext, Scored
from agentrl_cli.threads import call, contained
from agentrl_cli.types import Episode, RewardPart

__all__ = ["Reward", "RewardContext", "Scored", "finite", "score"]


@dataclass(frozen=True, slots=True)
class Reward:
    """One part: `function(episode, ctx)` gives its value, which counts `weight` times.

    Functions in verl's signature (data_source, solution_str, ground_truth, extra_info) or TRL's (prompts, completions,
    …) are called as they are there.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    primary: bool = False
    timeout: float | None = None
    """Seconds of one call; None: as long as the episode may take."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", adapted(self.function))


async def score(episode: Episode, rewards: Sequence[Reward], ctx: RewardContext) -> tuple[RewardPart, ...]:
    """Every part of an episode, in order.

    Raises EnvError where a function raises, takes too long or answers something that is no finite number.
    """
    parts = []
    for reward in rewards:
        ctx.fakeable = False
        deadline = asyncio.timeout(reward.timeout)
        try:
            async with deadline:
                with contained(f"The reward {reward.name!r}"):
                    answer = await call(reward.function, episode, ctx)
        except AgentRLError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                raise EnvError(f"The reward {reward.name!r} took longer than {reward.timeout:g} s.") from None
            raise EnvError(
                f"The reward {reward.name!r} raised {type(error).__name__}: {error}",
                hint="A grader that fails masks its episodes: they are neither scored nor trained.",
            ) from error
        if answer is not None:
            part = _part(reward, answer)
            parts.append(replace(part, fakeable=part.fakeable or ctx.fakeable))
    return tuple(parts)


def _part(reward: Reward, answer: Any) -> RewardPart:
    if isinstance(answer, RewardPart):  # with a name and a weight of its own; what is primary says the pack
        return finite(replace(answer, primary=answer.primary or reward.primary))
    value, detail = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "")
    if isinstance(value, np.bool_):
        value = bool(value)
    if not isinstance(value, Real) or not math.isfinite(value):
        raise EnvError(f"The reward {reward.name!r} answered {value!r}; a finite number is expected.")
    return RewardPart(reward.name, float(value), reward.weight, reward.primary, str(detail))


def finite(part: RewardPart) -> RewardPart:
    """The part itself. Raises EnvError where its value is no finite number: it would make every advantage one, too."""
    if not math.isfinite(part.value):
        raise EnvError(f"The reward part {part.name!r} is {part.value!r}; a finite number is expected.")
    return part
