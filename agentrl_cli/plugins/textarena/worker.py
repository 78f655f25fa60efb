"""Plays a TextArena game (0.7) by text: each player is a model, a script, or a random one."""

from __future__ import annotations

import copy
import itertools
import random
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

MOVE = re.compile(r"\[(?!(?:GAME|Player|You)\b)[^\]\n]{1,40}\]")
"""A move in a text: what stands in brackets and does not name a speaker."""
MOST_PLAYERS = 15


class Games:
    """A game by its id, without `-raw` and `-train`: the text for the model is made here."""

    own_options = ("opponent", "eval_opponent")
    model: Mapping[str, Any] = {}
    """The episode that is asked for: `split` and `attempt`."""

    def __init__(self, config: dict[str, Any]) -> None:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        self.name, options = config["package"], dict(config["options"])
        if self.name not in ENV_REGISTRY or f"{self.name}-raw" not in ENV_REGISTRY:
            plain = [name for name in ENV_REGISTRY if re.search(r"-v\d+$", name)]
            raise LookupError("game of TextArena", self.name, plain)
        self.asked = [name for name in self.own_options if name in options]
        self.opponents = [options.pop("opponent", "self"), options.pop("eval_opponent", "random")]
        if not all(one and isinstance(one, (str, list)) for one in self.opponents):
            raise ValueError("an opponent is self, random, moves like [check, fold], or a model")
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

    @staticmethod
    def maker(name: str) -> Any:
        """Return the game's class, or its path."""
        from textarena.envs.registration import ENV_REGISTRY

        return ENV_REGISTRY[f"{name}-raw"].entry_point

    def open(self, sample: int) -> Player | Game:
        """Return the game, reset with the seed, for the first number of players that it takes.

        Of several the model plays all, or one, a different one in each attempt.
        """
        env = self._make()
        for players in range(1, MOST_PLAYERS + 1):
            try:
                random.seed(sample)
                env.reset(num_players=players, seed=sample)
            except (AssertionError, ValueError):
                continue
            if players == 1 and self.asked:
                raise ValueError(f"{self.name} has one player: leave out {self.asked[0]}")
            if players == 1:
                return Game(env, self.asks, {0: ""}, [], random.Random(sample)).players[0]
            return self._begin(env, sample, players)
        raise ValueError(f"{self.name} takes no number of players up to {MOST_PLAYERS}")

    def _begin(self, env: Any, sample: int, players: int) -> Game:
        attempt = self.model.get("attempt", 0)
        opponent = self.opponents[self.model.get("split", "train") != "train"]
        script = opponent if isinstance(opponent, list) else []
        own, models = (sample + attempt) % players, dict.fromkeys(range(players), "")
        if script or opponent == "random":
            models = {own: ""}
        elif opponent != "self":
            models = dict.fromkeys(models, opponent) | {own: ""}
        game = Game(env, self.asks, models, script, random.Random(f"{sample}/{attempt}"))
        game.prompt = [{"role": "user", "content": f"{self.name}, game {sample}"}]
        return game


class Game:
    """One game. `models`: who plays each player, "" for the model that is trained; others are scripted or random."""

    prompt: list[dict[str, str]]

    def __init__(
        self, env: Any, asks: bool, models: Mapping[int, str], script: list[str], rng: random.Random
    ) -> None:
        self.env = env
        self.players = [Player(self, player, model) for player, model in models.items()]
        self.rewards: Mapping[int, float] = {}
        """Those of the game's end."""
        self._asks, self._models, self._random = asks, models, rng
        self._script = itertools.cycle(script) if script else None
        self._listed: dict[int, str] = {}
        """The moves that a text last listed for each player."""
        self._heard: dict[int, str] = {}
        """What each scripted player has read so far."""
        self._turn, self._over = threading.Condition(), False

    def wait(self, player: int) -> tuple[str, bool]:
        """Return the text for a player once it has its turn or the game is over, and whether it is."""
        state = self.env.state
        with self._turn:
            while not self._over and state.current_player_id != player:
                if (other := state.current_player_id) in self._models:
                    self._turn.wait()
                else:
                    self._step(self.move(other, self._read(other)))
            if self._over:
                state.current_player_id = player
                return f"{self._read(player)}\nThe game is over.", True
            text = self._read(player)
        return f"{text}\n{self._ask(player, text)}" if self._asks else text, False

    def _ask(self, player: int, text: str) -> str:
        """Return a line that asks for a call, with the moves of the last line that has any, also of an earlier text."""
        lists = ([move[1:-1] for move in MOVE.findall(line)] for line in text.splitlines())
        if found := [moves for moves in lists if moves]:
            last = dict.fromkeys(found[-1])  # a single one is an example
            self._listed[player] = "your move, like " * (len(last) == 1) + ", ".join(last)
        return f"Call act with action: {self._listed.get(player, 'your move')}."

    def play(self, move: str) -> None:
        """Make a move of the player whose turn it is."""
        with self._turn:
            self._step(move)

    def leave(self) -> None:
        """End the game, also where a limit ended one player's part: no one waits any longer."""
        with self._turn:
            self._over = True
            self._turn.notify_all()

    def move(self, player: int, text: str) -> str:
        """Return another player's move: the script's next, else a legal one of those that it read of in brackets."""
        self._heard[player] = self._heard.get(player, "") + text
        if self._script is not None:
            return str(next(self._script))
        found = MOVE.findall(text) or MOVE.findall(self._heard[player])
        moves = [*dict.fromkeys(found)]
        self._random.shuffle(moves)
        return next(filter(self._is_legal, moves), "[pass]")

    def _is_legal(self, move: str) -> bool:
        """Whether the game takes a move, tried on a copy."""
        drawn, trial = random.getstate(), copy.deepcopy(self.env)
        player = trial.state.current_player_id
        trial.step(move)
        random.setstate(drawn)
        errors = getattr(trial.state, "error_count", 0)
        return not errors and not trial.state.game_info[player]["invalid_move"]

    def _step(self, move: str) -> None:
        """Make a move; without brackets it gets them, as in TextArena's own wrapper."""
        over, _ = self.env.step(move if "[" in move or "]" in move else f"[{move.strip()}]")
        if over:
            self._over, self.rewards = True, self.env.close()[0] or {}
        self._turn.notify_all()

    def _read(self, player: int) -> str:
        """Return the messages that a player has not read yet, without its own."""
        _, seen = self.env.get_observation()
        names = self.env.state.role_mapping
        lines = [
            f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in seen
            if sender != player
        ]
        return "\n".join(lines)


class Player:
    """A player that a model plays: a world for one conversation. Its reward is 0 before the game's end."""

    def __init__(self, game: Game, player: int, model: str) -> None:
        self.game, self.number = game, player
        self.name, self.model = f"player_{player}", model
        self._first: list[dict[str, str]] | None = None

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The first text; no message if the game was over before the player's first turn."""
        if (
            self._first is None
        ):  # read once; `cached_property` would let one player wait for another's
            text, over = self.game.wait(self.number)
            self._first = [] if over else [{"role": "user", "content": text}]
        return self._first

    def say(self, text: str) -> tuple[str, bool]:
        """Make a move; return the text for the player at its next turn, or at the end."""
        self.game.play(text)
        return self.game.wait(self.number)

    def reward(self) -> float:
        """Return the player's reward."""
        return float(self.game.rewards.get(self.number, 0.0))

    def leave(self) -> None:
        """End the game for all players."""
        self.game.leave()


WORKER, FORKED = Games, True
