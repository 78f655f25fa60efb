"""Built-in rule-based rewards: numbers after `####`, required texts, HumanEval's tests. All are 0 or 1.

Named in task.yaml by path: `function: "agentrl_cli.rewards.rules:gsm8k"`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from agentrl_cli.errors import EnvError

if TYPE_CHECKING:
    from agentrl_cli.rewards import RewardContext, Scored
    from agentrl_cli.types import Episode

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)


def final_number(text: str) -> str | None:
    """The number after the last `####`, else the last one, without thousands separators; None if absent."""
    tail = text.rpartition("####")[2] if "####" in text else text
    found = _NUMBER.findall(tail)
    if not found:
        return None
    chosen: str = found[0] if "####" in text else found[-1]
    return chosen.replace(",", "")


def same_number(said: str | None, expected: str) -> bool:
    """True if both are the same number; `72` equals `72.0`."""
    try:
        return said is not None and abs(float(said) - float(expected.replace(",", ""))) < 1e-9
    except ValueError:
        return said == expected.strip()


def gsm8k(episode: Episode, ctx: RewardContext) -> Scored:
    """1 if the final number is the row's `answer` (or `ground_truth`)."""
    expected = _expected(ctx, "answer", "ground_truth")
    said = final_number(str(ctx.state.get("answer") or ctx.final_text))
    return ctx.part(float(same_number(said, str(expected))), f"said {said}, expected {expected}")


def contains(episode: Episode, ctx: RewardContext) -> Scored:
    """1 if every text of the row's `gt` occurs in the final turn, numbers as whole numbers (minimind's rule)."""
    wanted = _expected(ctx, "gt", "ground_truth", "answer")
    texts = [str(item) for item in (wanted if isinstance(wanted, list) else [wanted])]
    numbers = {number.replace(",", "") for number in _NUMBER.findall(ctx.final_text)}
    lost = [t for t in texts if not _occurs(t, ctx.final_text, numbers)]
    return ctx.part(float(not lost), f"missing {', '.join(lost)}" if lost else "")


def _occurs(wanted: str, text: str, numbers: set[str]) -> bool:
    if _NUMBER.fullmatch(wanted):
        return any(same_number(number, wanted) for number in numbers)
    return wanted.casefold() in text.casefold()


async def humaneval(episode: Episode, ctx: RewardContext) -> Scored:
    """1 if the final turn's code passes the row's `test` (HumanEval's `check(candidate)`), in a fresh sandbox.

    A function body continues the prompt's code; a whole function gets the imports and helpers that precede it in the
    prompt. HumanEval's checks are code in the solution's own process: the part is `fakeable`.
    """
    code, prompt = code_of(ctx.final_text), str(ctx.task.data.get("code_prompt") or "")
    entry, test = _expected(ctx, "entry_point"), _expected(ctx, "test")
    whole = f"def {entry}" in code
    before = prompt.partition(f"def {entry}")[0] if whole else prompt
    result = await ctx.grade(f"{before}{code}", [f"{test}\n\ncheck({entry})"])
    return ctx.part(result.score, "\n".join(result.failures)[-300:])


def code_of(text: str) -> str:
    """The last fenced block of a text, else the text."""
    found = _FENCE.findall(text)
    return str(found[-1]) if found else text


def environment(episode: Episode, ctx: RewardContext) -> Any:
    """`get_reward()` of a TRL environment."""
    world: Any = ctx.state.get("environment")
    if not hasattr(world, "get_reward"):
        raise EnvError("The episode has no environment with get_reward().")
    return world.get_reward()


def interaction(episode: Episode, ctx: RewardContext) -> float:
    """The last reward that the simulated user gave, 0 if absent."""
    feedback = ctx.state.get("feedback") or [0.0]
    return float(feedback[-1])


def _expected(ctx: RewardContext, *names: str) -> Any:
    for name in names:
        if ctx.task.data.get(name) is not None:
            return ctx.task.data[name]
    raise EnvError(f"The row {ctx.task.id} has no {' or '.join(names)}.")
