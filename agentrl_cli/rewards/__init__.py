"""Rewards: named parts with weights, one of them primary.

A part is a function of the episode and a context, sync or async, that returns a number, a `Scored` (number and an
explanation), or None if it does not apply. A None part is left out of the sum, with its weight; if it is the primary
one, the episode is ungraded. A function that raises is an EnvError: a crashing grader never scores zero. A sync
function runs in a thread: many episodes are graded at once, and its episode's deadline, or its own `timeout`, cuts it
off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from agentrl_cli.errors import AgentRLError, EnvError, describe_error
from agentrl_cli.hooks.threads import OwnTime, call, contain
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.rewards.adapt import adapt_reward
from agentrl_cli.rewards.context import RewardContext, Scored
from agentrl_cli.types import Episode, RewardPart

__all__ = ["Reward", "RewardContext", "Scored", "finite", "score"]


@dataclass(frozen=True, slots=True)
class Reward:
    """One part: `function(episode, ctx)` returns its value, which is multiplied by `weight`.

    A function with the signature of another project's is called as in that project (`registry.adapters`).
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    primary: bool = False
    timeout: float | None = None
    """Maximum seconds of one call, as the machine gave them; None: up to the episode's limit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", adapt_reward(self.function))


async def score(
    episode: Episode, rewards: Sequence[Reward], ctx: RewardContext
) -> tuple[RewardPart, ...]:
    """Return all reward parts of an episode, in order.

    Raises EnvError if a function raises, times out or returns something other than a finite number.
    """
    parts = []
    for reward in rewards:
        ctx.fakeable = False
        deadline = OwnTime(reward.timeout)
        try:
            async with deadline:
                with waiting(f"the grader {reward.name}"), contain(f"The reward {reward.name!r}"):
                    answer = await call(reward.function, episode, ctx)
                    part = None if answer is None else _part(reward, answer)
        except AgentRLError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                raise EnvError(
                    f"The reward {reward.name!r} took longer than {reward.timeout:g} s."
                ) from None
            raise EnvError(
                f"The reward {reward.name!r} raised {describe_error(error)}",
                hint="A failing grader masks its episodes: they are neither scored nor trained.",
            ) from error
        if part is not None:
            parts.append(replace(part, fakeable=part.fakeable or ctx.fakeable))
    return tuple(parts)


def _part(reward: Reward, answer: Any) -> RewardPart:
    if isinstance(
        answer, RewardPart
    ):  # with its own name and weight; the pack decides which part is primary
        return finite(replace(answer, primary=answer.primary or reward.primary))
    value, detail = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "")
    value = value.item() if hasattr(value, "item") else value  # numpy's and torch's scalars
    if not isinstance(value, Real) or not math.isfinite(value):
        raise EnvError(
            f"The reward {reward.name!r} returned {value!r}; a finite number is expected."
        )
    return RewardPart(reward.name, float(value), reward.weight, reward.primary, str(detail))


def finite(part: RewardPart) -> RewardPart:
    """Returns the part. Raises EnvError if its value is not finite, which would spread to every advantage."""
    if not math.isfinite(part.value):
        raise EnvError(
            f"The reward part {part.name!r} is {part.value!r}; a finite number is expected."
        )
    return part
