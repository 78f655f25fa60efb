"""Plays a TextWorld challenge (1.7): a game is generated from the row's seed once, and kept in the user's cache."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "tw-simple": {"rewards": "dense", "goal": "detailed", "test": False},
    "tw-coin_collector": {"level": 1},
    "tw-treasure_hunter": {"level": 1},
    "tw-cooking": {
        **{"recipe": 1, "take": 1, "go": 1, "open": False, "cook": False, "cut": False},
        **{"drop": False, "recipe_seed": 0, "split": None},
    },
}
"""Settings of the challenges, for those that are not given."""
WORDS = {
    "rewards": ["dense", "balanced", "sparse"],
    "goal": ["detailed", "brief", "none"],
    "split": ["train", "valid", "test"],
}
"""Values of settings that are texts; the package takes any, and plays another game."""
NUMBERS = {
    "go": [range(n, n + 1) for n in (1, 6, 9, 12)],
    "recipe": [range(1, 6)],
    "take": [range(6)],
    "recipe_seed": [range(2**32)],
}
LEVELS = {
    # of at most a hundred rooms: each hundred of levels has as many rooms more for a step of the quest
    "tw-coin_collector": [range(1, 151), range(201, 234)],
    "tw-treasure_hunter": [range(1, 31)],
}


class Challenge:
    """A challenge by its name, with its settings."""

    def __init__(self, config: dict[str, Any]) -> None:
        import textworld.challenges

        name, given = config["package"], dict(config["options"])
        if name not in DEFAULTS:
            raise LookupError("challenge of TextWorld", name, [*DEFAULTS])
        self.hints = given.pop("commands", True)
        self.ask = "Call act with action: {}." if config["tool"] else "Commands: {}."
        for option in set(given) - set(DEFAULTS[name]):
            raise LookupError(f"setting of {name}", option, [*DEFAULTS[name], "commands"])
        for option, value in given.items():
            _require(name, option, value)
        self.name, self.settings = name, {**DEFAULTS[name], **given}
        self._make = textworld.challenges.CHALLENGES[name][1]

    def rows(self, limit: int) -> Iterator[dict[str, Any]]:
        """Yield rows whose games are generated when they are first played."""
        for seed in range(min(limit, 320)):
            text = f"({self.name}, seed {seed}: the game opens with its own text)"
            yield {"id": f"{seed}", "prompt": text, "sample": seed}

    def open(self, sample: int) -> World:
        """Return the game of a seed, played where no file can be written: the model may say `save` and `script`."""
        file = self._file(sample)
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
        return World(file, self)

    def _file(self, seed: int) -> str:
        """Return a game's file, generated if it is not there yet; one process does that."""
        import textworld.version
        from textworld.generator import compile_game

        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        known = "-".join(f"{key}={value}" for key, value in sorted(self.settings.items()))
        folder = Path(base, "agentrl", "textworld", textworld.version.__version__, self.name, known)
        folder.mkdir(parents=True, exist_ok=True)
        file, done = folder / f"{seed}.z8", folder / f"{seed}.done"
        with open(folder / f"{seed}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                options = textworld.GameOptions()
                options.seeds, options.path, options.force_recompile = seed, str(file), True
                compile_game(self._make(self.settings, options), options)
                done.touch()
        return str(file.absolute())


def _require(name: str, option: str, value: Any) -> None:
    """Raise LookupError or ValueError for a value that a setting does not take."""
    if option in WORDS and value is not None and value not in WORDS[option]:
        raise LookupError(f"{option} of {name}", str(value), WORDS[option])
    if isinstance(DEFAULTS[name][option], bool) and not isinstance(value, bool):
        raise ValueError(f"{option} of {name} is true or false, not {value!r}")
    ranges = LEVELS[name] if option == "level" else NUMBERS.get(option, [])
    if ranges and not (type(value) is int and any(value in one for one in ranges)):
        known = " or ".join("-".join(map(str, dict.fromkeys((r[0], r[-1])))) for r in ranges)
        raise ValueError(f"{option} of {name} is {known}, not {value!r}")


class World:
    """One game; the reward is its score, as a share of the highest."""

    def __init__(self, file: str, challenge: Challenge) -> None:
        import textworld

        infos = textworld.EnvInfos(admissible_commands=True, score=True, max_score=True)
        self._challenge, self._env = challenge, textworld.start(file, infos)
        self._state = self._env.reset()
        self.prompt = [{"role": "user", "content": self._text(False)}]

    def say(self, text: str) -> tuple[str, bool]:
        """Give a command: the first line.

        The interpreter would read another line at the next turn, a backslash as a request to itself, without end, and
        it fails at half of a character.
        """
        line = text.strip().removeprefix(">").strip().partition("\n")[0]
        self._state, _, over = self._env.step(re.sub(r"[^ -\[\]-~]", "?", line))
        return self._text(bool(over)), bool(over)

    def reward(self) -> float:
        """Return the score so far."""
        return float(self._state.score or 0) / (self._state.max_score or 1)

    def close(self) -> None:
        """End the interpreter of the game."""
        self._env.close()

    def _text(self, over: bool) -> str:
        """Return the game's answer, and the commands that it understands now unless it is over."""
        said = plain(self._state.feedback)
        if over or not self._challenge.hints:
            return said
        return f"{said}\n{self._challenge.ask.format(', '.join(known(self._state)))}"


def known(state: Any) -> list[str]:
    """Return the commands that the game understands; those that change nothing come last."""
    return sorted(
        state.admissible_commands,
        key=lambda said: said.startswith(("examine", "inventory", "look")),
    )


def plain(feedback: str) -> str:
    """Return a text of the game without its banner, its status line and empty lines."""
    text = re.sub(r"\n>\s+-=.*$", "", feedback.rstrip())
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if not re.fullmatch(r"[\s|\\/_$>]*", line)).strip()


WORKER, FORKED = Challenge, True
