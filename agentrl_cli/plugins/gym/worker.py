"""Plays a Gymnasium environment (1.x) by text: what an observation shows, and a tool `act` whose actions have names.

A file's `make(**options)` returns an environment of its own; texts that it observes are shown as they are,
`action_names` names its discrete actions, and `goal` says what they are for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import EnumMeta
from typing import Any

NAMES: dict[str, dict[str, int]] = {
    "FrozenLakeEnv": {"right": 2, "down": 1, "left": 0, "up": 3},
    "CliffWalkingEnv": {"up": 0, "right": 1, "down": 2, "left": 3},
    "TaxiEnv": {"south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5},
    "BlackjackEnv": {"hit": 1, "stick": 0},
    "CartPoleEnv": {"left": 0, "right": 1},
    "MountainCarEnv": {"left": 0, "none": 1, "right": 2},
}
"""Names of the discrete actions, by the environment's class; others have numbers, or an enum of their own."""
GOALS = {
    "FrozenLakeEnv": "Walk from S to G. F is ice, H a hole that ends the game. [ ] is where you are.",
    "CliffWalkingEnv": "Walk x to T, at the right end of the bottom row, around the cliff C.",
    "TaxiEnv": "Fetch the passenger at the blue letter, and drop it at the magenta one. [ ] is the taxi.",
    "BlackjackEnv": "Get as close to 21 as you can, not above. You see your sum, the dealer's card, a usable ace.",
}
COLORS = {"31": "red", "32": "green", "33": "yellow", "34": "blue", "35": "magenta"}


class Gym:
    """An environment by its id, or by a file's function."""

    own_options = ("goal", "max_episode_steps")

    def __init__(self, config: dict[str, Any]) -> None:
        import gymnasium

        package, self.score = config["package"], config["score"]
        if self.score not in ("", "success"):
            raise LookupError("score", self.score, ["success"])
        options = dict(config["options"])
        self.goal = options.pop("goal", "")
        self.id = config["task"] or ("make" if package.endswith(".py") else package)
        if package.endswith(".py"):
            self._make: Callable[[int], Any] = _maker(package, self.id, options)
            return
        if package.startswith(("MiniGrid-", "BabyAI-")):
            import minigrid  # noqa: F401 - which registers them
        if package not in gymnasium.registry:
            own = [name for name in gymnasium.registry if not name.startswith("Gym")]
            raise LookupError("Gymnasium environment", package, own)
        side = options.pop("size", None) if "FrozenLake" in package else None
        self.distinct = side is not None
        modes = getattr(gymnasium.make(package, **options).unwrapped, "metadata", {})
        if "ansi" in modes.get("render_modes", ()):
            options["render_mode"] = "ansi"
        self._make = lambda seed: gymnasium.make(package, **options, **_lake(side, seed))

    @staticmethod
    def maker(name: str) -> Any:
        """Return the environment's class, or its path; None of a file's, whose message has its place."""
        import gymnasium

        return None if name.endswith(".py") else gymnasium.spec(name).entry_point

    def open(self, sample: int) -> World:
        """Return an environment, reset with the seed."""
        return World(self._make(sample), sample, self)


def _lake(side: int | None, seed: int) -> dict[str, Any]:
    """Return a lake of that size which is drawn from the seed."""
    if side is None:
        return {}
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return {"desc": generate_random_map(side, seed=seed)}


def _maker(path: str, name: str, options: Mapping[str, Any]) -> Callable[[int], Any]:
    """Return a function that makes a file's environment. Raises ValueError, with its place, if it has none.

    As of a script, modules beside the file can be imported.
    """
    spec = importlib.util.spec_from_file_location("environment", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["environment"] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(path))
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        found = [key for key, value in vars(module).items() if callable(value)]
        raise LookupError(f"function in {path}", name, found)
    with contextlib.suppress(OSError, TypeError):  # an object that can be called has no line
        path = f"{path}:{inspect.getsourcelines(make)[1]}"
    where = f"{path}: {name}"
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ValueError(f"{where} is called with {dict(options) or 'nothing'}: {error}") from None

    def made(_: int) -> Any:
        env = make(**options)
        for attribute in ("reset", "step", "action_space"):
            if not hasattr(env, attribute):
                raise ValueError(f"{where} returned {type(env).__name__}, without {attribute}")
        return env

    return made


class World:
    """One episode. `reward` is the sum of the environment's; with `score: success` whether it ended with one."""

    def __init__(self, env: Any, seed: int, gym: Gym) -> None:
        self._env, self._score = env, gym.score
        self._total, self._success = 0.0, 0.0
        base = env.unwrapped if hasattr(env, "unwrapped") else env
        self._space, self._names = env.action_space, _names(env, base)
        action = self._action_schema(gym.id)
        seen, _ = env.reset(seed=seed)
        action["description"] = "The action."
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        act = {"name": "act", "description": "Take an action.", "parameters": parameters}
        self.tools = [{"type": "function", "function": act}]
        goal = gym.goal or getattr(base, "goal", "") or GOALS.get(type(base).__name__, "")
        if not isinstance(goal, str) or not goal:
            goal = f"Play {gym.id}. Earn as much reward as you can."
        self._ask = f"Call act with action: {', '.join(self._names) or self._space}."
        self.prompt = [
            {"role": "system", "content": goal},
            {"role": "user", "content": f"{self._describe(seen)}\n{self._ask}"},
        ]

    def _action_schema(self, name: str) -> dict[str, Any]:
        """Return the JSON Schema of an action. Raises ValueError for a space whose actions no tool call can give."""
        from gymnasium.spaces import Text

        self._spoken = isinstance(self._space, Text)
        if self._names or self._spoken:
            return {"type": "string"} | ({"enum": [*self._names]} if self._names else {})
        if self._space.shape is None:  # of several parts; one of the user's own may have numbers
            kind = type(self._space).__name__
            raise ValueError(
                f"{name} takes actions of a {kind} space; a tool call can give those of Discrete, MultiDiscrete,"
                " MultiBinary, Box and Text: wrap it in a gymnasium.ActionWrapper"
            )
        return {"type": "array", "items": {"type": "number"}}

    def say(self, text: str) -> tuple[str, bool]:
        """Take a text that is an action, or the name of one, in capitals or not."""
        if self._spoken:
            return self.call("act", {"action": text.strip()})
        said = text.strip().strip(".`'\"")
        named = [name for name in self._names if name.casefold() == said.casefold()]
        return self.call("act", {"action": [*named, said][0]})

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Take an action; one that does not exist is refused and changes nothing."""
        try:
            action = self._action(arguments["action"])
        except (LookupError, ValueError, TypeError, OverflowError):
            return f"Error: {arguments['action']!r:.60} is not an action. {self._ask}", False
        seen, reward, ended, cut, _ = self._env.step(action)
        self._total += float(reward)
        self._success = float(ended and reward > 0)
        over = bool(ended or cut)
        after = "The game is over." if over else self._ask
        return f"{self._describe(seen)}\nReward {float(reward):g}. {after}", over

    def reward(self) -> float:
        """Return the reward so far."""
        return self._success if self._score == "success" else self._total

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _action(self, given: Any) -> Any:
        """Return a member of the action space. Raises LookupError, ValueError, TypeError, OverflowError."""
        if self._names:
            return self._names[str(given)]
        import numpy

        action = given
        if not self._spoken:
            action = numpy.asarray(given, self._space.dtype).reshape(self._space.shape)
        if not self._space.contains(action):
            raise ValueError("outside of the space")
        return action

    def _describe(self, seen: Any) -> str:
        if getattr(self._env, "render_mode", None) == "ansi":
            return _plain(self._env.render())
        if isinstance(seen, Mapping) and {"image", "direction", "mission"} <= set(seen):
            return "\n".join(_view(seen))
        return text_of(seen)


def _names(env: Any, base: Any) -> dict[str, int]:
    """Return the discrete actions by name; empty if actions are numbers of a Box or MultiDiscrete."""
    if not hasattr(env.action_space, "n") or env.action_space.shape:
        return {}
    if found := NAMES.get(type(base).__name__):
        return found
    first, count = int(env.action_space.start), int(env.action_space.n)
    given = getattr(base, "action_names", None)
    if given is None and isinstance(getattr(base, "actions", None), EnumMeta):
        given = [one.name for one in base.actions]
    return {str(name): first + n for n, name in enumerate(given or range(first, first + count))}


def text_of(seen: Any) -> str:
    """Return an observation of a Text, Discrete, Box, Dict or Tuple space as text."""
    if isinstance(seen, str):
        return seen
    if isinstance(seen, Mapping):
        return "\n".join(f"{key}: {text_of(value)}" for key, value in seen.items())
    if isinstance(seen, tuple):
        return ", ".join(map(text_of, seen))
    if getattr(seen, "shape", None):  # of numpy
        return str(seen.round(3).tolist())
    return f"{seen:g}" if isinstance(seen, float) else str(seen)


def _plain(rendered: str) -> str:
    """Return a rendering without its colours: highlighted text in brackets, coloured text with its colour."""

    def shown(found: re.Match[str]) -> str:
        color, text = found[1], found[2]
        return f"{text}({COLORS[color]})" if color in COLORS else f"[{text}]"

    return re.sub("\x1b\\[(\\d+)(?:;1)?m(.*?)\x1b\\[0m", shown, rendered).strip("\n")


def _view(seen: Mapping[str, Any]) -> Iterator[str]:
    """Yield MiniGrid's partial view as sentences: the mission, the carried thing, the wall ahead, things in sight."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    grid = seen["image"]
    me, last = grid.shape[0] // 2, grid.shape[1] - 1
    states = {index: f"{name} " for name, index in STATE_TO_IDX.items()}
    yield f"Mission: {seen['mission']}."
    ahead = next((n for n in range(1, last + 1) if grid[me, last - n, 0] == 2), None)
    if ahead is not None:
        yield f"A wall is {ahead} ahead."
    for y in range(last, -1, -1):
        for x in range(grid.shape[0]):
            kind, color, state = (int(number) for number in grid[x, y])
            name = IDX_TO_OBJECT[kind]
            if name in ("unseen", "empty", "wall", "floor"):
                continue
            thing = f"{states.get(state, '') if name == 'door' else ''}{IDX_TO_COLOR[color]} {name}"
            side = [f"{abs(x - me)} to the {'left' if x < me else 'right'}"] * (x != me)
            place = " and ".join([*([f"{last - y} ahead"] * (y != last)), *side])
            yield f"A {thing} is {place}." if place else f"You carry a {thing}."


WORKER, FORKED = Gym, True
