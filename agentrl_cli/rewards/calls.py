"""Whether a turn's calls are those that a row wants, whatever their order: the rule of function-calling benchmarks.

    ground_truth: [{"area": {"base": [10], "height": [5], "unit": ["cm", ""]}}]      a parameter to what it may be; ""
                                                                                     among them: it may be left out
    ground_truth: [{"name": "area", "arguments": {"base": 10, "height": 5}}]         the same, with one value for each

https://github.com/ShishirPatil/gorilla/tree/main/berkeley-function-call-leaderboard
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.errors import EnvError
from agentrl_cli.rewards import RewardContext, Scored
from agentrl_cli.rewards.context import answer_turns
from agentrl_cli.types import Episode


def same_calls(episode: Episode, ctx: RewardContext) -> Scored:
    """1 if the first answer makes the calls of the row's `ground_truth`, and nothing else; [] wants no call."""
    wanted = ctx.task.data.get("ground_truth")
    if not isinstance(wanted, list):
        raise EnvError(f"The row {ctx.task.id} has no list `ground_truth` of calls.")
    answers = answer_turns(episode.turns)
    made = [(call.name, call.arguments) for call in answers[0].calls] if answers else []
    fits = [
        [n for n, one in enumerate(wanted) if args is not None and _fits(name, args, one)]
        for name, args in made
    ]
    for (name, arguments), places in zip(made, fits, strict=True):
        if not places:
            return ctx.part(0.0, f"{name} is not wanted with {arguments}")
    taken = _match_calls(fits)
    missing = next((one for n, one in enumerate(wanted) if n not in taken), None)
    if len(taken) < len(made):
        return ctx.part(0.0, f"{len(made)} calls, of which {len(taken)} fit a wanted one each")
    return ctx.part(float(missing is None), "" if missing is None else f"missing {missing}")


def _match_calls(fits: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return the most wanted calls that can each have a call of its own: wanted to made, by augmenting paths."""
    taken: dict[int, int] = {}

    def place(made: int, seen: set[int]) -> bool:
        for wanted in fits[made]:
            if wanted not in seen:
                seen.add(wanted)
                if wanted not in taken or place(taken[wanted], seen):
                    taken[wanted] = made
                    return True
        return False

    for made in range(len(fits)):
        place(made, set())
    return taken


def _fits(name: str, arguments: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    if "name" in wanted and "arguments" in wanted:
        expected, allowed = (
            wanted["name"],
            {key: [value] for key, value in wanted["arguments"].items()},
        )
    else:
        if len(wanted) != 1 or not isinstance(next(iter(wanted.values())), Mapping):
            raise EnvError(
                f"A call of `ground_truth` is {{name: {{parameter: [values]}}}}, not {dict(wanted)!r:.200}."
            )
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
    if isinstance(given, list | tuple) and isinstance(wanted, list | tuple):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    if isinstance(given, Mapping) and isinstance(wanted, Mapping):
        listed = {
            key: value if isinstance(value, list) else [value] for key, value in wanted.items()
        }
        return set(given) <= set(listed) and all(
            any(_same(given[key], one) for one in values) if key in given else "" in values
            for key, values in listed.items()
        )
    return bool(given == wanted)


def _loose(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
