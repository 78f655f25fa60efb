"""Plays a TextArena game (0.7) by text; other players are played by a scripted or random opponent."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

MOVE = re.compile(r"\[(?!(?:GAME|Player|You)\b)[^\]\n]{1,40}\]")
"""A move in a text: what stands in brackets and does not name a speaker."""
MOST_PLAYERS = 15


class Games:
    """A game by its id, without `-raw` and `-train`: the text for the model is made here."""

    def __init__(self, config: dict[str, Any]) -> None:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        self.name, options = config["package"], dict(config["options"])
        if self.name not in ENV_REGISTRY or f"{self.name}-raw" not in ENV_REGISTRY:
            plain = [name for name in ENV_REGISTRY if re.search(r"-v\d+$", name)]
            raise LookupError("game of TextArena", self.name, plain)
        self.opponent = options.pop("opponent", [])
        self.asks = config["tool"]
        self._make: Callable[[], Any] = lambda: textarena.make(f"{self.name}-raw", **options)
        try:
            self._make()
        except LookupError as error:
            problem = f"{self.name} draws words with nltk: run `python -m nltk.downloader words"
            tagger = "averaged_perceptron_tagger_eng"
            raise ValueError(
                f"{problem} {tagger}` there, or take Sudoku-v0, Mastermind-v0 …"
            ) from error
        except (ValueError, SyntaxError, FileNotFoundError, ImportError) as error:
            raise ValueError(f"{self.name} does not start in this version: {error}") from error

    def open(self, sample: int) -> World:
        """Return the game, reset with the seed, for the first number of players that it takes."""
        env = self._make()
        for players in range(1, MOST_PLAYERS + 1):
            try:
                random.seed(sample)
                env.reset(num_players=players, seed=sample)
            except (AssertionError, ValueError):
                continue
            return World(env, self, sample)
        raise ValueError(f"{self.name} takes no number of players up to {MOST_PLAYERS}")


class World:
    """One game. The model is player 0; the reward is its own of the game's, 0 before its end."""

    def __init__(self, env: Any, games: Games, seed: int) -> None:
        self._env, self._games = env, games
        self._heard: dict[int, str] = {}
        """What each other player has read so far."""
        self._script = itertools.cycle(games.opponent or [""])
        self._random = random.Random(seed)
        self._rewards: Mapping[int, float] = {}
        text, _ = self._until_mine(False)
        self.prompt = [{"role": "user", "content": text}]

    def say(self, text: str) -> tuple[str, bool]:
        """Make a move."""
        return self._until_mine(self._step(text))

    def reward(self) -> float:
        """Return the reward of player 0."""
        return float(self._rewards.get(0, 0.0))

    def _until_mine(self, over: bool) -> tuple[str, bool]:
        """Let the others move until player 0 has its turn; return the text for it."""
        state = self._env.state
        while not over and state.current_player_id != 0:
            player = state.current_player_id
            over = self._step(self._move(player, self._read(player)))
        if over:
            state.current_player_id = 0
            self._rewards = self._env.close()[0] or {}
            return f"{self._read(0)}\nThe game is over.", True
        text = self._read(0)
        if not self._games.asks:
            return text, False
        moves = dict.fromkeys(move[1:-1] for move in MOVE.findall(text))
        return f"{text}\nCall act with action: {', '.join(moves) or 'your move'}.", False

    def _step(self, move: str) -> bool:
        """Make a move of the player whose turn it is; without brackets it gets them, as in TextArena's own wrapper."""
        over, _ = self._env.step(move if "[" in move or "]" in move else f"[{move.strip()}]")
        return bool(over)

    def _read(self, player: int) -> str:
        """Return the messages that a player has not read yet, without its own."""
        _, seen = self._env.get_observation()
        names = self._env.state.role_mapping
        lines = [
            f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in seen
            if sender != player
        ]
        return "\n".join(lines)

    def _move(self, player: int, text: str) -> str:
        """Return another player's move: the script's next, else one of those that it last read of in brackets."""
        self._heard[player] = self._heard.get(player, "") + text
        if self._games.opponent:
            return str(next(self._script))
        found = MOVE.findall(text) or MOVE.findall(self._heard[player])
        return str(self._random.choice(found or ["[pass]"]))


WORKER, FORKED = Games, True
