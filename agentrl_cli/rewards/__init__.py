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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from agentrl_cli.errors import AgentRLError, EnvError
from agentrl_cli.rewards.adapt import adapted
from agentrl_cli.threads import call, contained
from agentrl_cli.types import Episode, RewardPart, Task
from agentrl_cli.types.content import content_text

if TYPE_CHECKING:
    from agentrl_cli.sandbox import GradeResult


class Scored(NamedTuple):
    """The value of a part, and what people should know of it."""

    value: float
    detail: str = ""


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


@dataclass
class RewardContext:
    """What a reward function may use: the task, the final text, the still open sandbox session, the tools' states."""

    task: Task
    final_text: str
    """Content of the last assistant turn; empty where there is none."""
    open_session: Callable[[], Any] | None = None
    """Coroutine function that gives the episode's sandbox session, opening it if need be."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What tools left for rewards, `answer` of `submit` for instance."""
    fakeable: bool = False
    """Whether `grade` ran tests beside the solution since the current part began."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Ids to the text that verl's reward functions see: special tokens left out."""

    def response(self, episode: Episode) -> str:
        """Everything after the prompt as one text, tool results included."""
        first = next((turn.start for turn in episode.turns if turn.role == "assistant"), len(episode.tokens))
        if self.decode is not None:
            return self.decode(episode.tokens.ids[first:].tolist())
        answers = [turn for turn in episode.turns if turn.start >= first]
        return "\n".join(content_text(m.get("content")) for turn in answers for m in turn.messages)

    def part(self, value: float, detail: str = "") -> Scored:
        """A value with a text for people."""
        return Scored(value, detail)

    async def session(self) -> Any:
        """The episode's sandbox session. Raises EnvError where the run has no sandbox."""
        if self.open_session is None:
            raise EnvError("This reward runs code, and the run has no sandbox.")
        return await self.open_session()

    async def grade(self, solution: str, tests: Sequence[Mapping[str, Any] | str], **options: Any) -> GradeResult:
        """Run hidden tests `{"call", "args", "expect"}` against a solution, in the sandbox and apart from it.

        `options`: `setup` (code that runs first), `wall` and `budget` (seconds of one test, of all), see
        sandbox/grading.py. Tests that run beside the solution make the part `fakeable`.
        Raises SandboxFault where the sandbox itself failed.
        """
        from agentrl_cli.sandbox import grade

        given = [test if isinstance(test, str) else dict(test) for test in tests]
        result = await grade(await self.session(), solution, given, **options)
        self.fakeable |= result.fakeable
        return result


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
