"""What if: an episode's recorded tool calls run again and compared, its rewards computed again, its beginning reused.

Pure of models: going on from a turn with a policy is server/whatif.py, in a process of its own. Results are stored as
children of the episode (kind `whatif`, `parent_id`, `parent_turn`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl_cli.algos.advantages import episode_advantage, grpo
from agentrl_cli.algos.inputs import AdvantageInput
from agentrl_cli.env import AssistantTurn, ToolEnv
from agentrl_cli.errors import UsageError
from agentrl_cli.rewards import Reward, RewardContext, score
from agentrl_cli.types import Episode, RewardPart, Task, Tokens, ToolResult, Turn

CUT_MARK = "[… "
"""How an observation begins the words that say how much of it was cut (rollout.cut_text)."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """One recorded call and what it answers now."""

    call: int
    """Its number in the episode, from 1."""
    turn: int
    """The assistant turn that made it."""
    name: str
    arguments: Mapping[str, Any] | None
    before: ToolResult | None
    """None where the episode ended before an answer was stored."""
    after: ToolResult

    @property
    def same(self) -> bool:
        """True where the answer is the recorded one, as far as that was stored."""
        return self.before is not None and same_answer(self.before, self.after)

    @property
    def diverged(self) -> str:
        """`diverged at call n`, with which and where; empty where the answer is the recorded one."""
        return "" if self.same else f"diverged at call {self.call} ({self.name}, turn {self.turn})"

    def diff(self) -> list[str]:
        """Lines of a unified diff of the two texts, without its heads; empty where they are the same."""
        if self.before is None or self.same:
            return []
        lines = difflib.unified_diff(self.before.text.splitlines(), self.after.text.splitlines(), lineterm="", n=1)
        return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def same_answer(before: ToolResult, after: ToolResult) -> bool:
    """Whether two answers agree: the class of failure and the text; of a cut one what is left of it."""
    if before.error != after.error:
        return False
    if not before.truncated or CUT_MARK not in before.text:
        return before.text == after.text
    head, _, rest = before.text.partition(CUT_MARK)
    tail = rest.partition("]")[2]
    return after.text.startswith(head) and after.text.endswith(tail)


async def rerun_calls(episode: Episode, env: ToolEnv, until: int | None = None) -> list[Rerun]:
    """Run the calls of the assistant turns before turn `until` (None: all) again, in order, in an env that was reset.

    Afterwards tools and sandbox session are in the state that the conversation left. Raises EnvError.
    """
    out: list[Rerun] = []
    said = 0
    for place, turn in enumerate(episode.turns):
        if turn.role != "assistant" or (until is not None and turn.index >= until):
            continue
        if turn.calls:
            after = (await env.step(AssistantTurn(_content(turn), turn.calls, said))).results
            answers = episode.turns[place + 1] if place + 1 < len(episode.turns) else None
            before = answers.results if answers is not None and answers.role == "tool" else ()
            for n, (call, result) in enumerate(zip(turn.calls, after, strict=True)):
                recorded = before[n] if n < len(before) else None
                out.append(Rerun(len(out) + 1, turn.index, call.name, call.arguments, recorded, result))
        said += 1
    return out


async def rescore(
    episode: Episode, rewards: Sequence[Reward], env: ToolEnv, task: Task, *, sandboxed: bool
) -> tuple[RewardPart, ...]:
    """The pack's reward parts computed again, after `rerun_calls` in the same env. Raises EnvError, SandboxFault."""
    said = [_content(turn) for turn in episode.turns if turn.role == "assistant"]
    session = env.context.session if sandboxed else None
    context = RewardContext(task, said[-1] if said else "", session, env.context.state)
    return await score(episode, rewards, context)


def beginning(episode: Episode, turn: int) -> tuple[list[Turn], list[Tokens]]:
    """The turns before turn `turn` with their tokens: ids, origins and numbers as they were stored.

    Raises UsageError where there is no such place, or where it is not the model that speaks next.
    """
    kept = [item for item in episode.turns if item.index < turn]
    if not kept or turn > len(episode.turns):
        last = max(len(episode.turns) - 1, 1)
        raise UsageError(f"There is nothing to go on from at turn {turn}.", hint=f"Turns 1 to {last} can be.")
    if turn < len(episode.turns) and episode.turns[turn].role != "assistant":
        places = ", ".join(str(item.index) for item in episode.turns if item.role == "assistant")
        raise UsageError(f"Turn {turn} is not the model's.", hint=f"The model's turns: {places or 'none'}.")
    return kept, [episode.tokens.slice(item.start, item.end) for item in kept]


def advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO's advantages of one group's rewards; zeros where all are equal."""
    n = len(rewards)
    x = AdvantageInput(np.asarray(rewards, np.float64), np.zeros(n, np.int64), np.ones(n, np.int64))
    return [float(value) for value in episode_advantage(grpo(x))]


def _content(turn: Turn) -> str:
    return str(turn.messages[0].get("content") or "") if turn.messages else ""
