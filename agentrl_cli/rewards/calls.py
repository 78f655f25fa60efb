"""Whether a turn's calls are those that a row wants, whatever their order: BFCL's rule.

    ground_truth: [{"area": {"base": [10], "height": [5], "unit": ["cm", ""]}}]      a parameter to what it may be; ""
                                                                                     among them: it may be left out
    ground_truth: [{"name": "area", "arguments": {"base": 10, "height": 5}}]         the same, with one value for each

https://github.com/ShishirPatil/gorilla/tree/main/berkeley-function-call-leaderboard
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl_cli.errors import EnvError

if TYPE_CHECKING:
    from agentrl_cli.rewards import RewardContext, Scored
    from agentrl_cli.types import Episode

_LOOSE = re.compile(r"[ ,./\-_*^]")


def same_calls(episode: Episode, ctx: RewardContext) -> Scored:
    """1 if the first answer calls what the row's `ground_truth` wants, and nothing else; [] wants no call."""
    wanted = ctx.task.data.get("ground_truth")
    if not isinstance(wanted, list):
        raise EnvError(f"The row {ctx.task.id} has no list `ground_truth` of calls.")
    first = next((turn for turn in episode.turns if turn.role == "assistant"), None)
    made = [(call.name, call.arguments) for call in first.calls] if first is not None else []
    left = [*wanted]
    for name, arguments in made:
        fitting = next((one for one in left if arguments is not None and _fits(name, arguments, one)), None)
        if fitting is None:
            return ctx.part(0.0, f"{name} is not wanted with {arguments}")
        left.remove(fitting)
    return ctx.part(float(not left), f"missing {left[0]}" if left else "")


def _fits(name: str, arguments: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    if "name" in wanted and "arguments" in wanted:
        expected, allowed = wanted["name"], {key: [value] for key, value in wanted["arguments"].items()}
    else:
        ((expected, allowed),) = wanted.items()
    if name != expected or not set(arguments) <= set(allowed):
        return False
    return all(
        any(_same(arguments[key], value) for value in values) if key in arguments else "" in values
        for key, values in allowed.items()
    )


def _same(given: Any, wanted: Any) -> bool:
    """Numbers by value, texts without case, spaces and punctuation, lists and objects by their parts."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, (int, float)) and isinstance(wanted, (int, float)):
        return given == wanted
    if isinstance(given, str) and isinstance(wanted, str):
        return _loose(given) == _loose(wanted)
    if isinstance(given, Sequence) and isinstance(wanted, Sequence) and not isinstance(given, str):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    if isinstance(given, Mapping) and isinstance(wanted, Mapping):
        listed = {key: value if isinstance(value, list) else [value] for key, value in wanted.items()}
        return set(given) <= set(listed) and all(
            any(_same(given[key], one) for one in values) if key in given else "" in values
            for key, values in listed.items()
        )
    return bool(given == wanted)


def _loose(text: str) -> str:
    return _LOOSE.sub("", text).lower().replace("'", '"')
